"""What a run is told: the typed config, its checks, its file and its generated reference."""

from rayrec.train.config.spec import (
    KERNELS,
    SHARDING_TYPES,
    ConstraintConfig,
    DataConfig,
    DenseOptimizerConfig,
    ModelConfig,
    OptimizersConfig,
    Section,
    ShardingConfig,
    SparseOptimizerConfig,
    StorageConfig,
    TableConfig,
    TrainConfig,
    TrainerConfig,
)

__all__ = [
    "KERNELS",
    "SHARDING_TYPES",
    "ConstraintConfig",
    "DataConfig",
    "DenseOptimizerConfig",
    "ModelConfig",
    "OptimizersConfig",
    "Section",
    "ShardingConfig",
    "SparseOptimizerConfig",
    "StorageConfig",
    "TableConfig",
    "TrainConfig",
    "TrainerConfig",
]
