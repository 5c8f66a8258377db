"""The k items with the largest dot products with a query: exact, in bounded memory; or approximate, with faiss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rayrec.inference.artifact import ExportError
from rayrec.metrics.ranking import Jagged

BLOCK_QUERIES, BLOCK_ITEMS = 256, 32_768  # 32 MiB of scores
# If a smaller share of the items is allowed, exact search gathers their vectors instead of comparing all.
GATHERED_SHARE = 0.3
GROUP = 64
NO_SCORE = float("-inf")
KINDS = ("ivf", "hnsw")
HNSW_LINKS, HNSW_BUILD = 32, 100
# A search looks for one more result per excluded item, up to MAX_SPARE or 2 k, which takes hardly longer. It is
# repeated with more effort only if it needs more than ENOUGH times the effort.
MAX_SPARE, ENOUGH = 256, 1.25
MIN_SPARE = 16
# With a filter, it looks for FILTER_SPARE times k / the share of the allowed items.
FILTER_SPARE = 1.5


def top_k(
    queries_QD: torch.Tensor,
    items_ID: torch.Tensor,
    k: int,
    excluded: Jagged | None = None,
    allowed_I: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores `[Q, k]`, rows of items `[Q, k]`), best first, padded with score -inf and row -1.

    Args:
        excluded: Rows to exclude, for each query.
        allowed_I: bool, rows that queries may get; None: all.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    allowed_rows = None
    if allowed_I is not None and float(allowed_I.float().mean()) < GATHERED_SHARE:
        allowed_rows, allowed_I = torch.nonzero(allowed_I).flatten(), None
    blocks = []
    for start in range(0, len(queries_QD), BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, len(queries_QD))
        block_excluded = None if excluded is None else excluded.rows(start, stop)
        blocks.append(_top_k_of_block(queries_QD[start:stop], items_ID, k, block_excluded, allowed_I, allowed_rows))
    if not blocks:
        return queries_QD.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=queries_QD.device)
    scores, rows = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    return scores, rows


def _top_k_of_block(
    queries: torch.Tensor,
    items: torch.Tensor,
    k: int,
    excluded: tuple[torch.Tensor, torch.Tensor] | None,
    allowed: torch.Tensor | None,
    allowed_rows: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        excluded: Indices of queries, and rows of items.
        allowed_rows: Ascending rows, which alone are compared.
    """
    if allowed_rows is not None:
        if excluded is not None:
            query_indices, item_rows = excluded
            positions = torch.searchsorted(allowed_rows, item_rows)
            is_allowed = (
                allowed_rows[positions.clamp(max=len(allowed_rows) - 1)] == item_rows
                if len(allowed_rows)
                else item_rows < 0
            )
            excluded = query_indices[is_allowed], positions[is_allowed]
        best, indices = _top_k_of_items(
            queries, lambda start, stop: items[allowed_rows[start:stop]], len(allowed_rows), k, excluded
        )
        rows = F.pad(allowed_rows, (0, 1), value=-1)[indices]
        return best, rows
    return _top_k_of_items(queries, lambda start, stop: items[start:stop], len(items), k, excluded, allowed)


