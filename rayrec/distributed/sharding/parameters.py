"""Tables as a module shows them: parameters and state under the unsharded names, whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata

from rayrec.distributed import comm
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.types import Shard
from rayrec.modules import BaseEmbeddingConfig
from rayrec.optim.optimizers import GATHER


@dataclass(frozen=True)
class LocalShard:
    """One of this rank's rectangles of a table.

    Args:
        shard: which one.
        parameter: its weights; backward updates them in place, or leaves a gradient to an optimizer.
        state: of the update inside backward, as views of what it changes; empty where there is none.
    """

    shard: Shard
    parameter: nn.Parameter
    state: dict[str, torch.Tensor]

    @property
    def weight(self) -> torch.Tensor:
        """The weights as a plain tensor over the same memory."""
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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight_tensor()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes the whole table, or a `ShardedTensor` of the same rectangles."""
        name = prefix + "weight"
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
        return given[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
    for piece in given.local_shards():
        if list(piece.metadata.shard_offsets) == [shard.rows.start, shard.cols.start]:
            return piece.tensor
    raise ValueError(f"{name}: the state dict is sharded in another way; load it through rayrec.checkpoint")


def sharded_tensor(
    shape: Sequence[int], shards: Sequence[Shard], local: Sequence[torch.Tensor], dtype: torch.dtype, place: Place
) -> torch.Tensor:
    """A tensor whose rectangles lie on many ranks, in the form that torch.distributed.checkpoint knows.

    Args:
        shape: of the whole.
        shards: all rectangles; rows and columns in units of the tensor's own dimensions.
        local: this rank's, in the order of `shards`.
    """
    metadata = [
        ShardMetadata(
            shard_offsets=[s.rows.start, s.cols.start],
            shard_sizes=list(s.shape),
            placement=f"rank:{s.rank}/{place.device.type}",
        )
        for s in shards
    ]
    mine = [m for m, s in zip(metadata, shards, strict=True) if s.rank == place.rank]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [TensorShard(tensor, m) for tensor, m in zip(local, mine, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(shape), TensorProperties(dtype=dtype)),
        process_group=place.group,
    )
