"""Splits a batch's ids by the ranks that hold their rows, and packs them into messages.

A message for a rank is a header and a part. The header has counts (int64); the part has ids (int64), lengths (int32)
and, if ids carry weights, weights (float32). Messages are tensors of 4-byte words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES
from rayrec.distributed.ids.batch import (
    BATCH,
    COLLECTION,
    FAILED,
    GROUPS,
    NUMBER,
    VALUES,
    WORD,
    WORD_BYTES,
    Headers,
    Ids,
    OutgoingIds,
    WordCounts,
)
from rayrec.distributed.ids.buckets import Buckets
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

SPLIT_LOOPS = "rayrec.distributed.ids.split_loops"


class IdSender:
    """Puts ids in the order in which ranks receive them, on the host.

    Args:
        routes: routes of the collection.
        weighted: whether ids carry weights.
        traced: whether to record the origin of each id.
        num_counts: number of counts for other executors in a header.

    Attributes:
        streams: number of streams that each rank receives.
        collection: number of the collection, equal on all ranks; ranks check that they look up the same one.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool, num_counts: int) -> None:
        self._weighted, self._traced, self._num_counts = weighted, traced, num_counts
        self._loops, self._buckets = loops(SPLIT_LOOPS), Buckets(routes)
        self.collection = 0
        self._num_packed = 0  # ranks check that they are at the same batch
        self._header_width = GROUPS + routes.num_groups
        self.streams = [len(route.streams) for route in routes.ranks]
        self._slots, self._sources = _header_slots(routes, self._header_width)

    def pack(
        self,
        kjt: KeyedJaggedTensor,
        counts: Sequence[int],
        device_counts: tuple[torch.Tensor, int] | None = None,
    ) -> OutgoingIds:
        """Splits a batch, and makes its headers.

        Args:
            kjt: every feature of the routes, and maybe others; on the host.
            counts: `num_counts` numbers of this batch for every rank.
            device_counts: result of `DeviceSplit.count`, if the device splits the ids.

        Raises:
            ValueError: an id is outside its table's rows.
        """
        ids, lengths_FB, origins, num_ids, num_cut = None, None, None, 0, 0
        if device_counts is None:
            ids, total_S, lengths_FB, origins = self._split(kjt)
        else:
            total_S, num_cut = device_counts
            num_ids = int(total_S.sum())
        row = [0] * self._header_width
        row[NUMBER], row[BATCH], row[COLLECTION] = self._num_packed + 1, kjt.stride(), self.collection
        header = torch.tensor([row] * len(self.streams))
        header.view(-1).index_add_(0, self._slots, total_S.index_select(0, self._sources))
        if counts:
            header = torch.cat([header, torch.tensor(counts).expand(header.shape[0], -1)], dim=1)
        self._num_packed += 1
        return OutgoingIds(ids, header, None, lengths_FB, origins, num_ids, num_cut)

    def pack_failure(self, error: Exception, is_packed: bool = False) -> OutgoingIds:
        """An empty batch instead of a batch that failed: its header makes every rank raise.

        Args:
            error: the reason.
            is_packed: whether `pack` returned the batch, which has its number already.
        """
        self._num_packed += not is_packed
        header = torch.zeros(len(self.streams), self._header_width, dtype=torch.int64)
        header[:, NUMBER], header[:, FAILED], header[:, COLLECTION] = self._num_packed, 1, self.collection
        values = torch.empty(0, dtype=torch.int64)
        ids = Ids(values.new_empty(sum(self.streams), 0), values, values.float() if self._weighted else None)
        return OutgoingIds(ids, torch.cat([header, header.new_zeros(len(header), self._num_counts)], dim=1), error)

    def words(self, ids: Ids, sizes: WordCounts) -> list[list[torch.Tensor]]:
        """For each rank the columns of its part, as words; `sizes` come from `part_sizes`."""
        columns = [ids.values, ids.lengths.to(torch.int32)]
        columns += [] if ids.weights is None else [ids.weights.detach().to(torch.float32)]
        by_column = zip((column.view(-1).view(WORD) for column in columns), zip(*sizes, strict=True), strict=True)
        return [list(columns) for columns in zip(*(words.split(counts) for words, counts in by_column), strict=True)]

    def _split(self, kjt: KeyedJaggedTensor) -> tuple[Ids, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Ids by stream, number of ids of each stream, and if traced `lengths_FB` and `origins` of `OutgoingIds`."""
        loops, buckets = self._loops, self._buckets
        key_F = buckets.key_indices(tuple(kjt.keys()))
        key_V = key_F[buckets.feature_V]
        lengths_KB = kjt.lengths().view(len(kjt.keys()), kjt.stride()).to(torch.int32).contiguous().numpy()
        values = kjt.values().to(torch.int64).contiguous().numpy().view(np.uint64)
        first_K = np.array(kjt.offset_per_key())
        size_V = np.diff(first_K)[key_V]
        cut_V = np.where(buckets.buckets_V > 1, size_V, 0)
        first_V = cut_V.cumsum() - cut_V
        bucket_N = np.empty(int(cut_V.sum()), np.uint16)
        lengths_SB = torch.empty(buckets.num_streams + buckets.num_unread, kjt.stride(), dtype=torch.int32)
        totals = torch.empty(len(lengths_SB), dtype=torch.int64)
        out_SB, total_S = lengths_SB.numpy(), totals.numpy()
        outside = in_threads(
            loops.count,
            size_V,
            (values, lengths_KB, first_K, key_V, buckets.buckets_V, buckets.block_V, buckets.edges_VE),
            (buckets.stream_VE, first_V, out_SB, total_S, bucket_N),
        )
        if outside >= 0:
            raise buckets.error(kjt, outside)
        total_S[buckets.repeated[:, 1]] = total_S[buckets.repeated[:, 0]]
        num_ids = int(total_S.sum())
        first_S = (total_S.cumsum() - total_S).view(np.uint64)

        # The loop moves plain weights. Torch gathers weights that need gradients, by the origins of the ids.
        weights = kjt.weights() if self._weighted else None
        trained = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        moves_weights = weights is not None and not trained
        weight_N = np.empty(0, np.float32)
        if weights is not None and moves_weights:
            weight_N = weights.detach().to(torch.float32).contiguous().numpy()
        out = torch.empty(num_ids, dtype=torch.int64)
        out_weights = torch.empty(num_ids if moves_weights else 0)
        origins = torch.empty(num_ids if self._traced or trained else 0, dtype=torch.int64)
        shift_V = np.zeros_like(first_V)
        if self._traced:
            size_F = np.diff(first_K)[key_F]
            shift_V = (size_F.cumsum() - size_F - first_K[key_F])[buckets.feature_V]
        out_N, out_weight_N, origin_N = out.numpy().view(np.uint64), out_weights.numpy(), origins.numpy()
        outside = in_threads(
            loops.move,
            size_V,
            (values, weight_N, first_K, key_V, buckets.buckets_V, buckets.edges_VE, buckets.stream_VE),
            (first_V, first_S, bucket_N, out_N, out_weight_N, origin_N, shift_V),
        )
        if outside >= 0:
            raise buckets.error(kjt, outside)
        loops.repeat(buckets.repeated, first_S, total_S, out_SB, out_N, out_weight_N, origin_N)
        if weights is not None:
            out_weights = weights[origins] if trained else out_weights.to(weights.dtype)
        if buckets.num_unread:
            num_ids = int(totals[: buckets.num_streams].sum())
            lengths_SB, totals = lengths_SB[: buckets.num_streams], totals[: buckets.num_streams]
            out, out_weights, origins = out[:num_ids], out_weights[:num_ids], origins[:num_ids]
        ids = Ids(lengths_SB, out, None if weights is None else out_weights)
        if not self._traced:
            return ids, totals, None, None
        return ids, totals, torch.from_numpy(lengths_KB[key_F]), origins


def _header_slots(routes: Routes, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of the flat header, and the stream that is counted in each entry."""
    slots, sources, num_streams = [], [], 0
    for rank, route in enumerate(routes.ranks):
        for stream in range(len(route.streams)):
            slots.append(rank * width + VALUES)
            sources.append(num_streams + stream)
        for lookup in route.lookups:
            slots.append(rank * width + GROUPS + lookup.group)
            sources.append(num_streams + lookup.stream)
        num_streams += len(route.streams)
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(sources, dtype=torch.int64)


def part_sizes(headers: Headers, streams: Sequence[int], weighted: bool) -> WordCounts:
    """For each part the words of its ids, of its lengths and, if `weighted`, of its weights.

    Args:
        headers: headers of all parts.
        streams: number of streams of the receiver of each part.
    """
    sizes = []
    for (count, batch, *_), num_streams in zip(headers, streams, strict=True):
        words = [count * (ID_BYTES // WORD_BYTES), batch * num_streams * (LENGTH_BYTES // WORD_BYTES)]
        sizes.append([*words, count * (WEIGHT_BYTES // WORD_BYTES)] if weighted else words)
    return sizes
