"""Ranking metrics over a whole corpus, exact and in bounded memory: HR@k, recall@k, NDCG@k, MRR.

All items are scored, none sampled. A tie counts against the model: a target ranks after all items of its score, so
that a model that scores everything alike finds nothing, and not everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm

BLOCK_BYTES = 64 << 20  # of scores held at once


@dataclass(frozen=True, slots=True)
class Jagged:
    """Items of rows: ids `[N]`, offsets `[B + 1]`."""

    ids: torch.Tensor
    offsets: torch.Tensor

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(row from `start`, id) of each item of rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        rows = torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())
        return rows, self.ids[int(offsets[0]) : int(offsets[-1])]


def target_ranks(
    queries_BD: torch.Tensor, items_ID: torch.Tensor, targets_B: torch.Tensor, seen: Jagged | None = None
) -> torch.Tensor:
    """`[B]`: the place of each row's target among all items, 0 for the first; ties before it.

    Args:
        queries_BD, items_ID: a score is a dot product.
        targets_B: ids in [0, I).
        seen: items of each row that are left out, its target never; None: all items count.
    """
    ranks = torch.empty(len(queries_BD), dtype=torch.int64, device=queries_BD.device)
    step = max(1, BLOCK_BYTES // (4 * max(len(items_ID), 1)))
    for start in range(0, len(queries_BD), step):
        stop = min(start + step, len(queries_BD))
        scores = queries_BD[start:stop] @ items_ID.T
        own = scores.gather(1, targets_B[start:stop, None])
        if not bool(own.isfinite().all()):
            raise ValueError("a target's score is not a finite number: the model's vectors are damaged")
        if seen is not None:
            scores[seen.rows(start, stop)] = float("-inf")
            scores.scatter_(1, targets_B[start:stop, None], own)
        ranks[start:stop] = (scores >= own).sum(1) - 1
    return ranks


@dataclass(frozen=True, slots=True)
class RankingMetrics:
    """Figures over rows with one target each: HR@k (which is recall@k then), NDCG@k, MRR.

    Args:
        ks: the k.
        filtered: whether seen items were left out; it is part of each figure's name.
        sums: added up over rows: HR and NDCG for each k, then reciprocal ranks, then rows.
    """

    ks: tuple[int, ...]
    filtered: bool
    sums: torch.Tensor

    @classmethod
    def of(cls, ranks_B: torch.Tensor, ks: Sequence[int] = (10, 50, 200), filtered: bool = True) -> RankingMetrics:
        """From each row's rank, 0 for the first."""
        ranks = ranks_B.double()
        gains = 1 / torch.log2(ranks + 2)
        parts = [part for k in ks for part in ((ranks < k).double().sum(), gains[ranks < k].sum())]
        total = torch.tensor(float(len(ranks)), dtype=torch.float64, device=ranks.device)
        return cls(tuple(ks), filtered, torch.stack([*parts, (1 / (ranks + 1)).sum(), total]))

    def over(self, group: comm.Group) -> RankingMetrics:
        """Of all ranks' rows. Collective."""
        return RankingMetrics(self.ks, self.filtered, comm.all_reduce(self.sums.clone(), group))

    def __add__(self, other: RankingMetrics) -> RankingMetrics:
        if (self.ks, self.filtered) != (other.ks, other.filtered):
            raise ValueError("ranking metrics of different k, or with and without seen items, do not add up")
        return RankingMetrics(self.ks, self.filtered, self.sums + other.sums)

    def figures(self) -> dict[str, float]:
        """Name → figure; empty without rows. Names end in `/unseen` where seen items were left out."""
        *values, rows = self.sums.tolist()
        if not rows:
            return {}
        names = [name for k in self.ks for name in (f"hr@{k}", f"ndcg@{k}")] + ["mrr"]
        end = "/unseen" if self.filtered else ""
        return {f"{name}{end}": value / rows for name, value in zip(names, values, strict=True)}


def popularity_ranks(counts_I: torch.Tensor, targets_B: torch.Tensor, seen: Jagged | None = None) -> torch.Tensor:
    """The ranks of a model that scores each item by its count, as `target_ranks` counts them: what a trained model must
    be better than."""
    own_B = counts_I[targets_B]
    ranks = len(counts_I) - torch.searchsorted(counts_I.sort().values, own_B) - 1
    if seen is None:
        return ranks
    rows, ids = seen.rows(0, len(targets_B))
    once = (rows * len(counts_I) + ids).unique()
    rows, ids = once // len(counts_I), once % len(counts_I)
    before = (counts_I[ids] >= own_B[rows]) & (ids != targets_B[rows])
    return ranks.index_add(0, rows, -before.long())
