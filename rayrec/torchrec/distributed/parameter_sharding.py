"""`ParameterSharding` and `CacheParams` with TorchRec's arguments, and the plan of one collection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from rayrec.distributed.plan import shards as plan
from rayrec.distributed.plan.sharding_plan import ModuleSharding, module_text
from rayrec.distributed.plan.shards import Shard, Span
from rayrec.modules import DataType

_NOT_SUPPORTED = {
    "output_dtype": "vectors are float32; cast the output of the collection",
    "key_value_params": "tables on disk are not supported; use fused_uvm_caching",
}


def check_output(where: str, output_dtype: object, key_value_params: object) -> None:
    """Raises ValueError for vectors of another dtype than float32, and for tables on disk."""
    for name, value in (("output_dtype", output_dtype), ("key_value_params", key_value_params)):
        if value is not None and value not in (DataType.FP32, torch.float32):
            raise ValueError(f"{where}: {name}={value} is not supported: {_NOT_SUPPORTED[name]}")


@dataclass(frozen=True, slots=True)
class CacheParams:
    """The device cache of a table with kernel `fused_uvm_caching`.

    Args:
        algorithm, reserved_memory, precision, prefetch_pipeline, stats, multipass_prefetch_config: ignored.
        load_factor: cached fraction of the rows; default: fbgemm's.

    Raises:
        ValueError: a load factor outside (0, 1].
    """

    algorithm: object = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: object = None
    prefetch_pipeline: bool | None = None
    stats: object = None
    multipass_prefetch_config: object = None

    def __post_init__(self) -> None:
        used_of(self)


def used_of(params: CacheParams | plan.CacheParams | None) -> plan.CacheParams | None:
    """Returns the settings that rayrec uses."""
    return None if params is None else plan.CacheParams(load_factor=params.load_factor)


class EmbeddingModuleShardingPlan(ModuleSharding):
    """Shardings of the tables of one collection, by name; prints as two text tables."""

    def __str__(self) -> str:
        return module_text("", self).removeprefix("module: \n")


class _AnyParameterSharding(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, plan.ParameterSharding)


class ParameterSharding(plan.ParameterSharding, metaclass=_AnyParameterSharding):
    """Creates a `rayrec.distributed.ParameterSharding` from TorchRec's arguments.

    Every `rayrec.distributed.ParameterSharding` is an instance of this class. If you pass `sharding_spec` or `ranks`,
    sharding the module adds the name and size of the table.

    Args:
        sharding_type, compute_kernel, cache_params, shards, device, local_ranks: see rayrec's class.
        ranks: ranks of a data-parallel table; for other tables pass `sharding_spec`.
        sharding_spec: one `ShardMetadata` per rectangle: offsets, sizes, and a placement such as `rank:1/cuda:1`.
        enforce_hbm, bounds_check_mode: ignored; the kernel defines the memory, and ids are checked on input.
        stochastic_rounding: rounding of 16-bit weights; overrides the setting of the optimizer.
        output_dtype: must be FP32 or None.
        key_value_params: not supported; must be None.

    Raises:
        ValueError: a setting that is not supported.
    """

    def __new__(  # type: ignore[misc]  # not an instance of this class
        cls,
        sharding_type: str,
        compute_kernel: str,
        ranks: Sequence[int] | None = None,
        sharding_spec: EnumerableShardingSpec | None = None,
        cache_params: CacheParams | plan.CacheParams | None = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: object = None,
        output_dtype: object = None,
        key_value_params: object = None,
        *,
        shards: Sequence[Shard] | None = None,
        device: str = "cpu",
        local_ranks: Mapping[int, int] | None = None,
    ) -> plan.ParameterSharding:
        check_output("ParameterSharding", output_dtype, key_value_params)
        local = dict(local_ranks or {})
        if shards is None and sharding_spec is not None:
            shards, device, local = _read_spec(sharding_spec.shards)
        elif shards is None:
            shards = [Shard(table="", rows=Span(0, 0), cols=Span(0, 0), rank=rank) for rank in ranks or ()]
        return plan.ParameterSharding(
            sharding_type,
            compute_kernel,
            shards=tuple(shards),
            device=device,
            cache_params=used_of(cache_params),
            local_ranks=local,
            stochastic_rounding=stochastic_rounding,
        )


def _read_spec(shards: Iterable[ShardMetadata]) -> tuple[list[Shard], str, dict[int, int]]:
    """Returns rectangles without table name, the device type, and device indices by rank where they differ."""
    rectangles: list[Shard] = []
    device_type, local_ranks = "cpu", {}
    for shard in shards:
        placement: Any = shard.placement
        (row, col), (rows, cols) = shard.shard_offsets, shard.shard_sizes
        rank, device = placement.rank(), placement.device()
        device_type = device.type
        if device.index is not None and device.index != rank:
            local_ranks[rank] = device.index
        rectangles.append(Shard(table="", rows=Span(row, row + rows), cols=Span(col, col + cols), rank=rank))
    return rectangles, device_type, local_ranks
