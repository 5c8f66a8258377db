"""Sends ids of sharded tables to the ranks that own the rows, and returns the vectors; used by `sharded`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch

from rayrec.distributed import comm
from rayrec.distributed.plan.shards import Shard, Span
from rayrec.quant.layout import TableConfig
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor

REFUSED = -1  # sent instead of a batch size by a rank with an invalid batch


@dataclass(frozen=True, slots=True)
class Stream:
    """The ids of a feature that a rank looks up: all ids (`rows` is None), or those in a range of rows."""

    feature: str
    rows: Span | None

    @property
    def key(self) -> str:
        return self.feature if self.rows is None else f"{self.feature} {self.rows}"


@dataclass(frozen=True, slots=True)
class Read:
    """A lookup of a feature in a shard.

    Args:
        output: index of (table, feature) among the outputs of the collection.
        stream: the ids.
        shard: the shard.
    """

    output: int
    stream: Stream
    shard: Shard


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of a stream, relative to its first row.

    Args:
        values: int64 [n].
        lengths: int64, lengths of the bags.
        weights: float32 [n], if ids have weights.
        positions: positions of the ids among those of the feature; None: all ids.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    positions: torch.Tensor | None

    @classmethod
    def of(cls, ids: JaggedTensor, rows: Span | None, weighted: bool) -> Ids:
        """Selects the ids of a feature in a range of rows."""
        values, lengths = ids.values().long(), ids.lengths().long()
        weights = ids.weights().float() if weighted else None
        if rows is None:
            return cls(values, lengths, weights, None)
        inside = (values >= rows.start) & (values < rows.stop)
        num_preceding = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])
        positions = inside.nonzero().flatten()
        weights = None if weights is None else weights[positions]
        return cls(values[positions] - rows.start, num_preceding[ids.offsets().long()].diff(), weights, positions)

    def as_one_bag(self) -> Ids:
        """Joins all bags into one, for lookups that return a vector per id."""
        return Ids(self.values, self.lengths.new_tensor([len(self.values)]), self.weights, self.positions)


class Route:
    """The exchange of ids and vectors of one collection.

    Args:
        tables: tables of the collection, in order.
        shards: shards of each table, which cover it exactly once.
        group: the ranks.
    """

    def __init__(self, tables: Sequence[TableConfig], shards: Mapping[str, Sequence[Shard]], group: comm.Group) -> None:
        self._group = group
        self.rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self.reads_R: list[list[Read]] = [[] for _ in range(size)]
        self.local_shards: list[tuple[TableConfig, Shard]] = []
        self.cut_by_rows: set[str] = set()
        output = 0
        for table in tables:
            for shard in shards[table.name]:
                is_cut = shard.rows.size < table.num_embeddings
                if is_cut:
                    self.cut_by_rows.add(table.name)
                if shard.rank == self.rank:
                    self.local_shards.append((table, shard))
                self.reads_R[shard.rank] += [
                    Read(output + index, Stream(name, shard.rows if is_cut else None), shard)
                    for index, name in enumerate(table.feature_names)
                ]
            output += len(table.feature_names)
        self._streams_R = [list(dict.fromkeys(read.stream for read in reads)) for reads in self.reads_R]

    @property
    def streams(self) -> Iterable[Stream]:
        """All distinct streams."""
        return dict.fromkeys(stream for streams in self._streams_R for stream in streams)

    def refuse(self, error: ValueError, device: torch.device) -> NoReturn:
        """Call this instead of `ask` if the batch of this rank is invalid; then every rank raises.

        Raises:
            ValueError: `error`.
        """
        with suppress(ValueError):  # raised if another rank refuses too
            self._sizes(REFUSED, [0] * len(self.reads_R), device)
        raise error

    def ask(self, ids_of: Mapping[Stream, Ids], stride: int, device: torch.device) -> list[KeyedJaggedTensor]:
        """Sends ids to the ranks that own the rows; returns the ids that each rank sent to this one. Collective.

        Args:
            ids_of: ids of each stream.
            stride: bags per stream.
            device: device of the ids.

        Raises:
            ValueError: the batch of another rank is invalid.
        """
        ids_R = [[ids_of[stream] for stream in streams] for streams in self._streams_R]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        values = [torch.cat([empty, *(ids.values for ids in rank_ids)]) for rank_ids in ids_R]
        lengths = [torch.cat([empty, *(ids.lengths for ids in rank_ids)]) for rank_ids in ids_R]
        strides, counts = self._sizes(stride, [len(rank_values) for rank_values in values], device)
        keys = [stream.key for stream in self._streams_R[self.rank]]
        received_lengths = self._exchanged(lengths, [len(keys) * stride for stride in strides])
        received_values = self._exchanged(values, counts)
        received_weights: Sequence[torch.Tensor | None] = [None] * len(counts)
        if any(ids.weights is not None for ids in ids_of.values()):
            no_weights = torch.empty(0, device=device)
            weights = [
                torch.cat([no_weights, *(ids.weights for ids in rank_ids if ids.weights is not None)])
                for rank_ids in ids_R
            ]
            received_weights = self._exchanged(weights, counts)
        received = zip(received_values, received_weights, received_lengths, strides, strict=True)
        return [
            KeyedJaggedTensor(keys, rank_values, rank_weights, lengths=rank_lengths, stride=rank_stride)
            for rank_values, rank_weights, rank_lengths, rank_stride in received
        ]

    def answer(self, vectors_R: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Sends vectors, flat, to each rank; returns the `counts[r]` values received from each rank r. Collective."""
        return self._exchanged(vectors_R, counts)

    def _sizes(self, stride: int, counts: Sequence[int], device: torch.device) -> tuple[list[int], list[int]]:
        sizes = self._exchanged([torch.tensor([stride, count], device=device) for count in counts], [2] * len(counts))
        strides, received_counts = ([int(size[column]) for size in sizes] for column in (0, 1))
        if REFUSED in strides:
            raise ValueError(
                f"rank {strides.index(REFUSED)} of {len(strides)} has an invalid batch; see the error of this rank"
            )
        return strides, received_counts

    def _exchanged(self, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Sends `tensors[r]` to rank r; receives `counts[r]` values from it."""
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = sent.new_empty(sum(counts))
        comm.all_to_all(received, sent, list(counts), [tensor.numel() for tensor in tensors], self._group)()
        return list(received.split(list(counts)))
