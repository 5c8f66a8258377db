"""Exact search: the k items of the largest dot product with a query, in bounded memory."""

from __future__ import annotations

import torch

from rayrec.metrics.ranking import Jagged

QUERIES, ITEMS = 256, 32_768  # of a block: 32 MiB of scores
GROUP = 64
NONE = float("-inf")


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
