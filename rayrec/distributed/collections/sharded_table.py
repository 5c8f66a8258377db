"""Tables as a module shows them: parameters and state under the unsharded names, whatever the plan."""

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
from rayrec.distributed.comm.place import Place
from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.routes import Config, Routes
from rayrec.distributed.kernel import Kernel
from rayrec.distributed.plan.shards import Shard, Span
from rayrec.modules import BaseEmbeddingConfig, init
from rayrec.optim.in_backward import GATHER


@dataclass(frozen=True)
class LocalShard:
    """One of this rank's rectangles of a table.

    Args:
        shard: which one.
        parameter: its weights; backward updates them in place, or leaves a gradient to an optimizer.
        state: of the update inside backward, as views of what it changes; empty where there is none.
        write_back: makes the weights whole where some lie in a device cache.
    """

    shard: Shard
    parameter: nn.Parameter
    state: dict[str, torch.Tensor]
    write_back: Callable[[], None]

    @property
    def weight(self) -> torch.Tensor:
        """The weights as a plain tensor over the same memory, to be read or written before the next lookup."""
        self.write_back()
        return self.parameter.detach()


class ShardedTable(nn.Module):
    """One table on one rank: its rectangles here, and where all the others are.

    Args:
        config: the table.
        shards: every rectangle of the table on every rank; none for a replicated table.
        local: this rank's, in the order of `shards`.
        place: this process among the ranks.
        dense: gradients are left to an optimizer of the user's. Then a rank without a rectangle has an empty parameter,
            so that every rank's optimizer has the same tables.
    """

    def __init__(
        self,
        config: BaseEmbeddingConfig,
        shards: Sequence[Shard],
        local: Sequence[LocalShard],
        place: Place,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.shards = tuple(shards)
        self.local = tuple(local)
        self.dense = dense
        self.seed = 0  # of the first weights
        self._place = place
        for number, item in enumerate(local):
            self.register_parameter("weight" if number == 0 else f"weight_{number}", item.parameter)
        if dense and not local:
            nothing = torch.zeros(0, config.embedding_dim, dtype=config.data_type.dtype, device=place.device)
            self.register_parameter("weight", nn.Parameter(nothing))
        if dense and shards:
            for parameter in self.parameters():
                setattr(parameter, GATHER, partial(comm.all_gather, group=place.group))

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole table."""
        return not self.shards

    def reset_parameters(self) -> None:
        """Fills the local rectangles with the weights that the collection's seed decides, alike under every plan."""
        with torch.no_grad():
            for item in self.local:
                rows, cols = item.shard.rows, item.shard.cols
                init.fill(item.weight, self.config, self.seed, (rows.start, rows.stop), (cols.start, cols.stop))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Changes nothing: kernels train this memory, so neither `half()` nor `to()` may replace it.

        Raises:
            ValueError: `fn` moves tensors to another device.
        """
        probe = torch.empty(0, device=self._place.device)
        if fn(probe).device != probe.device:
            raise ValueError(
                f"table {self.config.name!r} is sharded on {probe.device} and cannot move to another device; "
                "give device to DistributedModelParallel (or to the sharder) instead"
            )
        return self

    def extra_repr(self) -> str:
        here = ", ".join(f"rows {s.shard.rows} cols {s.shard.cols}" for s in self.local) or "nothing here"
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, {here}"

    def weight_tensor(self) -> torch.Tensor:
        """The table: a plain tensor where it is replicated or this process is alone, else a `ShardedTensor`."""
        if self.replicated or self._place.world_size == 1:
            return self.local[0].weight
        shape = (self.config.num_embeddings, self.config.embedding_dim)
        local = [item.weight for item in self.local]
        return sharded_tensor(shape, self.shards, local, self.config.data_type.dtype, self._place)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The state of the update inside backward, by key: sharded like the weights.

        Of one number a row there is one for each column strip: `[rows]`, or `[rows, strips]` where columns are cut.
        """
        held = self.local
        if self.replicated or self._place.world_size == 1:
            return dict(held[0].state)
        out = {}
        for key, first in held[0].state.items():
            shape, shards = self._state_shards(first)
            mine = [shard for shard in shards if shard.rank == self._place.rank]
            local = [
                item.state[key] if first.dim() == len(shape) else item.state[key][:, None].repeat(1, shard.cols.size)
                for item, shard in zip(held, mine, strict=True)
            ]
            out[key] = sharded_tensor(shape, shards, local, first.dtype, self._place)
        return out

    def _state_shards(self, state: torch.Tensor) -> tuple[tuple[int, ...], Sequence[Shard]]:
        """The whole shape of a state, and where its parts lie."""
        rows, dim = self.config.num_embeddings, self.config.embedding_dim
        if state.dim() == 2:
            return (rows, dim), self.shards
        edges = sorted({edge for shard in self.shards for edge in (shard.cols.start, shard.cols.stop)})
        strips = [replace(s, cols=Span(edges.index(s.cols.start), edges.index(s.cols.stop))) for s in self.shards]
        return ((rows,) if len(edges) == 2 else (rows, len(edges) - 1)), strips

    def load_optimizer_state(self, given: Mapping[str, torch.Tensor]) -> None:
        """Takes what `optimizer_state` gave, of the same rectangles."""
        for key, first in self.local[0].state.items():
            shards = [item.shard for item in self.local]
            if not self.replicated:
                shards = [s for s in self._state_shards(first)[1] if s.rank == self._place.rank]
            for item, shard in zip(self.local, shards, strict=True):
                part = _part(given[key], shard, f"{self.config.name}.{key}")
                item.state[key].copy_(part if part.dim() == first.dim() else part[:, 0])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight_tensor()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the whole table, or a `ShardedTensor` of the same rectangles."""
        name = prefix + "weight"
        _, _, missing_keys, _, error_msgs = args
        given = state_dict.get(name)
        if given is None:
            missing_keys.append(name)
            return
        shape = (self.config.num_embeddings, self.config.embedding_dim)
        if tuple(given.shape) != shape:
            error_msgs.append(f"{name}: the table has shape {shape}, the state dict {tuple(given.shape)}")
            return
        with torch.no_grad():
            for item in self.local:
                item.weight.copy_(_part(given, item.shard, name))


def _part(given: torch.Tensor, shard: Shard, name: str) -> torch.Tensor:
    if not isinstance(given, ShardedTensor):
        rows = given[shard.rows.start : shard.rows.stop]
        return rows if rows.dim() == 1 else rows[:, shard.cols.start : shard.cols.stop]
    for piece in given.local_shards():
        offsets = list(piece.metadata.shard_offsets)
        if offsets == [shard.rows.start, shard.cols.start][: len(offsets)]:
            return piece.tensor
    raise ValueError(f"{name}: the state dict is sharded in another way; load it through rayrec.checkpoint")


def sharded_tensor(
    shape: Sequence[int], shards: Sequence[Shard], local: Sequence[torch.Tensor], dtype: torch.dtype, place: Place
) -> torch.Tensor:
    """A tensor whose rectangles lie on many ranks, in the form that torch.distributed.checkpoint knows.

    Args:
        shape: of the whole; one dimension where there is one number a row.
        shards: all rectangles; rows and columns in units of the tensor's own dimensions.
        local: this rank's, in the order of `shards`.
    """
    metadata = [
        ShardMetadata(
            shard_offsets=[s.rows.start, s.cols.start][: len(shape)],
            shard_sizes=list(s.shape[: len(shape)]),
            placement=f"rank:{world_rank(place.group, s.rank)}/{place.devices[s.rank]}",
        )
        for s in shards
    ]
    mine = [m for m, s in zip(metadata, shards, strict=True) if s.rank == place.rank]
    # torch wants contiguous shards when it is made, and works with any: columns of a padded table are strided
    contiguous = [
        tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride()) for tensor in local
    ]
    whole = ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorShard(tensor, m) for tensor, m in zip(contiguous, mine, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(shape), TensorProperties(dtype=dtype)),
        process_group=place.group,
    )
    for shard, tensor in zip(whole.local_shards(), local, strict=True):
        shard.tensor = tensor
    return whole


def make_tables(setup: Setup[Config], kernels: Sequence[Kernel], routes: Routes) -> dict[str, ShardedTable]:
    """Each table by name, with this rank's rectangles over the memory that its kernels train.

    Args:
        setup: all tables of the collection.
        kernels: all of this rank's.
        routes: of the tables that are not replicated.
    """
    place, dense = setup.place, {table.config.name for table in setup.tables if table.optimizer is None}
    local: dict[str, list[LocalShard]] = {table.config.name: [] for table in setup.tables}
    for kernel in kernels:
        for table, weight, state in zip(kernel.tables, kernel.weights(), kernel.states(), strict=True):
            parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
            local[table.config.name].append(LocalShard(table.on(place.rank), parameter, state, kernel.write_back))
    everywhere: dict[str, list[Shard]] = {name: [] for name in local}
    for number, route in enumerate(routes.ranks):
        for table in chain.from_iterable(route.tables.values()):
            everywhere[table.config.name].append(table.on(number))
    return {
        config.name: ShardedTable(
            config, everywhere[config.name], local[config.name], place, dense=config.name in dense
        )
        for config in setup.configs
    }
