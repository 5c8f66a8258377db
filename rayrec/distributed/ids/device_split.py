"""Ids split on a GPU by the ranks that hold their rows, where the features lie there anyway.

The host counts the ids of each stream, because ranks must know sizes before ids travel; it moves none. The device
finds each id's bucket and puts ids in the order of streams, in one to three operators, without a number read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.ids.batch import Counts, Ids
from rayrec.distributed.ids.buckets import Buckets
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class _Order:
    """Where the rows of lengths of a batch with certain keys come from; None: they come in order.

    Args:
        cut: of the variants that are cut, in the keys.
        streams: of the streams, in the keys that are sent whole and the buckets, or in the buckets alone.
    """

    cut: torch.Tensor | None
    streams: torch.Tensor | None


class DeviceSplit:
    """Splits ids on a GPU.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        device: a CUDA device.
    """

    def __init__(self, routes: Routes, weighted: bool, device: torch.device) -> None:
        self._buckets, self._weighted, self._device = Buckets(routes), weighted, device
        self._loop = loops("rayrec.distributed.ids.count_loop")
        self._cut = np.flatnonzero(self._buckets.buckets_V > 1)
        self._most = int(self._buckets.buckets_V.max(initial=1))
        block_C = self._buckets.block_V[self._cut].astype(np.int64)
        self._block_C = torch.from_numpy(block_C).to(device)
        self._streams = [stream for route in routes.ranks for stream in route.streams]
        self._whole = any(self._buckets.buckets_V[stream.variant] == 1 for stream in self._streams)
        self._orders: dict[tuple[str, ...], _Order] = {}

    @property
    def possible(self) -> bool:
        """Whether all buckets of a table have equally many rows, as plans have them unless made by hand."""
        cut = self._buckets.buckets_V > 1
        return bool((self._buckets.block_V[cut] > 0).all())

    def count(self, kjt: KeyedJaggedTensor) -> Counts | None:
        """Counts a batch; `kjt` is on the host. None if its weights are trained: the host then splits it, too.

        Raises:
            ValueError: an id is outside its table's rows.
        """
        if self._weighted and kjt.weights().requires_grad and torch.is_grad_enabled():
            return None
        of, place = self._buckets, kjt.index_per_key()
        key_V = np.array([place[feature] for feature in of.features], np.int64)[of.feature_V]
        values = kjt.values().to(torch.int64).contiguous().numpy().view(np.uint64)
        first_K = np.array(kjt.offset_per_key())
        size_V = np.diff(first_K)[key_V]
        total_S = np.zeros(of.num_streams + of.num_unread, np.int64)
        given = (values, first_K, key_V, of.buckets_V, of.block_V, of.edges_VE, of.stream_VE, total_S)
        outside = in_threads(self._loop.count, size_V, given)
        if outside >= 0:
            raise of.error(kjt, outside)
        total_S[of.repeated[:, 1]] = total_S[of.repeated[:, 0]]
        return Counts(torch.from_numpy(total_S[: of.num_streams]), int(size_V[self._cut].sum()))

    def split(self, kjt: KeyedJaggedTensor, counts: Counts) -> Ids:
        """Streams `[S, B]` of the same batch on the device."""
        order = self._order_of(tuple(kjt.keys()))
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).to(torch.int32)
        weights = kjt.weights().to(torch.float32) if self._weighted else None
        ids = whole = Ids(lengths, kjt.values().to(torch.int64), weights)
        if len(self._cut):
            if order.cut is not None:
                ids = Ids(*ops.permute_segments(order.cut, ids.lengths, ids.values, ids.weights, counts.num_cut))
            ids = Ids(*ops.split_by_blocks(self._block_C, self._most, ids.lengths, ids.values, ids.weights))
            if self._whole:
                ids = _joined(whole, ids)
        if order.streams is None:
            return ids
        num_ids = int(counts.totals.sum())
        return Ids(*ops.permute_segments(order.streams, ids.lengths, ids.values, ids.weights, num_ids))

    def _order_of(self, keys: tuple[str, ...]) -> _Order:
        if keys not in self._orders:
            place = {key: number for number, key in enumerate(keys)}
            key_V = [place[self._buckets.features[feature]] for feature in self._buckets.feature_V]
            row_of = {int(variant): row for row, variant in enumerate(self._cut)}
            first = len(keys) if self._whole else 0  # bucket after bucket, each with all variants that are cut
            streams = [
                first + stream.bucket * len(self._cut) + row_of[stream.variant]
                if stream.variant in row_of
                else key_V[stream.variant]
                for stream in self._streams
            ]
            num_rows = first + self._most * len(self._cut) if len(self._cut) else len(keys)
            cut = [key_V[variant] for variant in self._cut]
            self._orders[keys] = _Order(self._unless_in_order(cut, len(keys)), self._unless_in_order(streams, num_rows))
        return self._orders[keys]

    def _unless_in_order(self, rows: list[int], num_rows: int) -> torch.Tensor | None:
        if rows == list(range(num_rows)):
            return None
        return torch.tensor(rows, dtype=torch.int32).to(self._device)


def _joined(one: Ids, other: Ids) -> Ids:
    weights = None if one.weights is None or other.weights is None else torch.cat([one.weights, other.weights])
    return Ids(torch.cat([one.lengths, other.lengths]), torch.cat([one.values, other.values]), weights)
