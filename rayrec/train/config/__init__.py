"""The config of a training run: its sections, checks, file and generated reference.

The names here are loaded when first used: a list of runs needs no models.
"""

from typing import TYPE_CHECKING

from rayrec._imports import lazy_names

if TYPE_CHECKING:
    from rayrec.train.config.optimizers import (
        DenseOptimizerConfig,
        OptimizersConfig,
        ScheduleConfig,
        SparseOptimizerConfig,
    )
    from rayrec.train.config.section import Section
    from rayrec.train.config.sections import (
        KERNELS,
        SHARDING_TYPES,
        ConstraintConfig,
        DataConfig,
        ModelConfig,
        ShardingConfig,
        StorageConfig,
        TableConfig,
    )
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.config.trainer import LOWER_IS_BETTER, EarlyStoppingConfig, GuardsConfig, TrainerConfig

__getattr__ = lazy_names(
    __name__,
    {
        "optimizers": "DenseOptimizerConfig OptimizersConfig ScheduleConfig SparseOptimizerConfig",
        "section": "Section",
        "sections": "KERNELS SHARDING_TYPES ConstraintConfig DataConfig "
        "ModelConfig ShardingConfig StorageConfig TableConfig",
        "train_config": "TrainConfig",
        "trainer": "LOWER_IS_BETTER EarlyStoppingConfig GuardsConfig TrainerConfig",
    },
)

__all__ = [
    "KERNELS",
    "LOWER_IS_BETTER",
    "SHARDING_TYPES",
    "ConstraintConfig",
    "DataConfig",
    "DenseOptimizerConfig",
    "EarlyStoppingConfig",
    "GuardsConfig",
    "ModelConfig",
    "OptimizersConfig",
    "ScheduleConfig",
    "Section",
    "ShardingConfig",
    "SparseOptimizerConfig",
    "StorageConfig",
    "TableConfig",
    "TrainConfig",
    "TrainerConfig",
]
