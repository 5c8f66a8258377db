"""Sharded tables as modules: their parameters and state have the unsharded names under every plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from rayrec.distributed import comm
from rayrec.distributed.comm.groups import world_rank
from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.routes import Config, Routes
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.plan.shards import Shard, Span
from rayrec.modules import BaseEmbeddingConfig, init
from rayrec.optim.in_backward import GATHER


@dataclass(frozen=True)
class LocalShard:
    """One shard of a table on this rank.

    Args:
        shard: rows, columns and rank.
        parameter: the weights. Backward updates them in place, or leaves a gradient to an optimizer.
        state: views of the state of the optimizer inside backward; empty without one.
        kernel: looks up and trains the shard.
        number: position of the shard among the kernel's tables.
    """

    shard: Shard
    parameter: nn.Parameter
    state: dict[str, torch.Tensor]
    kernel: Kernel
    number: int

    @property
    def weight(self) -> torch.Tensor:
        """The weights as a plain tensor over the same memory. Read or write them before the next lookup."""
        self.kernel.write_back()
        return self.parameter.detach()

    @property
    def changed(self) -> torch.Tensor | None:
        """The marks of rows that may have changed since the last checkpoint, `[rows]`; None if nothing marks them."""
        return None if self.kernel.changed is None else self.kernel.changed.marks()[self.number]


class ShardedTable(nn.Module):
    """One table on one rank: its local shards, and the positions of all shards.

    Args:
        config: the table.
        shards: every shard of the table on every rank; empty for a replicated table.
        local: this rank's shards, in the order of `shards`.
        context: this process among the ranks.
        dense: whether gradients are left to an optimizer of the user. A rank without a shard then has an empty
            parameter, so that every rank's optimizer has the same tables.
    """

    def __init__(
        self,
        config: BaseEmbeddingConfig,
        shards: Sequence[Shard],
        local: Sequence[LocalShard],
        context: RankContext,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.shards = tuple(shards)
        self.local = tuple(local)
        self.dense = dense
        self.seed = 0  # of the initial weights
        self._context = context
        for number, item in enumerate(local):
            self.register_parameter("weight" if number == 0 else f"weight_{number}", item.parameter)
        if dense and not local:
            empty = torch.zeros(0, config.embedding_dim, dtype=config.data_type.dtype, device=context.device)
            self.register_parameter("weight", nn.Parameter(empty))
        if dense and shards:
            for parameter in self.parameters():
                setattr(parameter, GATHER, partial(comm.all_gather, group=context.group))

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole table."""
        return not self.shards

    def reset_parameters(self) -> None:
        """Initializes the local shards from the collection's seed; weights are equal under every plan."""
        with torch.no_grad():
            for item in self.local:
                rows, cols = item.shard.rows, item.shard.cols
                init.fill(item.weight, self.config, self.seed, (rows.start, rows.stop), (cols.start, cols.stop))

    def set_rows(self, rows: torch.Tensor, vectors: torch.Tensor) -> None:
        """Overwrites rows of the table. Each rank writes what its shards hold of them; call it on every rank.

        Args:
            rows: `[N]`, distinct, on the CPU.
            vectors: `[N, embedding_dim]`, on the CPU.
        """
        with torch.no_grad():
            for item in self.local:
                first, cols = item.shard.rows.start, item.shard.cols
                inside = (rows >= first) & (rows < item.shard.rows.stop)
                weight, changed = item.weight, item.changed
                local = (rows[inside] - first).to(weight.device)
                if changed is not None:
                    changed[local] = True
                weight[local] = vectors[inside, cols.start : cols.stop].to(weight)

    def renew_rows(self, rows: torch.Tensor, vectors: torch.Tensor) -> None:
        """As `set_rows`, and sets the optimizer state of the rows to that of a row that was never trained.

        Call it after the last backward that trains the rows and before their next lookup. The number of updates, by
        which Adam and LAMB correct their bias, belongs to the whole table and stays.

        Raises:
            ValueError: the table has a dense kernel, whose state the user's optimizer keeps.
        """
        if self.dense:
            raise ValueError(f"table {self.config.name!r} has kernel 'dense': rows of its optimizer cannot be reset")
        self.set_rows(rows, vectors)
        for item in self.local:
            inside = (rows >= item.shard.rows.start) & (rows < item.shard.rows.stop)
            local = rows[inside] - item.shard.rows.start
            for state in item.state.values():
                state[local.to(state.device)] = 0

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Does nothing: kernels train this memory, so neither `half()` nor `to()` may replace it.

        Raises:
            ValueError: `fn` moves tensors to another device.
        """
        probe = torch.empty(0, device=self._context.device)
        if fn(probe).device != probe.device:
            raise ValueError(
                f"table {self.config.name!r} is sharded on {probe.device} and cannot move to another device; "
                "give device to DistributedModelParallel (or to the sharder) instead"
            )
        return self

    def extra_repr(self) -> str:
        local = ", ".join(f"rows {s.shard.rows} cols {s.shard.cols}" for s in self.local) or "no local shard"
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, {local}"

    def weight_tensor(self) -> torch.Tensor:
        """The table: a plain tensor if it is replicated or there is one rank, else a `ShardedTensor`."""
        if self.replicated or self._context.world_size == 1:
            return self.local[0].weight
        shape = (self.config.num_embeddings, self.config.embedding_dim)
        local = [item.weight for item in self.local]
        return sharded_tensor(shape, self.shards, local, self.config.data_type.dtype, self._context)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The state of the optimizer inside backward, by key, sharded like the weights.

        A row-wise state has one number per row and column strip: `[rows]`, or `[rows, strips]` if columns are cut.
        """
        if self.replicated or self._context.world_size == 1:
            return dict(self.local[0].state)
        out = {}
        for key, example in self.local[0].state.items():
            shape, shards = self._state_shards(example)
            own_shards = [shard for shard in shards if shard.rank == self._context.rank]
            local = [
                item.state[key] if example.dim() == len(shape) else item.state[key][:, None].repeat(1, shard.cols.size)
                for item, shard in zip(self.local, own_shards, strict=True)
            ]
            out[key] = sharded_tensor(shape, shards, local, example.dtype, self._context)
        return out

    def _state_shards(self, state: torch.Tensor) -> tuple[tuple[int, ...], Sequence[Shard]]:
        """The shape of a state of the whole table, and its shards."""
        rows, dim = self.config.num_embeddings, self.config.embedding_dim
        if state.dim() == 2:
            return (rows, dim), self.shards
        edges = sorted({edge for shard in self.shards for edge in (shard.cols.start, shard.cols.stop)})
        strips = [replace(s, cols=Span(edges.index(s.cols.start), edges.index(s.cols.stop))) for s in self.shards]
        return ((rows,) if len(edges) == 2 else (rows, len(edges) - 1)), strips

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads a result of `optimizer_state` of a table with the same shards."""
        for key, example in self.local[0].state.items():
            shards = [item.shard for item in self.local]
            if not self.replicated:
                shards = [s for s in self._state_shards(example)[1] if s.rank == self._context.rank]
            for item, shard in zip(self.local, shards, strict=True):
                source = _slice(state[key], shard, f"{self.config.name}.{key}")
                item.state[key].copy_(source if source.dim() == example.dim() else source[:, 0])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight_tensor()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads the whole table, or a `ShardedTensor` with the same shards."""
        name = prefix + "weight"
        _, _, missing_keys, _, error_msgs = args
        source = state_dict.get(name)
        if source is None:
            missing_keys.append(name)
            return
        shape = (self.config.num_embeddings, self.config.embedding_dim)
        if tuple(source.shape) != shape:
            error_msgs.append(f"{name}: the table has shape {shape}, the state dict {tuple(source.shape)}")
            return
        with torch.no_grad():
            for item in self.local:
                item.weight.copy_(_slice(source, item.shard, name))


