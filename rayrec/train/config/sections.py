"""Sections of the config. `rayrec/data/config.py`, `optimizers.py` and `trainer.py` define the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rayrec._runtime.strict import Section
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType

SHARDING_TYPES = [kind.value for kind in ShardingType]
KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]


class TableConfig(Section):
    """One embedding table."""

    name: str = Field(min_length=1, description="unique name of the table")
    rows: int = Field(ge=1, description="rows of the table; ids map to `[0, rows)`")
    dim: int = Field(ge=1, description="width of a row")
    features: list[str] = Field(min_length=1, description="sparse features that look up this table")
    pooling: Literal["sum", "mean"] = Field(default="sum", description="how to pool the vectors of an id list")
    data_type: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="number format of the weights")
    init: Annotated[float, Field(gt=0)] | None = None
    """initial weights are uniform in ±init; `null`: ±sqrt(1 / rows)"""


class LossConfig(Section):
    """The loss of binary labels. Numeric labels use squared error."""

    kind: Literal["bce", "focal", "mse", "pairwise"] = "bce"
    """`bce`: binary cross-entropy; `focal`: focal loss, down-weights well-predicted rows; `mse`: squared error of the
    probability; `pairwise`: RankNet over the positives and negatives of a step, weighted by the product of their
    weights; its scores rank rows but are not probabilities"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """label smoothing for `bce` and `mse`: moves each label halfway by this amount towards the other class"""
    gamma: float = Field(default=2.0, ge=0)
    """focusing exponent of `focal`: scales the loss by `(1 - p)^gamma`, p the probability of the true label"""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """class weight of `focal`: `alpha` for positives, `1 - alpha` for negatives; `null`: 1 for both"""

    @model_validator(mode="after")
    def _is_smoothed(self) -> LossConfig:
        if self.kind in ("focal", "pairwise") and self.label_smoothing:
            raise ValueError(f"label_smoothing works with bce and mse; set it to 0 for {self.kind}")
        return self


class ModelConfig(Section):
    """A built-in model by name, or your own by import path."""

    name: str | None = None
    """built-in model, e.g. `dlrm`; omit it if you set `factory`"""
    factory: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, called as `function(tables=…, num_dense=…, device=…, **args)`; returns an `nn.Module`
    whose `model(batch)` returns `loss, logits`"""
    args: dict[str, Any] = Field(default={})
    """arguments of the model, e.g. `dense_arch`, `over_arch`"""
    loss: LossConfig = LossConfig()
    """the loss; a plain kind is short for `{kind: …}`. Applies to built-in models and to your own if they end with
    `rayrec.models.Head`"""

    @field_validator("loss", mode="before")
    @classmethod
    def _kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.name is not None and self.factory is not None:
            raise ValueError("set `name` (a built-in model) or `factory` (your own), not both")
        return self


class ConstraintConfig(Section):
    """Restricts the planner for one table. Omitted fields are unrestricted."""

    sharding_types: list[str] | None = Field(
        default=None, min_length=1, description=f"any of {', '.join(SHARDING_TYPES)}"
    )
    compute_kernels: list[str] | None = Field(
        default=None,
        min_length=1,
        description=f"any of {', '.join(KERNELS)}; `dense` tables are trained by `optimizers.dense`",
    )
    min_partition: Annotated[int, Field(ge=4)] | None = None
    """minimum shard width for column-wise sharding"""
    cache_load_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """fraction of the rows to cache on the device with `fused_uvm_caching`; `null`: chosen by the planner"""
    pooling_factor: Annotated[float, Field(gt=0)] | None = None
    """mean ids per bag, used in the planner's estimates"""

    @field_validator("sharding_types", "compute_kernels")
    @classmethod
    def _known(cls, given: list[str] | None, field: ValidationInfo) -> list[str] | None:
        allowed = SHARDING_TYPES if field.field_name == "sharding_types" else KERNELS
        for value in given or []:
            if value not in allowed:
                what = "sharding type" if allowed is SHARDING_TYPES else "compute kernel"
                raise ValueError(f"{value!r} is not a {what}; allowed: {', '.join(allowed)}")
        return given


class WireConfig(Section):
    """Communication formats of embedding vectors and their gradients. Everything else is exchanged as float32."""

    vectors: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = "fp32"
    """format of embedding vectors; `fp8` and `int8` use one scale per 32 values"""
    gradients: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = Field(default="fp32", description="format of gradients")
    gradient_scale: float = Field(default=1.0, gt=0)
    """multiplies gradients sent as `fp16` or `bf16`, because `fp16` underflows below 6e-8; a power of two is exact"""


class ShardingConfig(Section):
    """How tables are sharded over the workers."""

    wire: WireConfig = Field(default=WireConfig(), description="communication formats")

    constraints: dict[str, ConstraintConfig] = Field(default={})
    """table name → restrictions for the planner"""
    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """2D parallelism: number of worker groups, each of which shards all tables. Must divide `trainer.num_workers` (for
    `[least, most]`, the largest divisor up to this value is used); `auto`: the number with the shortest planned
    step"""
    sync_every: int = Field(default=1, ge=1)
    """steps between synchronizations of the groups. 1: gradients are averaged every step, equal to training on the
    global batch; N: each group trains on its own rows for N steps, then weights are averaged"""
    plan: str | None = Field(
        default=None, description="path of a `plan.json` to use unchanged; `null`: plan at the start"
    )
    calibration: str | None = None
    """measured speeds for the planner, written by `jobs/calibrate.py`; `null`: `calibration.json` in `storage.path` if
    it exists, else presets"""


class InitFromConfig(Section):
    """Initial weights for a new run, matched by table and layer name. Optimizer state is not loaded."""

    path: str = Field(min_length=1, description="run folder (uses its newest checkpoint) or checkpoint; a path or URI")
    renames: dict[str, str] = Field(default={})
    """name in the checkpoint → name in this run, for a table, a layer, or a whole module"""
    fresh: list[str] = Field(
        default=[], description="tables, layers and modules of this run to initialize randomly instead"
    )


class StorageConfig(Section):
    """Where a run is stored."""

    path: str = Field(default="runs", min_length=1)
    """folder of runs, shared by all nodes on a cluster; or a URI, e.g. `s3://bucket/runs`"""
    keep: int = Field(default=3, ge=1, description="number of newest checkpoints to keep")
    keep_best: str | None = None
    """metric that selects the best checkpoint, which is kept; saves a checkpoint at each evaluation"""
    background: bool = True
    """write checkpoints in the background: copy them to host memory if it suffices (on CPUs, one fortieth per rank)
    while training continues; `false`: training waits for each write"""
    wait_s: float = Field(default=30.0, ge=0)
    """maximum seconds to wait for the previous checkpoint before skipping the next one"""
    patience_s: float = Field(default=600.0, ge=0)
    """maximum seconds to wait for unavailable storage where training cannot continue without it: at the start, after a
    failure, and for the final checkpoint; reported every minute"""
