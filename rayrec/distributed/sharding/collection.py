"""What sharded collections have in common: their tables as users see them, their optimizers and first weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rayrec.distributed import comm
from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel import Kernel, OptimizerSpec
from rayrec.distributed.sharding.parameters import LocalShard, ShardedTable
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.types import ModuleSharding, Shard, ShardingEnv
from rayrec.modules import BaseEmbeddingConfig, init


def make_tables(
    configs: Sequence[BaseEmbeddingConfig], kernels: Sequence[Kernel], routes: Routes, place: Place
) -> dict[str, ShardedTable]:
    """Each table by name, with this rank's rectangles over the memory that its kernels train.

    Args:
        configs: in the order of the collection.
        kernels: all of this rank's.
        routes: of the tables that are not replicated.
        place: this process among the ranks.
    """
    dense: set[str] = set()
    local: dict[str, list[LocalShard]] = {config.name: [] for config in configs}
    for kernel in kernels:
        for table, weight, state in zip(kernel.tables, kernel.weights(), kernel.states(), strict=True):
            shard = Shard(table=table.config.name, rows=table.rows, cols=table.cols, rank=place.rank)
            parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
            local[shard.table].append(LocalShard(shard, parameter, state, kernel.write_back))
            dense |= {shard.table} if table.optimizer is None else set()
    everywhere: dict[str, list[Shard]] = {config.name: [] for config in configs}
    for number, route in enumerate(routes.ranks):
        for held in route.tables.values():
            for table in held:
                shard = Shard(table=table.config.name, rows=table.rows, cols=table.cols, rank=number)
                everywhere[shard.table].append(shard)
                dense |= {shard.table} if table.optimizer is None else set()
    return {
        config.name: ShardedTable(
            config, everywhere[config.name], local[config.name], place, dense=config.name in dense
        )
        for config in configs
    }


def fill_tables(
    tables: Mapping[str, ShardedTable], weights: Mapping[str, torch.Tensor], seed: int, env: ShardingEnv
) -> None:
    """Gives every local shard its first weights: the materialized ones, or those that rank 0's seed decides."""
    seed = comm.broadcast_object(seed, env.process_group)
    with torch.no_grad():
        for name, table in tables.items():
            weight = weights[name]
            for item in table.local:
                rows, cols = item.shard.rows, item.shard.cols
                if weight.is_meta:
                    init.fill(item.weight, table.config, seed, (rows.start, rows.stop), (cols.start, cols.stop))
                else:
                    item.weight.copy_(weight[rows.start : rows.stop, cols.start : cols.stop])
            if table.replicated and not weight.is_meta:
                comm.broadcast(table.local[0].weight, env.process_group)


def optimizers_of(
    params: ModuleSharding, weights: Mapping[str, torch.Tensor], default: OptimizerSpec
) -> dict[str, OptimizerSpec | None]:
    """Each table's update inside backward; None for one whose kernel is dense.

    A data-parallel table that went through `apply_optimizer_in_backward` keeps the optimizer from there even where its
    kernel is dense: TorchRec's plans know no other kernel for it.

    Raises:
        ValueError: a sharded table with a dense kernel and an optimizer inside backward.
    """
    optimizers: dict[str, OptimizerSpec | None] = {}
    for name, weight in weights.items():
        dense = EmbeddingComputeKernel(params[name].compute_kernel) is EmbeddingComputeKernel.DENSE
        given = bool(getattr(weight, "_optimizer_classes", None))
        if dense and given and not params[name].replicated:
            raise ValueError(
                f"table {name!r}: its kernel is dense, which leaves gradients to an optimizer of yours, but "
                "apply_optimizer_in_backward gave it one that runs inside backward; take back one of the two"
            )
        optimizers[name] = None if dense and not given else optimizer_of(weight, default)
    return optimizers


def optimizer_of(weight: torch.Tensor, default: OptimizerSpec) -> OptimizerSpec:
    """The optimizer that `apply_optimizer_in_backward` left on a table's weight, else the default."""
    classes = getattr(weight, "_optimizer_classes", None)
    if not classes:
        return default
    return OptimizerSpec.from_torch(classes[-1], weight._optimizer_kwargs[-1])  # type: ignore[attr-defined]


def check_plan(configs: Sequence[BaseEmbeddingConfig], params: ModuleSharding) -> None:
    """Raises ValueError for a table that the plan does not have, or the other way round, and for an unknown kernel."""
    unlike = {config.name for config in configs} ^ set(params)
    if unlike:
        raise ValueError(f"plan and collection differ in table {min(unlike)!r}; plan again for this model")
    for name, sharding in params.items():
        try:
            EmbeddingComputeKernel(sharding.compute_kernel)
        except ValueError:
            known = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
            raise ValueError(
                f"table {name!r}: there is no compute kernel {sharding.compute_kernel!r}; there are {known}"
            ) from None


def refuse_scaled_gradients() -> None:
    """Raises ValueError under an autocast whose gradients must be scaled: the optimizer inside backward would take the
    scale for a part of the gradient."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16:
            raise ValueError(
                "float16 autocast needs a GradScaler, whose factor the tables' optimizer inside backward would take "
                "for a part of the gradient; use bfloat16, or kernel 'dense', which leaves gradients to your optimizer"
            )


def default_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
