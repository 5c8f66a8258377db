"""Constraints of one table with TorchRec's signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.distributed.planner.tables import constraints
from rayrec.torchrec.distributed.parameter_sharding import CacheParams, used_of

NOT_SUPPORTED = ("stochastic_rounding", "output_dtype", "key_value_params", "use_virtual_table")


@dataclass(frozen=True, init=False)
class ParameterConstraints(constraints.ParameterConstraints):
    """rayrec's `ParameterConstraints` with TorchRec's further arguments.

    Args:
        enforce_hbm, bounds_check_mode, feature_names: accepted, not used.
        stochastic_rounding, output_dtype, key_value_params, use_virtual_table: not supported; leave them out.

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
            if value and name in NOT_SUPPORTED:
                raise ValueError(f"ParameterConstraints: {name} is not supported; leave it out")
            object.__setattr__(self, name, value)  # the dataclass is frozen
