"""Ranking metrics over a whole corpus, exact and in bounded memory: HR@k, recall@k, NDCG@k, MRR.

All items are scored, without sampling. Ties count against the model: a target ranks after all items of equal score, so
that a constant model finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm

BLOCK_BYTES = 64 << 20  # maximum memory of scores


@dataclass(frozen=True, slots=True)
class Jagged:
    """Items by row: ids `[N]`, offsets `[B + 1]`."""

    ids: torch.Tensor
    offsets: torch.Tensor

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(row number minus `start`, id) of each item of rows [start, stop)."""
        offsets = self.offsets[start : stop + 1]
        rows = torch.arange(len(offsets) - 1, device=offsets.device).repeat_interleave(offsets.diff())
        return rows, self.ids[int(offsets[0]) : int(offsets[-1])]


def target_ranks(
    queries_BD: torch.Tensor, items_ID: torch.Tensor, targets_B: torch.Tensor, seen: Jagged | None = None
) -> torch.Tensor:
    """Rank of each row's target among all items, `[B]`, 0 for the best; ties rank before the target.

    Args:
        queries_BD, items_ID: Vectors. A score is a dot product.
        targets_B: Ids in [0, I).
        seen: Items to exclude for each row, except its target. Default: none.

    Raises:
        ValueError: A target's score is not finite.
    """
    ranks = torch.empty(len(queries_BD), dtype=torch.int64, device=queries_BD.device)
    step = max(1, BLOCK_BYTES // (4 * max(len(items_ID), 1)))
    for start in range(0, len(queries_BD), step):
        stop = min(start + step, len(queries_BD))
        scores = queries_BD[start:stop] @ items_ID.T
        target_scores = scores.gather(1, targets_B[start:stop, None])
        if not bool(target_scores.isfinite().all()):
            raise ValueError("a target's score is not finite: check the model's vectors for NaN and infinity")
        if seen is not None:
            scores[seen.rows(start, stop)] = float("-inf")
            scores.scatter_(1, targets_B[start:stop, None], target_scores)
        ranks[start:stop] = (scores >= target_scores).sum(1) - 1
    return ranks


@dataclass(frozen=True, slots=True)
class RankingMetrics:
    """Metrics over rows with one target each: HR@k (equal to recall@k), NDCG@k, MRR.

    Args:
        ks: Cutoffs k.
        filtered: Whether seen items were excluded. Part of each metric's name.
        sums: Sums over rows: HR and NDCG for each k, then reciprocal ranks, then rows.
    """

    ks: tuple[int, ...]
    filtered: bool
    sums: torch.Tensor

    @classmethod
    def of(cls, ranks_B: torch.Tensor, ks: Sequence[int] = (10, 50, 200), filtered: bool = True) -> RankingMetrics:
        """From the rank of each row's target, 0 for the best."""
        ranks = ranks_B.double()
        gains = 1 / torch.log2(ranks + 2)
        summed = [value for k in ks for value in ((ranks < k).double().sum(), gains[ranks < k].sum())]
        total = torch.tensor(float(len(ranks)), dtype=torch.float64, device=ranks.device)
        return cls(tuple(ks), filtered, torch.stack([*summed, (1 / (ranks + 1)).sum(), total]))

    def over(self, group: comm.Group) -> RankingMetrics:
        """Metrics over the rows of all ranks. Collective."""
        return RankingMetrics(self.ks, self.filtered, comm.all_reduce(self.sums.clone(), group))

    def __add__(self, other: RankingMetrics) -> RankingMetrics:
        if (self.ks, self.filtered) != (other.ks, other.filtered):
            raise ValueError("ranking metrics of different k, or with and without seen items, do not add up")
        return RankingMetrics(self.ks, self.filtered, self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """Metrics by name; empty without rows. Names end in `/unseen` if seen items were excluded."""
        *values, rows = self.sums.tolist()
        if not rows:
            return {}
        names = [name for k in self.ks for name in (f"hr@{k}", f"ndcg@{k}")] + ["mrr"]
        end = "/unseen" if self.filtered else ""
        return {f"{name}{end}": value / rows for name, value in zip(names, values, strict=True)}


def popularity_ranks(counts_I: torch.Tensor, targets_B: torch.Tensor, seen: Jagged | None = None) -> torch.Tensor:
    """`target_ranks` of a model that scores items by their count: the baseline of a trained model."""
    own_B = counts_I[targets_B]
    ranks = len(counts_I) - torch.searchsorted(counts_I.sort().values, own_B) - 1
    if seen is None:
        return ranks
    rows, ids = seen.rows(0, len(targets_B))
    once = (rows * len(counts_I) + ids).unique()
    rows, ids = once // len(counts_I), once % len(counts_I)
    not_worse = (counts_I[ids] >= own_B[rows]) & (ids != targets_B[rows])
    return ranks.index_add(0, rows, -not_worse.long())
