"""From a model (or a list of table configs) and the user's constraints to the planner's tables. Checks all of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.kernel import rule_of
from rayrec.distributed.plan.module_sharder import ModuleSharder, modules_to_shard
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.constraints import ParameterConstraints
from rayrec.distributed.planner.tables.table import Table
from rayrec.modules.configs import BaseEmbeddingConfig

if TYPE_CHECKING:
    from torch import nn

DEFAULT_MIN_PARTITION = 16
DENSE_COPIES = 5  # weight, gradient, two optimizer moments, and the gradient bucket
NO_CONSTRAINTS = ParameterConstraints()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInfo:
    """One table config, where it is, and what can run it."""

    path: str
    config: BaseEmbeddingConfig
    pooled: bool
    weighted: bool
    kernels: Mapping[str, tuple[str, ...]]
    state: tuple[int, int]
    codec: Codec | None = None


def find_tables(module: nn.Module, sharders: Sequence[ModuleSharder[Any]], compute_device: str) -> list[TableInfo]:
    """Every table of every module that a sharder takes, in the modules' order.

    Raises:
        ValueError: no such module.
    """
    found = []
    for path, child, sharder in modules_to_shard(module, sharders):
        facts, weights = _facts(child, sharder, compute_device), sharder.shardable_parameters(child)
        for config in _configs(child):
            state = state_bytes(table_optimizer(sharder, weights.get(config.name)))
            found.append(TableInfo(path=path, config=config, state=state, **facts))
    if not found:
        kinds = ", ".join(sharder.module_type.__name__ for sharder in sharders) or "none given"
        raise ValueError(f"{type(module).__name__} holds no module that the sharders ({kinds}) can shard")
    return found


def dense_bytes(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> int:
    """Bytes of the parameters that stay whole on every rank, with gradients, optimizer state and buckets."""
    sharded = {id(p) for _, child, _ in modules_to_shard(module, sharders) for p in child.parameters()}
    whole = {id(p): p for p in module.parameters() if id(p) not in sharded}
    return DENSE_COPIES * sum(p.numel() * p.element_size() for p in whole.values())


def planner_tables(
    found: Iterable[TableInfo],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None,
    batch_size: int,
) -> tuple[Table, ...]:
    """The planner's view of `found` under `constraints` (by table name, or module path and name joined by a dot).

    Raises:
        ValueError: a constraint for a table that is not there, or one that cannot be met.
    """
    listed, told = list(found), dict(constraints or {})
    names = {f.config.name for f in listed} | {f"{f.path}.{f.config.name}" for f in listed if f.path}
    for name in told:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; tables: {', '.join(sorted(names))}"
            raise ValueError(f"constraints name table {name!r}, which the model does not have{hint}")
    return tuple(
        _table(f, told.get(f"{f.path}.{f.config.name}", told.get(f.config.name, NO_CONSTRAINTS)), topology, batch_size)
        for f in listed
    )


def runnable_kernels(sharder: ModuleSharder[Any], compute_device: str) -> dict[str, tuple[str, ...]]:
    """For each sharding type that `sharder` can execute on the device, the kernels it can run, as canonical names."""
    return {
        ShardingType(kind).value: tuple(
            EmbeddingComputeKernel(kernel).value for kernel in sharder.compute_kernels(kind, compute_device)
        )
        for kind in sharder.sharding_types(compute_device)
    }


def _configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    for getter in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, getter):
            return list(getattr(module, getter)())
    raise ValueError(f"{type(module).__name__} has neither embedding_bag_configs() nor embedding_configs()")


def _facts(module: nn.Module, sharder: ModuleSharder[Any], compute_device: str) -> dict[str, Any]:
    weighted = getattr(module, "is_weighted", False)
    return {
        "pooled": hasattr(module, "embedding_bag_configs"),
        "weighted": bool(weighted() if callable(weighted) else weighted),
        "kernels": runnable_kernels(sharder, compute_device),
        "codec": getattr(sharder, "codec", None),
    }


def state_bytes(optimizer: object) -> tuple[int, int]:
    """Optimizer state (bytes for each row, bytes for each number) under a fused optimizer, given by name or enum.

    Raises:
        ValueError: an optimizer whose state is not known.
    """
    return rule_of(optimizer).state_bytes


def table_optimizer(sharder: ModuleSharder[Any], weight: torch.Tensor | None = None) -> object:
    """The fused optimizer that a table will train with: the one left on its weight, else the sharder's, else SGD."""
    spec = getattr(sharder, "optimizer", None)
    if weight is not None and spec is not None and hasattr(weight, "_optimizer_classes"):
        from rayrec.distributed.collections.sharder import optimizer_of

        spec = optimizer_of(weight, spec)
    return getattr(spec, "optimizer", "exact_sgd")


