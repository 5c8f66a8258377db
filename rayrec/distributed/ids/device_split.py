"""Splits ids on a GPU by the ranks that hold their rows, for features that are on the GPU already.

The host counts the ids of each stream, because ranks must know sizes before ids travel; it moves no ids. The device
finds each id's bucket and puts ids in the order of streams, in one to three operators, without a host synchronization.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.ids.batch import Ids, OutgoingIds
from rayrec.distributed.ids.buckets import Buckets
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class _Order:
    """Source rows of lengths for a batch with certain keys; None if rows come in order.

    Args:
        cut: for each variant that is cut, its key.
        streams: for each stream, its row among the whole keys and the buckets, or among the buckets alone.
    """

    cut: torch.Tensor | None
    streams: torch.Tensor | None


class DeviceSplit:
    """Splits ids on a GPU.

    Args:
        routes: routes of the collection.
        weighted: whether ids carry weights.
        device: a CUDA device.
    """

    def __init__(self, routes: Routes, weighted: bool, device: torch.device) -> None:
        self._buckets, self._weighted, self._device = Buckets(routes), weighted, device
        self._loop = loops("rayrec.distributed.ids.count_loop")
        self._cut = np.flatnonzero(self._buckets.buckets_V > 1)
        self._max_buckets = int(self._buckets.buckets_V.max(initial=1))
        block_C = self._buckets.block_V[self._cut].astype(np.int64)
        self._block_C = torch.from_numpy(block_C).to(device)
        self._streams = [stream for route in routes.ranks for stream in route.streams]
        self._sends_whole = any(self._buckets.buckets_V[stream.variant] == 1 for stream in self._streams)
        self._orders: dict[tuple[str, ...], _Order] = {}

    @property
    def possible(self) -> bool:
        """Whether all buckets of each table have the same number of rows. Only hand-made plans have other buckets."""
        cut = self._buckets.buckets_V > 1
        return bool((self._buckets.block_V[cut] > 0).all())

    def count(self, kjt: KeyedJaggedTensor) -> tuple[torch.Tensor, int] | None:
        """Counts a batch on the host.

        Args:
            kjt: the batch on the host.

        Returns:
            number of ids of each stream, int64 `[S]`, and of ids in variants that are cut; None if the weights need
            gradients, which only the host's split supports.

        Raises:
            ValueError: an id is outside its table's rows.
        """
        if self._weighted and kjt.weights().requires_grad and torch.is_grad_enabled():
            return None
        buckets = self._buckets
        key_V = buckets.key_indices(tuple(kjt.keys()))[buckets.feature_V]
        values = kjt.values().to(torch.int64).contiguous().numpy().view(np.uint64)
        first_K = np.array(kjt.offset_per_key())
        size_V = np.diff(first_K)[key_V]
        total_S = np.zeros(buckets.num_streams + buckets.num_unread, np.int64)
        outside = in_threads(
            self._loop.count,
            size_V,
            (values, first_K, key_V, buckets.buckets_V, buckets.block_V, buckets.edges_VE, buckets.stream_VE, total_S),
        )
        if outside >= 0:
            raise buckets.error(kjt, outside)
        total_S[buckets.repeated[:, 1]] = total_S[buckets.repeated[:, 0]]
        return torch.from_numpy(total_S[: buckets.num_streams]), int(size_V[self._cut].sum())

    def split(self, kjt: KeyedJaggedTensor, outgoing: OutgoingIds) -> Ids:
        """Streams `[S, B]` on the device.

        Args:
            kjt: the batch on the device.
            outgoing: its counts.
        """
        order = self._order_of(tuple(kjt.keys()))
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).to(torch.int32)
        weights = kjt.weights().to(torch.float32) if self._weighted else None
        ids = features = Ids(lengths, kjt.values().to(torch.int64), weights)
        if len(self._cut):
            if order.cut is not None:
                ids = Ids(*ops.permute_segments(order.cut, ids.lengths, ids.values, ids.weights, outgoing.num_cut))
            ids = Ids(*ops.split_by_blocks(self._block_C, self._max_buckets, ids.lengths, ids.values, ids.weights))
            if self._sends_whole:
                ids = _concatenated(features, ids)
        if order.streams is None:
            return ids
        return Ids(*ops.permute_segments(order.streams, ids.lengths, ids.values, ids.weights, outgoing.num_ids))

    def _order_of(self, keys: tuple[str, ...]) -> _Order:
        if keys not in self._orders:
            key_V = self._buckets.key_indices(keys)[self._buckets.feature_V].tolist()
            row_of = {int(variant): row for row, variant in enumerate(self._cut)}
            offset = len(keys) if self._sends_whole else 0  # then bucket after bucket, each with all cut variants
            streams = [
                offset + stream.bucket * len(self._cut) + row_of[stream.variant]
                if stream.variant in row_of
                else key_V[stream.variant]
                for stream in self._streams
            ]
            num_rows = offset + self._max_buckets * len(self._cut) if len(self._cut) else len(keys)
            cut = [key_V[variant] for variant in self._cut]
            self._orders[keys] = _Order(self._unless_in_order(cut, len(keys)), self._unless_in_order(streams, num_rows))
        return self._orders[keys]

    def _unless_in_order(self, rows: list[int], num_rows: int) -> torch.Tensor | None:
        if rows == list(range(num_rows)):
            return None
        return torch.tensor(rows, dtype=torch.int32).to(self._device)


def _concatenated(first: Ids, second: Ids) -> Ids:
    weights = None if first.weights is None or second.weights is None else torch.cat([first.weights, second.weights])
    return Ids(torch.cat([first.lengths, second.lengths]), torch.cat([first.values, second.values]), weights)
