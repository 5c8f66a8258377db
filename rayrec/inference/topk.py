"""The k items with the largest dot products with a query: exact, in bounded memory; or approximate, with faiss."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec.inference.artifact import ExportError
from rayrec.metrics.ranking import Jagged

BLOCK_QUERIES, BLOCK_ITEMS = 256, 32_768  # 32 MiB of scores
GROUP = 64
NO_SCORE = float("-inf")
KINDS = ("ivf", "hnsw")
HNSW_LINKS, HNSW_BUILD = 32, 100


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
    blocks = []
    for start in range(0, len(queries_QD), BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, len(queries_QD))
        block_excluded = None if excluded is None else excluded.rows(start, stop)
        blocks.append(_top_k_of_block(queries_QD[start:stop], items_ID, k, block_excluded, allowed_I))
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
) -> tuple[torch.Tensor, torch.Tensor]:
    best = queries.new_full((len(queries), k), NO_SCORE)
    rows = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
    for start in range(0, len(items), BLOCK_ITEMS):
        scores = queries @ items[start : start + BLOCK_ITEMS].T
        stop = start + scores.shape[1]
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
            _, rows = self._search(queries, k, excluded, effort)
            seconds = time.perf_counter() - begin
            recall = recall_of(rows, exact_QK)
            if recall >= min_recall or effort >= max_effort:
                return recall, seconds
            effort = min(2 * effort, max_effort)

    def effort(self, count: int) -> int:
        """The effort to find `count` items: a power of it between two tuned k, in proportion beyond the largest."""
        points = [*self.efforts, (2 * self.efforts[-1][0], 2 * self.efforts[-1][1])]
        if count <= points[0][0]:
            return points[0][1]
        (k, effort), (next_k, next_effort) = next(
            (pair for pair in pairwise(points) if count <= pair[1][0]), (points[-2], points[-1])
        )
        power = math.log(next_effort / effort) / math.log(next_k / k)
        return math.ceil(effort * (count / k) ** power - 1e-6)

    def search(self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top_k`."""
        return self._search(queries_QD, k, excluded)

    def _search(
        self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None, effort: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries = queries_QD.detach().float().contiguous().numpy()
        if excluded is None:
            return self._search_alike(queries, k, effort or self.effort(k))
        scores = torch.empty(len(queries), k)
        rows = torch.empty(len(queries), k, dtype=torch.int64)
        ids, offsets = excluded.ids.numpy(), excluded.offsets.numpy()
        free = np.flatnonzero(np.diff(offsets) == 0)
        if len(free):
            scores[free], rows[free] = self._search_alike(queries[free], k, effort or self.effort(k))
        # A selector of faiss holds for a whole call.
        for query in np.flatnonzero(np.diff(offsets)):
            banned = np.unique(ids[offsets[query] : offsets[query + 1]])
            one = slice(query, query + 1)
            wanted = effort or self.effort(k + len(banned))
            scores[one], rows[one] = self._search_alike(queries[one], k, wanted, banned)
        return scores, rows

    def _search_alike(
        self, queries: Any, k: int, effort: int, banned: Any | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A search that excludes the same rows for all queries."""
        faiss = _faiss()
        selector = None if banned is None else faiss.IDSelectorBatch(banned)
        others = None if selector is None else faiss.IDSelectorNot(selector)
        if self.kind == "ivf":
            params = faiss.SearchParametersIVF(nprobe=min(effort, self.index.nlist), sel=others)
        else:
            needed = k if banned is None else k + len(banned)
            params = faiss.SearchParametersHNSW(efSearch=max(effort, needed), sel=others)
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
