"""A batch's ids in the order of the ranks that hold their rows, by compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rayrec.compiled import loops
from rayrec.distributed.ids.batch import Ids
from rayrec.distributed.ids.routes import Routes, Variant
from rayrec.distributed.ids.split import OperatorSplit, Split
from rayrec.sparse import KeyedJaggedTensor

MOST_BUCKETS = 256
MIN_IDS = 1 << 14  # of a thread: handing work to another one costs about 50 µs


def make_split(routes: Routes, weighted: bool, traced: bool) -> CompiledSplit | OperatorSplit:
    """The split of a collection: by compiled loops if tables are cut by rows and numba is there."""
    most = max((len(variant.edges or ()) for variant in routes.variants), default=0)
    if 0 < most <= MOST_BUCKETS and split_loops() is not None:
        return CompiledSplit(routes, weighted, traced)
    return OperatorSplit(routes, weighted, traced)


class CompiledSplit:
    """Splits ids by compiled loops.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id comes from.

    Attributes:
        checked: features whose ids are compared with the rows of all tables that read them.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool) -> None:
        self._loops = split_loops()
        self._features, self._weighted, self._traced = routes.features, weighted, traced
        feature = {name: number for number, name in enumerate(routes.features)}
        streams = [stream for route in routes.ranks for stream in route.streams]
        self._num_streams = len(streams)
        edges = [variant.edges or (0, 1 << 62) for variant in routes.variants]
        most = max(map(len, edges))
        self._feature_V = np.array([feature[variant.feature] for variant in routes.variants])
        self._buckets_V = np.array([len(of_variant) - 1 for of_variant in edges])
        self._block_V = np.array([_block(of_variant) for of_variant in edges], dtype=np.uint64)
        self._edges_VE = np.array([[*e, *[e[-1]] * (most - len(e))] for e in edges], dtype=np.uint64)
        self._stream_VE = np.full((len(edges), most), -1)
        repeated = []
        for number, stream in enumerate(streams):
            first = self._stream_VE[stream.variant, stream.bucket]
            if first < 0:
                self._stream_VE[stream.variant, stream.bucket] = number
            else:
                repeated.append((first, number))
        self._repeated = np.array(repeated, dtype=np.int64).reshape(-1, 2)
        reads = [(routes.variants[r.streams[look.stream].variant], look) for r in routes.ranks for look in r.lookups]
        self._tables = {variant: routes.outputs[lookup.output].table for variant, lookup in reads}
        self._variants = routes.variants
        self.checked = {v.feature for v in routes.variants if v.edges} - {
            v.feature for v in routes.variants if not v.edges
        }

    def split(self, kjt: KeyedJaggedTensor) -> Split:
        """Splits every feature of the routes; `kjt` is on the host, and may have others.

        Raises:
            ValueError: an id is outside the rows of a table that is cut.
        """
        place, loops = kjt.index_per_key(), self._loops
        key_F = np.array([place[feature] for feature in self._features])
        key_V = key_F[self._feature_V]
        lengths_KB = kjt.lengths().view(len(kjt.keys()), kjt.stride()).to(torch.int32).contiguous().numpy()
        values = kjt.values().to(torch.int64).contiguous().numpy().view(np.uint64)
        first_K = np.array(kjt.offset_per_key())
        size_V = np.diff(first_K)[key_V]
        cut_V = np.where(self._buckets_V > 1, size_V, 0)
        first_V = cut_V.cumsum() - cut_V
        bucket_N = np.empty(int(cut_V.sum()), np.uint8)
        lengths_SB = torch.empty(self._num_streams, kjt.stride(), dtype=torch.int32)
        totals = torch.empty(self._num_streams, dtype=torch.int64)
        out_SB, total_S = lengths_SB.numpy(), totals.numpy()
        parts = _in_parts(size_V)

        def count(start: int, stop: int) -> None:
            outside = loops.count(
                values, lengths_KB, first_K, key_V, self._buckets_V, self._block_V, self._edges_VE, self._stream_VE,
                first_V, out_SB, total_S, bucket_N, start, stop,
            )  # fmt: skip
            if outside >= 0:
                raise self._error(kjt, self._variants[outside])

        _run(count, parts)
        total_S[self._repeated[:, 1]] = total_S[self._repeated[:, 0]]
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
            shift_V = (size_F.cumsum() - size_F - first_K[key_F])[self._feature_V]
        out_N, moved_N, origin_N = out.numpy().view(np.uint64), moved.numpy(), origins.numpy()

        def move(start: int, stop: int) -> None:
            loops.move(
                values, given, first_K, key_V, self._buckets_V, self._edges_VE, self._stream_VE,
                first_V, first_S, bucket_N, out_N, moved_N, origin_N, shift_V, start, stop,
            )  # fmt: skip

        _run(move, parts)
        loops.repeat(self._repeated, first_S, total_S, out_SB, out_N, moved_N, origin_N)
        if weights is not None:
            moved = weights[origins] if trained else moved.to(weights.dtype)
        ids = Ids(lengths_SB, out, None if weights is None else moved)
        lengths_FB = torch.from_numpy(lengths_KB[key_F])
        return Split(ids, totals, lengths_FB, origins if self._traced else None)

    def _error(self, kjt: KeyedJaggedTensor, variant: Variant) -> ValueError:
        assert variant.edges is not None
        ids, rows = kjt[variant.feature].values(), variant.edges[-1]
        number = int(ids[(ids < 0) | (ids >= rows)][0])
        return outside_rows(variant.feature, number, rows, self._tables[variant])


def outside_rows(feature: str, number: int, rows: int, table: str) -> ValueError:
    """The error of an id that no row of its table has."""
    return ValueError(
        f"feature {feature!r}: id {number} is outside the rows [0, {rows}) of table {table!r}; map ids to rows (for "
        "example by hash) or give the table more rows"
    )


def split_loops() -> Any:
    """The compiled loops, or None."""
    return loops("rayrec.distributed.ids.split_loops")


def _block(edges: Sequence[int]) -> int:
    """Rows of a bucket, where all have equally many but the last, which has no more; else 0."""
    sizes = [stop - start for start, stop in pairwise(edges)]
    even = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0] and edges[-1] <= 1 << 32
    return sizes[0] if even else 0


def _in_parts(size_V: np.ndarray) -> list[tuple[int, int]]:
    """Variants of about equally many ids for each of torch's threads, or for fewer."""
    ends = size_V.cumsum()
    threads = min(torch.get_num_threads(), 1 + int(ends[-1]) // MIN_IDS)
    bounds = [0, *np.searchsorted(ends, [ends[-1] * n // threads for n in range(1, threads)]).tolist(), len(ends)]
    return [(start, stop) for start, stop in pairwise(bounds) if stop > start]


def _run(work: Callable[[int, int], None], parts: Sequence[tuple[int, int]]) -> None:
    """All parts, the first on this thread."""
    if len(parts) == 1:
        return work(*parts[0])
    others = [_pool().submit(work, *part) for part in parts[1:]]
    try:
        work(*parts[0])
    finally:
        wait(others)
    for other in others:
        other.result()
    return None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="rayrec-loops")
