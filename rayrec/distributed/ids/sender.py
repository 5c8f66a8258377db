"""A batch's ids in the order in which they leave: the wanted features, split by the ranks that hold their rows.

A message for a rank is a header and a part. The header has counts (int64); the part has ids (int64), lengths (int32)
and, where ids carry weights, weights (float32). Messages are tensors of 4-byte words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES
from rayrec.distributed.ids.batch import (
    BATCH,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Headers,
    Ids,
    OutgoingIds,
)
from rayrec.distributed.ids.compiled_split import make_split
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor, ops


class IdSender:
    """Puts ids in the order in which ranks receive them, on the host.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id goes.
        num_counts: how many counts a header has.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool, num_counts: int) -> None:
        self._routes, self._weighted, self._num_counts = routes, weighted, num_counts
        self.split = make_split(routes, weighted, traced)
        self._packed = 0  # batches so far, by which ranks check that they are at the same one
        self._header_width = GROUPS + routes.num_groups
        self._streams = [len(route.streams) for route in routes.ranks]
        self._slots, self._sources = self._header_slots()

    def _header_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the flat header, the entry to which each (repeated) stream total is added."""
        width = self._header_width
        slots, sources, first = [], [], 0
        for rank, route in enumerate(self._routes.ranks):
            for place in range(len(route.streams)):
                slots.append(rank * width + VALUES)
                sources.append(first + place)
            for lookup in route.lookups:
                slots.append(rank * width + GROUPS + lookup.group)
                sources.append(first + lookup.stream)
            first += len(route.streams)
        return torch.tensor(slots, dtype=torch.int64), torch.tensor(sources, dtype=torch.int64)

    def pack(self, kjt: KeyedJaggedTensor, counts: Sequence[int]) -> OutgoingIds:
        """A batch, ready to leave.

        Args:
            kjt: every feature of the routes, among others; on the host.
            counts: of this batch, `num_counts` numbers for every rank.
        """
        found = self.split.split(kjt)
        row = [0] * self._header_width
        row[NUMBER], row[BATCH] = self._packed + 1, found.lengths_FB.shape[1]
        header = torch.tensor([row] * len(self._streams))
        header.view(-1).index_add_(0, self._slots, found.totals.index_select(0, self._sources))
        if counts:
            header = torch.cat([header, torch.tensor(counts).expand(header.shape[0], -1)], dim=1)
        self._packed += 1
        return OutgoingIds(found.ids, header, None, found.lengths_FB, found.origins)

    def pack_nothing(self, error: Exception) -> OutgoingIds:
        """A batch without examples, in place of one that cannot be sent: its header makes every rank raise."""
        self._packed += 1
        header = torch.zeros(len(self._streams), self._header_width, dtype=torch.int64)
        header[:, NUMBER], header[:, FAILED] = self._packed, 1
        values = torch.empty(0, dtype=torch.int64)
        ids = Ids(values.new_empty(sum(self._streams), 0), values, values.float() if self._weighted else None)
        return OutgoingIds(ids, torch.cat([header, header.new_zeros(len(header), self._num_counts)], dim=1), error)

    def words(self, outgoing: OutgoingIds) -> tuple[list[list[torch.Tensor]], list[int]]:
        """For each rank the tensors of its part, as words, and how many words they are."""
        ids = outgoing.ids
        sizes = part_sizes(outgoing.header.tolist(), self._streams, self._weighted)
        columns = [ids.values, ids.lengths.to(torch.int32)]
        columns += [] if ids.weights is None else [ids.weights.detach().to(torch.float32)]
        flat = [ops.as_words(column, WORD) for column in columns]
        pieces = [column.split(of_ranks) for column, of_ranks in zip(flat, zip(*sizes, strict=True), strict=True)]
        return [list(part) for part in zip(*pieces, strict=True)], [sum(of_rank) for of_rank in sizes]


def part_sizes(headers: Headers, streams: Sequence[int], weighted: bool) -> list[list[int]]:
    """For each of W parts the words of its ids, of its lengths and, if `weighted`, of its weights.

    Args:
        headers: of all parts.
        streams: how many streams the receiver of each has.
    """
    sizes = []
    for (count, batch, *_), num_streams in zip(headers, streams, strict=True):
        words = [count * (ID_BYTES // WORD_BYTES), batch * num_streams * (LENGTH_BYTES // WORD_BYTES)]
        sizes.append([*words, count * (WEIGHT_BYTES // WORD_BYTES)] if weighted else words)
    return sizes
