"""The k items with the largest dot products with a query: exact, in bounded memory; or approximate, with faiss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

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
        effort: Lists to probe (IVF), or candidates to keep (HNSW), per query.
    """

    def __init__(self, kind: str, index: Any, effort: int) -> None:
        self.kind, self.index, self.effort = kind, index, effort

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
        return cls(kind, index, 1)

    def tune(self, queries: torch.Tensor, exact_QK: torch.Tensor, min_recall: float) -> tuple[float, float]:
        """Doubles the effort until the recall of `exact_QK` is reached; returns the last (recall, seconds)."""
        k = exact_QK.shape[1]
        max_effort = self.index.nlist if self.kind == "ivf" else self.index.ntotal
        self.effort = 1 if self.kind == "ivf" else k
        while True:
            begin = time.perf_counter()
            _, rows = self.search(queries, k, None)
            seconds = time.perf_counter() - begin
            recall = recall_of(rows, exact_QK)
            if recall >= min_recall or self.effort >= max_effort:
                return recall, seconds
            self.effort = min(2 * self.effort, max_effort)

    def search(self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top_k`. Searches for more items, to replace the excluded ones."""
        faiss = _faiss()
        if self.kind == "ivf":
            params = faiss.SearchParametersIVF(nprobe=self.effort)
        else:
            params = faiss.SearchParametersHNSW(efSearch=max(self.effort, k))
        num_excluded = 0 if excluded is None else int(excluded.offsets.diff().max())
        count = min(k + num_excluded, self.index.ntotal)
        result = self.index.search(queries_QD.contiguous().numpy(), count, params=params)
        scores, rows = map(torch.from_numpy, result)
        scores = scores.masked_fill(rows < 0, NO_SCORE)
        if excluded is not None:
            query_indices, item_rows = excluded.rows(0, len(rows))
            is_excluded = torch.zeros_like(rows, dtype=torch.bool)
            for query in query_indices.unique().tolist():
                is_excluded[query] = torch.isin(rows[query], item_rows[query_indices == query])
            scores = scores.masked_fill(is_excluded, NO_SCORE)
        scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
        return scores, rows.gather(1, order).masked_fill(scores == NO_SCORE, -1)

    def write(self, path: Path) -> None:
        _faiss().write_index(self.index, str(path))

    @classmethod
    def read(cls, kind: str, path: Path, effort: int) -> Approximate:
        """
        Raises:
            ExportError: faiss is not installed, or cannot read the file.
        """
        faiss = _faiss()
        try:
            return cls(kind, faiss.read_index(str(path)), effort)
        except RuntimeError as error:
            raise ExportError(
                f"{path} cannot be read by faiss {faiss.__version__}: write the index again ({error})"
            ) from None


def recall_of(rows_QK: torch.Tensor, exact_QK: torch.Tensor) -> float:
    """Mean share of the exact rows that are among `rows_QK`."""
    hits = (rows_QK[:, :, None] == exact_QK[:, None, :]).any(1).float()
    return float(hits.mean())


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ExportError(
            "approximate indexes need faiss: pip install 'rayrec[index]', or use --search exact"
        ) from None
    return faiss
