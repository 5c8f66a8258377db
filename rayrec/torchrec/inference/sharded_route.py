"""Routes ids of sharded tables to the ranks that hold their rows, and vectors back; `sharded` looks up."""

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

REFUSED = -1  # instead of a batch size: this rank's batch cannot be used


@dataclass(frozen=True, slots=True)
class Stream:
    """Ids that a rank looks up for others: of one feature, all of them or those within some rows."""

    feature: str
    rows: Span | None

    @property
    def key(self) -> str:
        return self.feature if self.rows is None else f"{self.feature} {self.rows}"


@dataclass(frozen=True, slots=True)
class Read:
    """What a shard gives for a feature of its table.

    Args:
        output: the place of (table, feature) among the collection's outputs.
    """

    output: int
    stream: Stream
    shard: Shard


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of a stream, counted from its first row.

    Args:
        values: int64 [n].
        lengths: int64, of the bags.
        weights: float32 [n], where ids have weights.
        at: places of the n ids among the feature's; None: all of them.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    at: torch.Tensor | None

    @classmethod
    def of(cls, ids: JaggedTensor, rows: Span | None, weighted: bool) -> Ids:
        """Those of a feature that lie in some rows."""
        values, lengths = ids.values().long(), ids.lengths().long()
        weights = ids.weights().float() if weighted else None
        if rows is None:
            return cls(values, lengths, weights, None)
        inside = (values >= rows.start) & (values < rows.stop)
        before = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])
        at = inside.nonzero().flatten()
        kept = None if weights is None else weights[at]
        return cls(values[at] - rows.start, before[ids.offsets().long()].diff(), kept, at)

    def as_one_bag(self) -> Ids:
        """For lookups that keep a vector an id."""
        return Ids(self.values, self.lengths.new_tensor([len(self.values)]), self.weights, self.at)


class Route:
    """Of one collection.

    Args:
        tables: of the collection, in order.
        shards: of each table, every number of it once.
    """

    def __init__(self, tables: Sequence[TableConfig], shards: Mapping[str, Sequence[Shard]], group: comm.Group) -> None:
        self._group = group
        self.rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self.reads_R: list[list[Read]] = [[] for _ in range(size)]
        self.own_shards: list[tuple[TableConfig, Shard]] = []
        self.cut_by_rows: set[str] = set()
        output = 0
        for table in tables:
            for shard in shards[table.name]:
                part = shard.rows.size < table.num_embeddings
                if part:
                    self.cut_by_rows.add(table.name)
                if shard.rank == self.rank:
                    self.own_shards.append((table, shard))
                self.reads_R[shard.rank] += [
                    Read(output + place, Stream(name, shard.rows if part else None), shard)
                    for place, name in enumerate(table.feature_names)
                ]
            output += len(table.feature_names)
        self._streams_R = [list(dict.fromkeys(read.stream for read in reads)) for reads in self.reads_R]

    @property
    def streams(self) -> Iterable[Stream]:
        """All, each once."""
        return dict.fromkeys(stream for streams in self._streams_R for stream in streams)

    def refuse(self, error: ValueError, device: torch.device) -> NoReturn:
        """Call instead of `ask` if this rank's batch cannot be used: every rank then raises.

        Raises:
            ValueError: `error`.
        """
        with suppress(ValueError):  # that another rank refuses too
            self._sizes(REFUSED, [0] * len(self.reads_R), device)
        raise error

    def ask(self, ids_of: Mapping[Stream, Ids], stride: int, device: torch.device) -> list[KeyedJaggedTensor]:
        """Sends ids to the ranks that have their rows; returns each rank's ids for this one. Collective.

        Args:
            stride: bags of a stream.

        Raises:
            ValueError: another rank cannot use its batch.
        """
        requests = [[ids_of[stream] for stream in streams] for streams in self._streams_R]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        values = [torch.cat([empty, *(ids.values for ids in of)]) for of in requests]
        lengths = [torch.cat([empty, *(ids.lengths for ids in of)]) for of in requests]
        strides, counts = self._sizes(stride, [len(of) for of in values], device)
        own = self._streams_R[self.rank]
        got_lengths = self._exchanged(lengths, [len(own) * of for of in strides])
        got_values = self._exchanged(values, counts)
        got_weights: Sequence[torch.Tensor | None] = [None] * len(counts)
        if any(ids.weights is not None for ids in ids_of.values()):
            nothing = torch.empty(0, device=device)
            weights = [torch.cat([nothing, *(ids.weights for ids in of if ids.weights is not None)]) for of in requests]
            got_weights = self._exchanged(weights, counts)
        keys = [stream.key for stream in own]
        return [
            KeyedJaggedTensor(keys, of, weights, lengths=bags, stride=stride_of)
            for of, weights, bags, stride_of in zip(got_values, got_weights, got_lengths, strides, strict=True)
        ]

    def answer(self, vectors_R: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Sends each rank its vectors, flat; returns those for this rank, of which `counts` says how many numbers come
        from each rank. A collective."""
        return self._exchanged(vectors_R, counts)

    def _sizes(self, stride: int, counts: Sequence[int], device: torch.device) -> tuple[list[int], list[int]]:
        sizes = self._exchanged([torch.tensor([stride, count], device=device) for count in counts], [2] * len(counts))
        strides, got = ([int(of[k]) for of in sizes] for k in (0, 1))
        if REFUSED in strides:
            raise ValueError(
                f"rank {strides.index(REFUSED)} of {len(strides)} cannot use its batch; its error says why"
            )
        return strides, got

    def _exchanged(self, parts: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Part r goes to rank r; `counts[r]` numbers come from it."""
        sent = torch.cat([part.reshape(-1) for part in parts])
        got = sent.new_empty(sum(counts))
        comm.all_to_all(got, sent, list(counts), [part.numel() for part in parts], self._group)()
        return list(got.split(list(counts)))
