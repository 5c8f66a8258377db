"""Creates the planner's tables from a model or table configs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.kernel.choice import HOST_KERNELS, fbgemm_updates
from rayrec.distributed.kernel.optimizer_rules import rule_of
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec, optimizer_of
from rayrec.distributed.plan.module_sharder import ModuleSharder, modules_to_shard
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ShardingType
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.constraints import ParameterConstraints
from rayrec.distributed.planner.tables.limits import allowed_kernels, allowed_ranks, min_partition_of, per_feature
from rayrec.distributed.planner.tables.table import Table
from rayrec.modules.configs import BaseEmbeddingConfig

if TYPE_CHECKING:
    from torch import nn

DENSE_COPIES = 5  # weight, gradient, two optimizer moments, gradient bucket
NO_CONSTRAINTS = ParameterConstraints()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInfo:
    """One table config with its module path, available kernels and optimizer state bytes."""

    path: str
    config: BaseEmbeddingConfig
    pooled: bool
    weighted: bool
    kernels: Mapping[str, tuple[str, ...]]
    state: tuple[int, int]
    codec: Codec | None = None


def find_tables(module: nn.Module, sharders: Sequence[ModuleSharder[Any]], compute_device: str) -> list[TableInfo]:
    """Every table of every module that a sharder supports, in module order.

    Raises:
        ValueError: no module that a sharder supports.
    """
    infos = []
    for path, child, sharder in modules_to_shard(module, sharders):
        info, weights = _module_info(child, sharder), sharder.shardable_parameters(child)
        kernels = runnable_kernels(sharder, compute_device)
        for config in _configs(child):
            spec = table_optimizer(sharder, weights.get(config.name), config.name)
            infos.append(
                TableInfo(path=path, config=config, **info, **trained_by(spec, config, kernels, compute_device))
            )
    if not infos:
        kinds = ", ".join(sharder.module_type.__name__ for sharder in sharders) or "none given"
        raise ValueError(f"{type(module).__name__} holds no module that the sharders ({kinds}) can shard")
    return infos


def dense_bytes(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> int:
    """The bytes of unsharded parameters with gradients, optimizer state and buckets."""
    sharded = {id(p) for _, child, _ in modules_to_shard(module, sharders) for p in child.parameters()}
    unsharded = {id(p): p for p in module.parameters() if id(p) not in sharded}
    return DENSE_COPIES * sum(p.numel() * p.element_size() for p in unsharded.values())


def planner_tables(
    found: Iterable[TableInfo],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None,
    batch_size: int,
) -> tuple[Table, ...]:
    """The planner's tables.

    Args:
        constraints: by table name, or by module path and table name joined by a dot.

    Raises:
        ValueError: a constraint for an unknown table, or an invalid constraint.
    """
    listed, constraint_of = list(found), dict(constraints or {})
    names = {f.config.name for f in listed} | {f"{f.path}.{f.config.name}" for f in listed if f.path}
    for name, constraint in constraint_of.items():
        if name not in names and not _only_load(constraint):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; tables: {', '.join(sorted(names))}"
            raise ValueError(f"constraints name table {name!r}, which the model does not have{hint}")
    return tuple(
        _table(
            f,
            constraint_of.get(f"{f.path}.{f.config.name}", constraint_of.get(f.config.name, NO_CONSTRAINTS)),
            topology,
            batch_size,
        )
        for f in listed
    )


def _only_load(constraint: ParameterConstraints) -> bool:
    """A load alone constrains nothing; a model may leave tables of its config out."""
    return constraint.row_load is not None and constraint == ParameterConstraints(row_load=constraint.row_load)


def runnable_kernels(sharder: ModuleSharder[Any], compute_device: str) -> dict[str, tuple[str, ...]]:
    """The kernels that `sharder` can run, by sharding type, by canonical names."""
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


def _module_info(module: nn.Module, sharder: ModuleSharder[Any]) -> dict[str, Any]:
    weighted = getattr(module, "is_weighted", False)
    return {
        "pooled": hasattr(module, "embedding_bag_configs"),
        "weighted": bool(weighted() if callable(weighted) else weighted),
        "codec": getattr(sharder, "codec", None),
    }


def state_bytes(optimizer: object) -> tuple[int, int]:
    """Optimizer state bytes (per row, per element) of a fused optimizer, given by name or enum.

    Raises:
        ValueError: an unknown optimizer.
    """
    return rule_of(optimizer).state_bytes


def table_optimizer(sharder: ModuleSharder[Any], weight: torch.Tensor | None = None, name: str = "") -> OptimizerSpec:
    """A table's optimizer inside backward: the one attached to its weight, else the sharder's, else SGD."""
    spec = getattr(sharder, "by_table", {}).get(name, getattr(sharder, "optimizer", None))
    if not isinstance(spec, OptimizerSpec):
        return OptimizerSpec()
    return spec if weight is None else optimizer_of(weight, spec)


def trained_by(
    spec: OptimizerSpec, config: BaseEmbeddingConfig, kernels: Mapping[str, tuple[str, ...]], compute_device: str
) -> dict[str, Any]:
    """A table's `state` and `kernels` for `TableInfo`: without kernels that cannot run its optimizer."""
    device = torch.device(compute_device)

    def runs(kernel: str) -> bool:
        in_host_memory = EmbeddingComputeKernel(kernel) in HOST_KERNELS and device.type == "cuda"
        return not in_host_memory or fbgemm_updates(spec, config, config.embedding_dim, device)

    runnable = {kind: tuple(filter(runs, of_kind)) for kind, of_kind in kernels.items()}
    return {"state": state_bytes(spec.optimizer), "kernels": runnable}


def _table(found: TableInfo, limits: ParameterConstraints, topology: Topology, batch_size: int) -> Table:
    config = found.config
    count = max(1, len(config.feature_names))
    sizes = per_feature(config.name, "batch_sizes", limits.batch_sizes, count, batch_size)
    poolings = per_feature(config.name, "num_poolings", limits.num_poolings, count, 1.0)
    factors = per_feature(config.name, "pooling_factors", limits.pooling_factors, count, 1.0)
    bags = [size * pooling * topology.world_size for size, pooling in zip(sizes, poolings, strict=True)]
    ids = [bag * factor for bag, factor in zip(bags, factors, strict=True)]
    ranks = allowed_ranks(config.name, limits.device_group, topology)
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
        weighted=found.weighted if limits.is_weighted is None else limits.is_weighted,
        state_row_bytes=found.state[0],
        state_element_bytes=found.state[1],
        kernels=allowed_kernels(config.name, found.kernels, limits, topology.compute_device, ranks, topology),
        runnable=found.kernels,
        ranks=ranks,
        min_partition=min_partition_of(config, limits),
        cache_load_factor=None if limits.cache_params is None else limits.cache_params.load_factor,
        row_load=limits.row_load,
        sent_bytes=codec.forward.mean_bytes,
        returned_bytes=codec.backward.mean_bytes,
    )


def for_world(tables: Iterable[Table], old: Topology, new: Topology) -> tuple[Table, ...]:
    """`tables` for topology `new`, with the same batch per rank and all ranks allowed."""
    scale = new.world_size / old.world_size
    ranks = tuple(range(new.world_size))
    return tuple(replace(t, ids=t.ids * scale, bags=t.bags * scale, ranks=ranks) for t in tables)