def _table(found: TableInfo, told: ParameterConstraints, topology: Topology, batch_size: int) -> Table:
    config = found.config
    count = max(1, len(config.feature_names))
    sizes = _per_feature(config.name, "batch_sizes", told.batch_sizes, count, batch_size)
    poolings = _per_feature(config.name, "num_poolings", told.num_poolings, count, 1.0)
    factors = _per_feature(config.name, "pooling_factors", told.pooling_factors, count, 1.0)
    bags = [size * each * topology.world_size for size, each in zip(sizes, poolings, strict=True)]
    ids = [bag * factor for bag, factor in zip(bags, factors, strict=True)]
    if told.num_ids is not None:
        ids = [n * topology.world_size for n in _per_feature(config.name, "num_ids", told.num_ids, count, 0.0)]
    ranks = _ranks(config.name, told.device_group, topology)
    codec = found.codec or Codec()
    return Table(
        path=found.path,
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        element_bytes=torch.empty((), dtype=config.data_type.dtype, device="meta").element_size(),
        num_features=count,
        ids=sum(ids),
        bags=sum(bags),
        pooled=found.pooled,
        weighted=found.weighted if told.is_weighted is None else told.is_weighted,
        state_row_bytes=found.state[0],
        state_element_bytes=found.state[1],
        kernels=_allowed(config.name, found.kernels, told, topology.compute_device, ranks, topology),
        runnable=found.kernels,
        ranks=ranks,
        min_partition=_min_partition(config, told),
        cache_load_factor=None if told.cache_params is None else told.cache_params.load_factor,
        sent_bytes=codec.forward.mean_bytes,
        returned_bytes=codec.backward.mean_bytes,
    )


def _allowed(
    name: str,
    can: Mapping[str, tuple[str, ...]],
    told: ParameterConstraints,
    compute_device: str,
    ranks: tuple[int, ...],
    topology: Topology,
) -> dict[str, tuple[str, ...]]:
    types = list(can) if told.sharding_types is None else _known_types(name, told.sharding_types, can, compute_device)
    if len(ranks) < topology.world_size:  # replicas need every rank; hosts must lie inside the group as a whole
        types = [kind for kind in types if kind != ShardingType.DATA_PARALLEL.value]
    if told.compute_kernels is None:
        # a dense kernel needs an optimizer of the user's, so it is taken only where asked for or alone
        allowed = {k: tuple(c for c in can[k] if c != "dense") or tuple(can[k]) for k in types}
    else:
        wanted = [_kernel(name, kernel, can, compute_device) for kernel in told.compute_kernels]
        allowed = {kind: tuple(kernel for kernel in can[kind] if kernel in wanted) for kind in types}
    allowed = {kind: kernels for kind, kernels in allowed.items() if kernels}
    if not allowed:
        offers = "; ".join(f"{kind}: {', '.join(kernels)}" for kind, kernels in can.items())
        raise ValueError(
            f"table {name!r}: no kernel of {told.compute_kernels} runs with {types or told.sharding_types} "
            f"on {compute_device} ranks {_short(ranks)}; what can run: {offers}"
        )
    return allowed


def _short(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]} .. {ranks[-1]}]"


def _known_types(
    name: str, wanted: Sequence[str], can: Mapping[str, tuple[str, ...]], compute_device: str
) -> list[str]:
    kinds = []
    for kind in wanted:
        value = kind.value if isinstance(kind, ShardingType) else kind
        if value not in can:
            every = [each.value for each in ShardingType]
            why = "cannot run" if value in every else "does not exist"
            raise ValueError(
                f"table {name!r}: sharding type {value!r} {why} on {compute_device}; allowed: {', '.join(can)}"
            )
        kinds.append(value)
    return [kind for kind in can if kind in kinds]


def _kernel(name: str, kernel: str, can: Mapping[str, tuple[str, ...]], compute_device: str) -> str:
    offered = list(dict.fromkeys(each for kernels in can.values() for each in kernels))
    try:
        value = EmbeddingComputeKernel(kernel).value
    except ValueError:
        value = ""
    if value not in offered:
        shown = getattr(kernel, "value", kernel)
        raise ValueError(
            f"table {name!r}: compute kernel {shown!r} cannot run on {compute_device}; allowed: {', '.join(offered)}"
        )
    return value


def _per_feature(name: str, what: str, given: Sequence[float] | None, count: int, default: float) -> list[float]:
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


def _ranks(name: str, group: Sequence[int] | str | None, topology: Topology) -> tuple[int, ...]:
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


def _min_partition(config: BaseEmbeddingConfig, told: ParameterConstraints) -> int:
    least = told.min_partition
    if least is None:
        return DEFAULT_MIN_PARTITION
    if least < 4 or least % 4 or least > config.embedding_dim:
        raise ValueError(
            f"table {config.name!r}: min_partition={least} must be a multiple of 4 from 4 to its "
            f"embedding_dim={config.embedding_dim}"
        )
    return least


def for_world(tables: Iterable[Table], old: Topology, new: Topology) -> tuple[Table, ...]:
    """`tables` planned for `new` instead of `old`, with the same batch on every rank and all ranks allowed."""
    scale = new.world_size / old.world_size
    ranks = tuple(range(new.world_size))
    return tuple(replace(t, ids=t.ids * scale, bags=t.bags * scale, ranks=ranks) for t in tables)
