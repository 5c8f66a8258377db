"""Validates one table's constraints: allowed kernels and ranks, numbers per feature, narrowest column cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.constraints import ParameterConstraints
from rayrec.modules.configs import BaseEmbeddingConfig

DEFAULT_MIN_PARTITION = 16


def allowed_kernels(
    name: str,
    runnable: Mapping[str, tuple[str, ...]],
    limits: ParameterConstraints,
    compute_device: str,
    ranks: tuple[int, ...],
    topology: Topology,
) -> dict[str, tuple[str, ...]]:
    """The allowed kernels by allowed sharding type.

    Raises:
        ValueError: an unknown sharding type or kernel, or nothing allowed.
    """
    types = (
        list(runnable)
        if limits.sharding_types is None
        else _known_types(name, limits.sharding_types, runnable, compute_device)
    )
    if len(ranks) < topology.world_size:  # data_parallel needs every rank
        types = [kind for kind in types if kind != ShardingType.DATA_PARALLEL.value]
    if limits.compute_kernels is None:
        # A dense kernel needs a torch optimizer, so it is used only on request or as the last choice.
        allowed = {k: tuple(c for c in runnable[k] if c != "dense") or tuple(runnable[k]) for k in types}
    else:
        requested = [_kernel(name, kernel, runnable, compute_device) for kernel in limits.compute_kernels]
        allowed = {kind: tuple(kernel for kernel in runnable[kind] if kernel in requested) for kind in types}
    allowed = {kind: kernels for kind, kernels in allowed.items() if kernels}
    if not allowed:
        offers = "; ".join(f"{kind}: {', '.join(kernels)}" for kind, kernels in runnable.items())
        raise ValueError(
            f"table {name!r}: no kernel of {limits.compute_kernels} runs with {types or limits.sharding_types} "
            f"on {compute_device} ranks {_short(ranks)}; what can run: {offers}"
        )
    return allowed


def _short(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]} .. {ranks[-1]}]"


def _known_types(
    name: str, wanted: Sequence[str], runnable: Mapping[str, tuple[str, ...]], compute_device: str
) -> list[str]:
    kinds = []
    for kind in wanted:
        value = kind.value if isinstance(kind, ShardingType) else kind
        if value not in runnable:
            every = [sharding_type.value for sharding_type in ShardingType]
            problem = "cannot run" if value in every else "does not exist"
            raise ValueError(
                f"table {name!r}: sharding type {value!r} {problem} on {compute_device}; allowed: {', '.join(runnable)}"
            )
        kinds.append(value)
    return [kind for kind in runnable if kind in kinds]


def _kernel(name: str, kernel: str, runnable: Mapping[str, tuple[str, ...]], compute_device: str) -> str:
    offered = list(dict.fromkeys(kernel for kernels in runnable.values() for kernel in kernels))
    try:
        value = EmbeddingComputeKernel(kernel).value
    except ValueError:
        value = ""
    if value not in offered:
        kernel_name = getattr(kernel, "value", kernel)
        raise ValueError(
            f"table {name!r}: compute kernel {kernel_name!r} cannot run on {compute_device}; "
            f"allowed: {', '.join(offered)}"
        )
    return value


def per_feature(name: str, what: str, given: Sequence[float] | None, count: int, default: float) -> list[float]:
    """One number per feature.

    Raises:
        ValueError: another count, or a number that is negative or not finite.
    """
    if given is None:
        return [float(default)] * count
    values = [float(value) for value in given]
    if len(values) == 1:
        values *= count
    if len(values) != count:
        raise ValueError(f"table {name!r}: {what} has {len(values)} numbers for {count} features")
    if any(not 0 <= value < float("inf") for value in values):
        raise ValueError(f"table {name!r}: {what}={list(given)} must be finite and not negative")
    return values


def allowed_ranks(name: str, group: Sequence[int] | str | None, topology: Topology) -> tuple[int, ...]:
    """The allowed ranks, ascending.

    Raises:
        ValueError: an unknown rank or another device.
    """
    if group is None or group == topology.compute_device:
        return tuple(range(topology.world_size))
    if isinstance(group, str):
        raise ValueError(
            f"table {name!r}: device_group {group!r}, but the topology has {topology.compute_device!r} devices only; "
            f"name that, or list ranks"
        )
    ranks = tuple(sorted(set(group)))
    if not ranks or ranks[0] < 0 or ranks[-1] >= topology.world_size:
        raise ValueError(
            f"table {name!r}: device_group {list(group)} must name ranks of 0 .. {topology.world_size - 1}"
        )
    return ranks


def min_partition_of(config: BaseEmbeddingConfig, limits: ParameterConstraints) -> int:
    """The smallest width of a column cut.

    Raises:
        ValueError: not a multiple of 4 from 4 to the table's dimension.
    """
    min_width = limits.min_partition
    if min_width is None:
        return DEFAULT_MIN_PARTITION
    if min_width < 4 or min_width % 4 or min_width > config.embedding_dim:
        raise ValueError(
            f"table {config.name!r}: min_partition={min_width} must be a multiple of 4 from 4 to its "
            f"embedding_dim={config.embedding_dim}"
        )
    return min_width
