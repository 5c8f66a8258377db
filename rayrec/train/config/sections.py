"""Sections of the config. `rayrec/data/config.py`, `optimizers.py` and `trainer.py` define the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from rayrec.data.strict import Section
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType

SHARDING_TYPES = [kind.value for kind in ShardingType]
KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]


class TableConfig(Section):
    """One embedding table."""

    name: str = Field(min_length=1, description="unique name of the table")
    rows: int = Field(ge=1, description="rows of the table; ids map to `[0, rows)`")
    dim: int = Field(ge=1, description="width of a row")
    features: list[str] = Field(min_length=1, description="sparse features of the schema that read this table")
    pooling: Literal["sum", "mean"] = Field(default="sum", description="how the vectors of a list of ids become one")
    data_type: Literal["fp32", "fp16", "bf16"] = Field(default="fp32", description="number format of the weights")
    init: Annotated[float, Field(gt=0)] | None = None
    """the first weights lie within ±init, evenly; `null`: within ±sqrt(1 / rows)"""


class LossConfig(Section):
    """The loss of binary labels; labels that are numbers have squared error."""

    kind: Literal["bce", "focal", "mse", "pairwise"] = "bce"
    """`bce`: binary cross-entropy; `focal`: less of rows that are predicted well; `mse`: squared error of the
    probability; `pairwise`: every positive of a step above every negative (RankNet), by the product of their weights:
    it orders rows, and its scores are no probabilities"""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """labels are moved by half of it towards the other one (of bce and mse)"""
    gamma: float = Field(default=2.0, ge=0)
    """of `focal`: times `(1 - p)^gamma`, p of the label that is there"""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """of `focal`: weight of positives, that of negatives is `1 - alpha`; `null`: 1 for both"""

    @model_validator(mode="after")
    def _is_smoothed(self) -> LossConfig:
        if self.kind in ("focal", "pairwise") and self.label_smoothing:
            raise ValueError(f"label_smoothing works with bce and mse; set it to 0 for {self.kind}")
        return self


class ModelConfig(Section):
    """The model: a built-in one by name, or a user's own by import path."""

    name: str | None = None
    """a built-in model, e.g. `dlrm`; leave out when `factory` is given"""
    factory: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function` that is called as `function(tables=…, num_dense=…, device=…, **args)` and returns an
    `nn.Module` with `loss, logits = model(batch)`"""
    args: dict[str, Any] = Field(default={})
    """further arguments of the model, e.g. `dense_arch`, `over_arch`"""
    loss: LossConfig = LossConfig()
    """what is made small; a kind alone is short for `{kind: …}`. For built-in models, and others that end with a
    `rayrec.models.Head`"""

    @field_validator("loss", mode="before")
    @classmethod
    def _kind_alone(cls, given: Any) -> Any:
        return {"kind": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.name is not None and self.factory is not None:
            raise ValueError("give `name` (a built-in model) or `factory` (your own), not both")
        return self


class ConstraintConfig(Section):
    """What the planner may do with one table; what is left out is free."""

    sharding_types: list[str] | None = Field(
        default=None, min_length=1, description=f"any of {', '.join(SHARDING_TYPES)}"
    )
    compute_kernels: list[str] | None = Field(
        default=None,
        min_length=1,
        description=f"any of {', '.join(KERNELS)}; `dense` tables are trained by `optimizers.dense`",
    )
    min_partition: Annotated[int, Field(ge=4)] | None = None
    """narrowest column cut, for column-wise sharding"""
    cache_load_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """share of the rows in the device cache, under `fused_uvm_caching`; `null`: planned"""
    pooling_factor: Annotated[float, Field(gt=0)] | None = None
    """mean number of ids in a bag, for the planner's estimates"""

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
    """Number formats in which embedding vectors and their gradients travel between workers; all else is float32."""

    vectors: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = "fp32"
    """of vectors; `fp8` and `int8` have a scale for every 32 numbers"""
    gradients: Literal["fp32", "fp16", "bf16", "fp8", "int8"] = Field(default="fp32", description="of gradients")
    gradient_scale: float = Field(default=1.0, gt=0)
    """gradients are multiplied by it while they travel as `fp16` or `bf16`, for `fp16` holds nothing below 6e-8; a
    power of two rounds nothing"""


class ShardingConfig(Section):
    """How tables are spread over the workers."""

    wire: WireConfig = Field(default=WireConfig(), description="number formats between workers")

    constraints: dict[str, ConstraintConfig] = Field(default={})
    """table name → what the planner may do with it"""
    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """2D parallelism: groups of workers that have all tables each, sharded inside the group; it divides
    `trainer.num_workers` (of `[least, most]` workers: the largest number up to it that divides those there are);
    `auto`: as many as make the shortest step, as planned"""
    sync_every: int = Field(default=1, ge=1)
    """steps after which groups are synchronized. 1: gradients are averaged in every step, and groups are one training
    on the global batch; N: each trains its tables on its own rows for N steps, then they are averaged"""
    plan: str | None = Field(default=None, description="path of a `plan.json` to use as it is; `null`: plan at start")
    calibration: str | None = None
    """file of `jobs/calibrate.py` with speeds to plan by; `null`: `calibration.json` in `storage.path`, if it is there,
    else presets"""


class InitFromConfig(Section):
    """Weights that a new run begins with, tables and layers by name; what optimizers keep begins anew."""

    path: str = Field(min_length=1, description="a run folder (its newest checkpoint) or a checkpoint; a path or URI")
    renames: dict[str, str] = Field(default={})
    """name there → name here, of a table, a layer, or a module with all that is in it"""
    fresh: list[str] = Field(default=[], description="tables, layers and modules here that are not taken")


class StorageConfig(Section):
    """Where a run is kept."""

    path: str = Field(default="runs", min_length=1)
    """folder of runs, on a cluster one that every node sees; or a URI, e.g. `s3://bucket/runs`"""
    keep: int = Field(default=3, ge=1, description="newest checkpoints that are kept")
    keep_best: str | None = None
    """figure of the evaluation, own ones too, by which the best checkpoint stays; one is made for each evaluation"""
    background: bool = True
    """checkpoints are copied to host memory, where there is room, and written while training goes on (where on CPUs,
    with a fortieth of one for each rank); `false`: training waits until they are written"""
    wait_s: float = Field(default=30.0, ge=0)
    """seconds that training waits for a checkpoint which is still being written when others are due; then those are
    left out"""
    patience_s: float = Field(default=600.0, ge=0)
    """seconds to wait for storage that is away or takes nothing where there is no going on without it: at a start,
    after a loss and for a run's last checkpoint; a line every minute says so"""
