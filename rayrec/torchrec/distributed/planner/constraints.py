"""Constraints of one table with TorchRec's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.planner.tables import constraints
from rayrec.torchrec.distributed.parameter_sharding import CacheParams, check_output, used_of

DATA_PARALLEL, DENSE = ShardingType.DATA_PARALLEL.value, EmbeddingComputeKernel.DENSE.value


@dataclass(frozen=True, init=False)
class ParameterConstraints(constraints.ParameterConstraints):
    """rayrec's `ParameterConstraints` with the other arguments of TorchRec.

    Args:
        sharding_types, compute_kernels: data_parallel alone implies the dense kernel; the dense kernel alone implies
            data_parallel.
        stochastic_rounding: rounding of 16-bit weights; overrides the setting of the optimizer.
        output_dtype: must be FP32 or None.
        enforce_hbm, bounds_check_mode, feature_names: ignored; the kernel defines the memory, ids are checked on input,
            and all features of a table have the same constraints.
        key_value_params, use_virtual_table: not supported; leave them out.

    Raises:
        ValueError: an argument that is not supported.
    """

    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: object = None
    feature_names: Sequence[str] | None = None
    output_dtype: object = None
    key_value_params: object = None
    use_virtual_table: bool = False

    def __init__(
        self,
        sharding_types: Sequence[str] | None = None,
        compute_kernels: Sequence[str] | None = None,
        min_partition: int | None = None,
        pooling_factors: Sequence[float] | None = None,
        num_poolings: Sequence[float] | None = None,
        batch_sizes: Sequence[int] | None = None,
        is_weighted: bool | None = None,
        cache_params: CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: object = None,
        feature_names: Sequence[str] | None = None,
        output_dtype: object = None,
        device_group: Sequence[int] | str | None = None,
        key_value_params: object = None,
        use_virtual_table: bool = False,
    ) -> None:
        check_output("ParameterConstraints", output_dtype, key_value_params)
        if use_virtual_table:
            raise ValueError("ParameterConstraints: use_virtual_table is not supported; use a dynamic table")
        only = (_values(sharding_types), _values(compute_kernels))
        if only == ([DATA_PARALLEL], None):
            compute_kernels = [DENSE]
        elif only == (None, [DENSE]):
            sharding_types = [DATA_PARALLEL]
        super().__init__(
            sharding_types=sharding_types,
            compute_kernels=compute_kernels,
            min_partition=min_partition,
            pooling_factors=pooling_factors,
            num_poolings=num_poolings,
            batch_sizes=batch_sizes,
            is_weighted=is_weighted,
            cache_params=used_of(cache_params),
            device_group=device_group,
        )
        for name, value in (
            ("enforce_hbm", enforce_hbm),
            ("stochastic_rounding", stochastic_rounding),
            ("bounds_check_mode", bounds_check_mode),
            ("feature_names", feature_names),
            ("output_dtype", output_dtype),
            ("key_value_params", key_value_params),
            ("use_virtual_table", use_virtual_table),
        ):
            object.__setattr__(self, name, value)  # the dataclass is frozen


def _values(members: Sequence[object] | None) -> list[str] | None:
    """Returns the names of sharding types or kernels, from enum members or names."""
    return None if members is None else [str(getattr(member, "value", member)) for member in members]


def with_rounding(plan: ShardingPlan, constraints: Mapping[str, ParameterConstraints] | None) -> ShardingPlan:
    """Sets `stochastic_rounding` in the plan for each table with such a constraint; returns the plan."""
    for tables in plan.plan.values():
        for name, sharding in tables.items():
            rounds = getattr((constraints or {}).get(name), "stochastic_rounding", None)
            if rounds is not None:
                tables[name] = replace(sharding, stochastic_rounding=rounds)
    return plan