def _top_k_of_items(
    queries: torch.Tensor,
    read: Callable[[int, int], torch.Tensor],
    items: int,
    k: int,
    excluded: tuple[torch.Tensor, torch.Tensor] | None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Args:
        read: The vectors of items `[start, stop)`.
        items: Number of items.
    """
    best = queries.new_full((len(queries), k), NO_SCORE)
    rows = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
    for start in range(0, items, BLOCK_ITEMS):
        stop = min(start + BLOCK_ITEMS, items)
        scores = queries @ read(start, stop).T
        if allowed is not None:
            scores.masked_fill_(~allowed[start:stop], NO_SCORE)
        if excluded is not None:
            query_indices, item_rows = excluded
            in_block = (item_rows >= start) & (item_rows < stop)
            scores[query_indices[in_block], item_rows[in_block] - start] = NO_SCORE
        block_best, block_rows = _grouped_topk(scores, min(k, scores.shape[1]))
        best, order = torch.cat([best, block_best], dim=1).topk(k, dim=1)
        rows = torch.cat([rows, block_rows + start], dim=1).gather(1, order)
    return best, rows.masked_fill(best == NO_SCORE, -1)


def _grouped_topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A faster `topk`: the k best are in the k groups with the largest maxima, so only these are sorted."""
    queries, items = scores.shape
    num_groups = items // GROUP
    if num_groups <= 2 * k:
        best = scores.topk(k, dim=1)
        return best.values, best.indices
    groups = scores[:, : num_groups * GROUP].unflatten(1, (num_groups, GROUP))
    best_groups = groups.amax(2).topk(k, dim=1).indices
    inner = torch.arange(GROUP, device=scores.device)
    candidates = (best_groups[:, :, None] * GROUP + inner).flatten(1)
    remainder = torch.arange(num_groups * GROUP, items, device=scores.device).expand(queries, -1)
    candidates = torch.cat([candidates, remainder], dim=1)
    values, order = scores.gather(1, candidates).topk(k, dim=1)
    return values, candidates.gather(1, order)


class Approximate:
    """A faiss index.

    Args:
        kind: One of `KINDS`.
        index: The faiss index.
        efforts: (k, effort) by ascending k. The effort is the number of lists to probe (IVF), or of candidates to keep
            (HNSW), per query. More results, or more excluded items, need a larger one.
    """

    def __init__(self, kind: str, index: Any, efforts: Sequence[tuple[int, int]] = ()) -> None:
        self.kind, self.index, self.efforts = kind, index, list(efforts)

    @classmethod
    def build(cls, kind: str, vectors_ID: torch.Tensor) -> Approximate:
        """
        Raises:
            ExportError: faiss is not installed.
        """
        faiss = _faiss()
        items, dim = vectors_ID.shape
        lists = max(1, min(int(4 * items**0.5), items // 40))
        text = f"HNSW{HNSW_LINKS},Flat" if kind == "hnsw" else f"IVF{lists},Flat"
        index = faiss.index_factory(dim, text, faiss.METRIC_INNER_PRODUCT)
        if kind == "hnsw":
            index.hnsw.efConstruction = HNSW_BUILD
        else:
            # faiss's default, 256, takes four times as long; `effort` reaches the same recall.
            index.cp.max_points_per_centroid = 64
            index.train(vectors_ID.numpy())
        index.add(vectors_ID.numpy())
        return cls(kind, index)

    def tune(
        self, queries: torch.Tensor, exact_QK: torch.Tensor, min_recall: float, excluded: Jagged | None = None
    ) -> tuple[float, float]:
        """Doubles the effort until the recall of `exact_QK` is reached, and keeps it for this k.

        Call it with ascending k.

        Returns:
            (recall, seconds) of the last search.
        """
        k = exact_QK.shape[1]
        max_effort = self.index.nlist if self.kind == "ivf" else self.index.ntotal
        effort = max([1 if self.kind == "ivf" else k, *(effort for _, effort in self.efforts)])
        smaller = self.efforts
        while True:
            self.efforts = [*smaller, (k, effort)]
            begin = time.perf_counter()
            _, rows = self._search(queries, k, excluded, lambda _, effort=effort: effort)  # type: ignore[misc]
            seconds = time.perf_counter() - begin
            recall = recall_of(rows, exact_QK)
            if recall >= min_recall or effort >= max_effort:
                return recall, seconds
            effort = min(2 * effort, max_effort)

    def effort(self, count: int) -> int:
        """The effort to find `count` items: a power of it between two tuned k, in proportion beyond the largest."""
        if count <= self.efforts[0][0]:
            return self.efforts[0][1]
        points = [*self.efforts, (2 * self.efforts[-1][0], 2 * self.efforts[-1][1])]
        (k, effort), (next_k, next_effort) = next(
            (pair for pair in pairwise(points) if count <= pair[1][0]), (points[-2], points[-1])
        )
        power = math.log(next_effort / effort) / math.log(next_k / k)
        return math.ceil(effort * (count / k) ** power - 1e-6)

    def search(
        self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top_k`."""
        return self._search(queries_QD, k, excluded, self.effort)

    def search_allowed(
        self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None, allowed_I: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """As `search`, among the allowed items; None if there are so few that an exact search is faster.

        Looks for enough of all items. With a selector of the allowed items in faiss, queries with few of them nearby
        would search the wrong lists, and lose recall without a sign.

        Args:
            allowed_I: bool.

        Returns:
            As `search`; and bool `[Q]`, whether enough of the items found were allowed. The results of others are
            incomplete.
        """
        count = int(allowed_I.sum())
        wanted = math.ceil(FILTER_SPARE * k * len(allowed_I) / max(count, 1)) + MIN_SPARE
        if wanted > self.efforts[-1][0]:
            return None
        scores, rows = self.search(queries_QD, wanted, excluded)
        is_allowed = (rows >= 0) & allowed_I[rows]
        order = (~is_allowed).int().argsort(dim=1, stable=True)[:, :k]
        kept = is_allowed.gather(1, order)
        best_scores = scores.gather(1, order).masked_fill(~kept, NO_SCORE)
        return best_scores, rows.gather(1, order).masked_fill(~kept, -1), kept.all(1)

    def _search(
        self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None, effort: Callable[[int], int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            effort: Number of results → effort.
        """
        queries, first = queries_QD.detach().float().contiguous().numpy(), effort(k)
        if excluded is None:
            return self._search_alike(queries, k, first)
        ids, offsets = excluded.ids.numpy(), excluded.offsets.numpy()
        counts = np.diff(offsets)
        hnsw = self.kind == "hnsw"
        if hnsw and len(queries) == 1:
            # A graph search with a selector continues until it has enough allowed items, with the same effort.
            return self._search_alike(queries, k, first, ids)
        # A selector applies to a whole call. So all queries search together for more than k items, and excluded ones
        # are removed; queries that lose many of their best items then search alone. The search of an IVF index
        # continues with further lists, which may have the best allowed items.
        spare = min(int(counts.max()), max(MAX_SPARE, 2 * k))
        most = effort(k + spare)
        probes: _Probes | None = None
        if hnsw or most <= ENOUGH * first:
            # HNSW keeps as many candidates as its effort; IVF sorts as many as are asked for.
            wanted = min(max(k, first), k + spare) if hnsw else k + spare
            all_scores, all_rows = (x.numpy() for x in self._search_alike(queries, wanted, first))
        else:
            probes = _Probes(self.index, queries, most)
            all_scores, all_rows = probes.search(slice(None), k + spare, 0, first)
        scores, rows = all_scores[:, :k].copy(), all_rows[:, :k].copy()
        is_banned = _pairs_in(all_rows, np.repeat(np.arange(len(counts)), counts), ids, self.index.ntotal)
        for query in np.flatnonzero(is_banned[:, :k].any(1)):
            banned, one = ids[offsets[query] : offsets[query + 1]], slice(query, query + 1)
            free = np.flatnonzero(~is_banned[query] & (all_rows[query] >= 0))[:k]
            more = effort(int(free[-1]) + 1 if len(free) == k else k + int(counts[query]))
            is_complete = len(free) == k or (counts[query] <= spare and all_rows.shape[1] == k + spare)
            if is_complete and min(more, self.index.ntotal if hnsw else self.index.nlist) <= ENOUGH * first:
                scores[query], rows[query] = NO_SCORE, -1
                scores[query, : len(free)], rows[query, : len(free)] = all_scores[query, free], all_rows[query, free]
            elif probes is None or counts[query] > spare:
                scores[one], rows[one] = self._search_alike(queries[one], k, first if hnsw else more, banned)
            else:
                next_scores, next_rows = probes.search(one, k + spare, first, more)
                next_scores[np.isin(next_rows, banned)] = NO_SCORE
                best = np.where(is_banned[query], NO_SCORE, all_scores[query])
                best, best_rows = (
                    np.concatenate([best, next_scores[0]]),
                    np.concatenate([all_rows[query], next_rows[0]]),
                )
                order = np.argsort(-best, kind="stable")[:k]
                scores[query] = best[order]
                rows[query] = np.where(best[order] == NO_SCORE, -1, best_rows[order])
        return torch.from_numpy(scores), torch.from_numpy(rows)

    def _search_alike(
        self, queries: Any, k: int, effort: int, banned: Any | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A search that excludes the same rows for all queries."""
        faiss, selector = _faiss(), None
        if banned is not None and len(banned):
            # A bitmap of all items would take longer to write than most searches.
            batch = faiss.IDSelectorBatch(np.ascontiguousarray(banned))  # kept until the search has ended
            selector = faiss.IDSelectorNot(batch)
        if self.kind == "ivf":
            params = faiss.SearchParametersIVF(nprobe=min(effort, self.index.nlist), sel=selector)
        else:
            params = faiss.SearchParametersHNSW(efSearch=max(effort, k), sel=selector)
        scores, rows = map(torch.from_numpy, self.index.search(queries, k, params=params))
        return scores.masked_fill(rows < 0, NO_SCORE), rows

    def write(self, path: Path) -> None:
        _faiss().write_index(self.index, str(path))

    @classmethod
    def read(cls, kind: str, path: Path, efforts: Sequence[tuple[int, int]]) -> Approximate:
        """
        Raises:
            ExportError: faiss is not installed, or cannot read the file.
        """
        faiss = _faiss()
        try:
            return cls(kind, faiss.read_index(str(path)), efforts)
        except RuntimeError as error:
            raise ExportError(
                f"{path} cannot be read by faiss {faiss.__version__}: write the index again ({error})"
            ) from None


class _Probes:
    """A search of an IVF index that can continue with further lists.

    Args:
        index: The faiss index.
        queries: float32 `[Q, D]`.
        most: Largest number of lists per query.
    """

    def __init__(self, index: Any, queries: Any, most: int) -> None:
        self._index, self._queries = index, queries
        # One search of the centroids, so that equally near ones keep their order.
        self._near_QL, self._lists_QL = index.quantizer.search(queries, min(most, index.nlist))

    def search(self, which: slice, k: int, start: int, stop: int) -> tuple[Any, Any]:
        """(scores `[q, k]`, rows `[q, k]`) of the queries `which` among their lists `[start, stop)`, nearest first.

        Padded with score -inf and row -1.
        """
        faiss = _faiss()
        queries = self._queries[which]
        lists, near = (np.ascontiguousarray(x[which, start:stop]) for x in (self._lists_QL, self._near_QL))
        scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        arrays = (faiss.swig_ptr(array) for array in (lists, near, scores, rows))
        params = faiss.SearchParametersIVF(nprobe=lists.shape[1])
        self._index.search_preassigned_c(len(queries), faiss.swig_ptr(queries), k, *arrays, False, params)
        scores[rows < 0] = NO_SCORE
        return scores, rows


def _pairs_in(rows_QK: Any, query_N: Any, ids_N: Any, items: int) -> Any:
    """bool `[Q, K]`: whether a row is among the ids of its query."""
    if len(rows_QK) == 1:  # the usual request, where each call of NumPy takes a percent of the search
        banned_rows = set(ids_N.tolist())
        return np.array([[row in banned_rows for row in rows_QK[0].tolist()]], bool)
    banned = np.sort(ids_N + items * query_N)
    found = np.where(rows_QK < 0, -1, rows_QK + items * np.arange(len(rows_QK))[:, None])
    return banned[np.minimum(np.searchsorted(banned, found), len(banned) - 1)] == found


def recall_of(rows_QK: torch.Tensor, exact_QK: torch.Tensor) -> float:
    """Mean share of the exact rows, without padding, that are among `rows_QK`."""
    width = int(max(exact_QK.max(), rows_QK.max())) + 1
    query = width * torch.arange(len(exact_QK))[:, None]
    real = exact_QK >= 0
    found = torch.isin((exact_QK + query)[real], (rows_QK + query)[rows_QK >= 0])
    return float(found.float().mean()) if len(found) else 1.0


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ExportError(
            "approximate indexes need faiss: pip install 'rayrec[index]', or use --search exact"
        ) from None
    return faiss
