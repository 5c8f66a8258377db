"""The k items of the largest dot product with a query: exact, in bounded memory, or approximate, by faiss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from rayrec.inference.artifact import ExportError
from rayrec.metrics.ranking import Jagged

QUERIES, ITEMS = 256, 32_768  # of a block: 32 MiB of scores
GROUP = 64
NONE = float("-inf")
KINDS = ("ivf", "hnsw")
HNSW_LINKS, HNSW_BUILD = 32, 100


def top_k(
    queries_QD: torch.Tensor,
    items_ID: torch.Tensor,
    k: int,
    excluded: Jagged | None = None,
    allowed_I: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores `[Q, k]`, rows of items `[Q, k]`), best first; score -inf and row -1 where there are no more items.

    Args:
        excluded: for each query, rows that it must not get.
        allowed_I: bool, the rows that any query may get; None: all.
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    parts = []
    for start in range(0, len(queries_QD), QUERIES):
        stop = min(start + QUERIES, len(queries_QD))
        left_out = None if excluded is None else excluded.rows(start, stop)
        parts.append(_of_queries(queries_QD[start:stop], items_ID, k, left_out, allowed_I))
    if not parts:
        return queries_QD.new_empty(0, k), torch.empty(0, k, dtype=torch.int64, device=queries_QD.device)
    scores, rows = (torch.cat(part) for part in zip(*parts, strict=True))
    return scores, rows


def _of_queries(
    queries: torch.Tensor,
    items: torch.Tensor,
    k: int,
    left_out: tuple[torch.Tensor, torch.Tensor] | None,
    allowed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    best = queries.new_full((len(queries), k), NONE)
    rows = torch.full((len(queries), k), -1, dtype=torch.int64, device=queries.device)
    for start in range(0, len(items), ITEMS):
        scores = queries @ items[start : start + ITEMS].T
        stop = start + scores.shape[1]
        if allowed is not None:
            scores.masked_fill_(~allowed[start:stop], NONE)
        if left_out is not None:
            inside = (left_out[1] >= start) & (left_out[1] < stop)
            scores[left_out[0][inside], left_out[1][inside] - start] = NONE
        found, places = _best_of_groups(scores, min(k, scores.shape[1]))
        best, order = torch.cat([best, found], dim=1).topk(k, dim=1)
        rows = torch.cat([rows, places + start], dim=1).gather(1, order)
    return best, rows.masked_fill(best == NONE, -1)


def _best_of_groups(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk`, quicker: the k best lie in the k groups of the best maxima, and only those are sorted."""
    queries, items = scores.shape
    whole = items // GROUP
    if whole <= 2 * k:
        found = scores.topk(k, dim=1)
        return found.values, found.indices
    groups = scores[:, : whole * GROUP].unflatten(1, (whole, GROUP))
    chosen = groups.amax(2).topk(k, dim=1).indices
    inner = torch.arange(GROUP, device=scores.device)
    places = (chosen[:, :, None] * GROUP + inner).flatten(1)
    rest = torch.arange(whole * GROUP, items, device=scores.device).expand(queries, -1)
    places = torch.cat([places, rest], dim=1)
    values, order = scores.gather(1, places).topk(k, dim=1)
    return values, places.gather(1, order)


class Approximate:
    """An index of faiss.

    Args:
        kind: of `KINDS`.
        index: of faiss.
        effort: lists that a query probes (IVF), or nodes that it keeps (HNSW).
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
            index.cp.max_points_per_centroid = (
                64  # faiss's 256 take four times as long, for a recall that effort gives too
            )
            index.train(vectors_ID.numpy())
        index.add(vectors_ID.numpy())
        return cls(kind, index, 1)

    def tune(self, queries: torch.Tensor, exact_QK: torch.Tensor, wanted: float) -> tuple[float, float]:
        """Doubles the effort until the recall of `exact_QK` is the one wanted; (recall, seconds) of the last try."""
        k = exact_QK.shape[1]
        most = self.index.nlist if self.kind == "ivf" else self.index.ntotal
        self.effort = 1 if self.kind == "ivf" else k
        while True:
            begin = time.perf_counter()
            _, rows = self.search(queries, k, None)
            seconds = time.perf_counter() - begin
            recall = recall_of(rows, exact_QK)
            if recall >= wanted or self.effort >= most:
                return recall, seconds
            self.effort = min(2 * self.effort, most)

    def search(self, queries_QD: torch.Tensor, k: int, excluded: Jagged | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top_k`. Finds as many more as are excluded."""
        faiss = _faiss()
        if self.kind == "ivf":
            params = faiss.SearchParametersIVF(nprobe=self.effort)
        else:
            params = faiss.SearchParametersHNSW(efSearch=max(self.effort, k))
        more = 0 if excluded is None else int(excluded.offsets.diff().max())
        found = self.index.search(queries_QD.contiguous().numpy(), min(k + more, self.index.ntotal), params=params)
        scores, rows = (torch.from_numpy(part) for part in found)
        scores = scores.masked_fill(rows < 0, float("-inf"))
        if excluded is not None:
            where, ids = excluded.rows(0, len(rows))
            hit = torch.zeros_like(rows, dtype=torch.bool)
            for query in where.unique().tolist():
                hit[query] = torch.isin(rows[query], ids[where == query])
            scores = scores.masked_fill(hit, float("-inf"))
        scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
        return scores, rows.gather(1, order).masked_fill(scores == float("-inf"), -1)

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
            raise ExportError(f"{path} cannot be read by faiss {faiss.__version__}: index anew ({error})") from None


def recall_of(found_QK: torch.Tensor, exact_QK: torch.Tensor) -> float:
    """The part of the exact rows that were found, on average."""
    hits = (found_QK[:, :, None] == exact_QK[:, None, :]).any(1).float()
    return float(hits.mean())


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ExportError("approximate indexes need faiss: pip install 'rayrec[index]', or search exactly") from None
    return faiss