def _slice(tensor: torch.Tensor, shard: Shard, name: str) -> torch.Tensor:
    if not isinstance(tensor, ShardedTensor):
        rows = tensor[shard.rows.start : shard.rows.stop]
        return rows if rows.dim() == 1 else rows[:, shard.cols.start : shard.cols.stop]
    for local in tensor.local_shards():
        offsets = list(local.metadata.shard_offsets)
        if offsets == [shard.rows.start, shard.cols.start][: len(offsets)]:
            return local.tensor
    raise ValueError(f"{name}: the state dict has other shards; load it through rayrec.checkpoint")


def sharded_tensor(
    shape: Sequence[int],
    shards: Sequence[Shard],
    local: Sequence[torch.Tensor],
    dtype: torch.dtype,
    context: RankContext,
) -> torch.Tensor:
    """A tensor with shards on many ranks, in the format of torch.distributed.checkpoint.

    Args:
        shape: shape of the whole tensor; one dimension for one number per row.
        shards: all shards; rows and columns in units of the tensor's own dimensions.
        local: this rank's shards, in the order of `shards`.
    """
    metadata = [
        ShardMetadata(
            shard_offsets=[s.rows.start, s.cols.start][: len(shape)],
            shard_sizes=list(s.shape[: len(shape)]),
            placement=f"rank:{world_rank(context.group, s.rank)}/{context.devices[s.rank]}",
        )
        for s in shards
    ]
    own_metadata = [m for m, s in zip(metadata, shards, strict=True) if s.rank == context.rank]
    # The constructor requires contiguous shards, but columns of a padded table are strided: they are set afterwards.
    contiguous = [
        tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride()) for tensor in local
    ]
    out = ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorShard(tensor, m) for tensor, m in zip(contiguous, own_metadata, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(shape), TensorProperties(dtype=dtype)),
        process_group=context.group,
    )
    for shard, tensor in zip(out.local_shards(), local, strict=True):
        shard.tensor = tensor
    return out


def make_tables(setup: Setup[Config], kernels: Sequence[Kernel], routes: Routes) -> dict[str, ShardedTable]:
    """Each table by name, with this rank's shards over the memory that its kernels train.

    Args:
        setup: all tables of the collection.
        kernels: all kernels of this rank.
        routes: routes of the sharded tables.
    """
    context, dense = setup.context, {table.config.name for table in setup.tables if table.optimizer is None}
    local: dict[str, list[LocalShard]] = {table.config.name: [] for table in setup.tables}
    for kernel in kernels:
        tensors = zip(kernel.tables, kernel.weights(), kernel.states(), strict=True)
        for number, (table, weight, state) in enumerate(tensors):
            trained = not table.frozen
            parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=trained)
            if not trained:
                parameter._in_backward_optimizers = []  # type: ignore[attr-defined]  # left out by filters
            local[table.config.name].append(LocalShard(table.on(context.rank), parameter, state, kernel, number))
    shards: dict[str, list[Shard]] = {name: [] for name in local}
    for rank, route in enumerate(routes.ranks):
        for table in chain.from_iterable(route.tables.values()):
            shards[table.config.name].append(table.on(rank))
    return {
        config.name: ShardedTable(config, shards[config.name], local[config.name], context, dense=config.name in dense)
        for config in setup.configs
    }
