"""A batch's ids in the order in which they leave: the wanted features, split by the ranks that hold their rows.

A message for a rank is a header and a part. The header has counts (int64); the part has ids (int64), lengths (int32)
and, where ids carry weights, weights (float32). Messages are tensors of 4-byte words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES
from rayrec.distributed.ids.batch import (
    BATCH,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Counts,
    Headers,
    Ids,
    OutgoingIds,
    Split,
    Trace,
)
from rayrec.distributed.ids.buckets import Buckets
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor

SPLIT_LOOPS = "rayrec.distributed.ids.split_loops"


class IdSender:
    """Puts ids in the order in which ranks receive them, on the host.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id goes.
        num_counts: how many counts a header has.

    Attributes:
        streams: how many each rank receives.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool, num_counts: int) -> None:
        self._routes, self._weighted, self._num_counts = routes, weighted, num_counts
        self.split = CompiledSplit(routes, weighted, traced)
        self._packed = 0  # batches so far, by which ranks check that they are at the same one
        self._header_width = GROUPS + routes.num_groups
        self.streams = [len(route.streams) for route in routes.ranks]
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

    def pack(self, kjt: KeyedJaggedTensor, counts: Sequence[int], counted: Counts | None = None) -> OutgoingIds:
        """A batch, ready to leave.

        Args:
            kjt: every feature of the routes, among others; on the host.
            counts: of this batch, `num_counts` numbers for every rank.
            counted: its ids, if the device splits them.
        """
        found = self.split.split(kjt) if counted is None else counted
        row = [0] * self._header_width
        row[NUMBER], row[BATCH] = self._packed + 1, kjt.stride()
        header = torch.tensor([row] * len(self.streams))
        header.view(-1).index_add_(0, self._slots, found.totals.index_select(0, self._sources))
        if counts:
            header = torch.cat([header, torch.tensor(counts).expand(header.shape[0], -1)], dim=1)
        self._packed += 1
        if isinstance(found, Counts):
            return OutgoingIds(None, header, counted=found)
        return OutgoingIds(found.ids, header, None, found.trace)

    def pack_nothing(self, error: Exception) -> OutgoingIds:
        """A batch without examples, in place of one that cannot be sent: its header makes every rank raise."""
        self._packed += 1
        header = torch.zeros(len(self.streams), self._header_width, dtype=torch.int64)
        header[:, NUMBER], header[:, FAILED] = self._packed, 1
        values = torch.empty(0, dtype=torch.int64)
        ids = Ids(values.new_empty(sum(self.streams), 0), values, values.float() if self._weighted else None)
        return OutgoingIds(ids, torch.cat([header, header.new_zeros(len(header), self._num_counts)], dim=1), error)

    def words(self, ids: Ids, sizes: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
        """For each rank the columns of its part, as words; `sizes` are those of `part_sizes`."""
        columns = [ids.values, ids.lengths.to(torch.int32)]
        columns += [] if ids.weights is None else [ids.weights.detach().to(torch.float32)]
        flat = [column.view(-1).view(WORD) for column in columns]
        pieces = [column.split(of_ranks) for column, of_ranks in zip(flat, zip(*sizes, strict=True), strict=True)]
        return [list(part) for part in zip(*pieces, strict=True)]


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


class CompiledSplit:
    """Splits ids by compiled loops.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id comes from.

    Attributes:
        checked: features whose ids are compared with the rows of the tables of `routes`: all.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool) -> None:
        self._loops, self._buckets = loops(SPLIT_LOOPS), Buckets(routes)
        self._weighted, self._traced = weighted, traced
        self.checked = frozenset(routes.features)

    def split(self, kjt: KeyedJaggedTensor) -> Split:
        """Splits every feature of the routes; `kjt` is on the host, and may have others.

        Raises:
            ValueError: an id is outside its table's rows.
        """
        place, loops, of = kjt.index_per_key(), self._loops, self._buckets
        key_F = np.array([place[feature] for feature in of.features], np.int64)
        key_V = key_F[of.feature_V]
        lengths_KB = kjt.lengths().view(len(kjt.keys()), kjt.stride()).to(torch.int32).contiguous().numpy()
        values = kjt.values().to(torch.int64).contiguous().numpy().view(np.uint64)
        first_K = np.array(kjt.offset_per_key())
        size_V = np.diff(first_K)[key_V]
        cut_V = np.where(of.buckets_V > 1, size_V, 0)
        first_V = cut_V.cumsum() - cut_V
        bucket_N = np.empty(int(cut_V.sum()), np.uint16)
        lengths_SB = torch.empty(of.num_streams + of.num_unread, kjt.stride(), dtype=torch.int32)
        totals = torch.empty(len(lengths_SB), dtype=torch.int64)
        out_SB, total_S = lengths_SB.numpy(), totals.numpy()
        outside = in_threads(
            loops.count,
            size_V,
            (values, lengths_KB, first_K, key_V, of.buckets_V, of.block_V, of.edges_VE, of.stream_VE),
            (first_V, out_SB, total_S, bucket_N),
        )
        if outside >= 0:
            raise of.error(kjt, outside)
        total_S[of.repeated[:, 1]] = total_S[of.repeated[:, 0]]
        num_ids = int(total_S.sum())
        first_S = (total_S.cumsum() - total_S).view(np.uint64)
        weights = kjt.weights() if self._weighted else None
        trained = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        given = np.empty(0, np.float32)
        if weights is not None and not trained:
            given = weights.detach().to(torch.float32).contiguous().numpy()
        out = torch.empty(num_ids, dtype=torch.int64)
        moved = torch.empty(num_ids if weights is not None and not trained else 0)
        origins = torch.empty(num_ids if self._traced or trained else 0, dtype=torch.int64)
        shift_V = np.zeros_like(first_V)
        if self._traced:
            size_F = np.diff(first_K)[key_F]
            shift_V = (size_F.cumsum() - size_F - first_K[key_F])[of.feature_V]
        out_N, moved_N, origin_N = out.numpy().view(np.uint64), moved.numpy(), origins.numpy()

        outside = in_threads(
            loops.move,
            size_V,
            (values, given, first_K, key_V, of.buckets_V, of.edges_VE, of.stream_VE, first_V, first_S),
            (bucket_N, out_N, moved_N, origin_N, shift_V),
        )
        if outside >= 0:
            raise of.error(kjt, outside)
        loops.repeat(of.repeated, first_S, total_S, out_SB, out_N, moved_N, origin_N)
        if weights is not None:
            moved = weights[origins] if trained else moved.to(weights.dtype)
        if of.num_unread:
            num_ids = int(totals[: of.num_streams].sum())
            lengths_SB, totals = lengths_SB[: of.num_streams], totals[: of.num_streams]
            out, moved, origins = out[:num_ids], moved[:num_ids], origins[:num_ids]
        ids = Ids(lengths_SB, out, None if weights is None else moved)
        return Split(ids, totals, Trace(torch.from_numpy(lengths_KB[key_F]), origins) if self._traced else None)
