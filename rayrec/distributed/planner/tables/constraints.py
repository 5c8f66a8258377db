"""What a user may set for one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.distributed.plan.shards import CacheParams
from rayrec.distributed.planner.tables.row_load import RowLoad


@dataclass(frozen=True)
class ParameterConstraints:
    """Constraints and traffic of one table. Fields left at None do not constrain.

    Args:
        sharding_types: allowed `ShardingType` values.
        compute_kernels: allowed kernel names; the prefix `batched_` is accepted.
        min_partition: smallest width of a column cut, in columns; default 16. The uncut table is always allowed.
        pooling_factors: mean ids per bag, one number per feature (or one for all features).
        num_poolings: bags per example, one number per feature; default 1.
        batch_sizes: examples per rank and step, one number per feature; default: the planner's `batch_size`.
        is_weighted: whether ids have weights; default: as the module says.
        cache_params: share of a UVM-cached table to keep in device memory; default: chosen by the planner.
        row_load: how ids are distributed over the rows; default: evenly.
        device_group: allowed ranks, or the required compute device ("cpu", "cuda").
    """

    sharding_types: Sequence[str] | None = None
    compute_kernels: Sequence[str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    is_weighted: bool | None = None
    cache_params: CacheParams | None = None
    row_load: RowLoad | None = None
    device_group: Sequence[int] | str | None = None
