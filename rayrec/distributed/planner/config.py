"""The section `sharding` of a train config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from rayrec._runtime.strict import Section
from rayrec.distributed.comm.config import WireConfig
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType

SHARDING_TYPES = [kind.value for kind in ShardingType]
KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]


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
    dedup: Literal["auto", "on", "off"] = "auto"
    """whether an id that repeats in a worker's batch is sent and looked up once, for features that are looked up id by
    id (histories); results are the same. `auto`: in batches in which so few ids are distinct that it is faster, and
    never on GPUs, where the host finds the distinct ids and is slower than the GPU that looks them up"""
    plan: str | None = Field(
        default=None, description="path of a `plan.json` to use unchanged; `null`: plan at the start"
    )
    calibration: str | None = None
    """measured speeds for the planner, written by `jobs/calibrate.py`; `null`: `calibration.json` in `storage.path` if
    it exists, else presets"""

    @field_validator("dedup", mode="before")
    @classmethod
    def _on_or_off(cls, given: object) -> object:
        """YAML reads `on` and `off` as booleans."""
        return {True: "on", False: "off"}[given] if isinstance(given, bool) else given
