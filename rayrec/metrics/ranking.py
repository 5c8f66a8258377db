"""Ranking metrics over a whole corpus, exact and in bounded memory: HR@k, recall@k, NDCG@k, MRR.

All items are scored, without sampling. Ties count against the model: a target ranks after all items of equal score, so
that a constant model finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayrec.distributed import comm

KS = (10, 20, 50, 200)
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

    def selected(self, kept_B: torch.Tensor, ids: range) -> Jagged:
        """The rows where `kept_B` holds, and of their items those in `ids`, counted from its start."""
        rows_N = torch.arange(len(kept_B), device=self.ids.device).repeat_interleave(self.offsets.diff())
        kept_N = kept_B[rows_N] & (self.ids >= ids.start) & (self.ids < ids.stop)
        lengths = torch.bincount(rows_N[kept_N], minlength=len(kept_B))[kept_B]
        return Jagged(self.ids[kept_N] - ids.start, F.pad(lengths.cumsum(0), (1, 0)))


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


def ranking_terms(ranks_B: torch.Tensor, ks: Sequence[int] = KS, weights_B: torch.Tensor | None = None) -> torch.Tensor:
    """What each row adds to `RankingMetrics.sums`, `[B, 2 len(ks) + 3]`."""
    ranks, one = ranks_B.double(), torch.ones(len(ranks_B), dtype=torch.float64, device=ranks_B.device)
    gains = 1 / torch.log2(ranks + 2)
    found = [(ranks < k).double() for k in ks]
    terms = torch.stack([*(x for hit in found for x in (hit, hit * gains)), 1 / (ranks + 1), one], dim=1)
    if weights_B is not None:
        terms = terms * weights_B.double()[:, None]
    return torch.cat([terms, one[:, None]], dim=1)


@dataclass(frozen=True, slots=True)
class RankingMetrics:
    """Metrics over rows with one target each: HR@k (equal to recall@k), NDCG@k, MRR.

    Args:
        ks: Cutoffs k.
        filtered: Whether seen items were excluded. Part of each metric's name.
        sums: Sums over rows: weighted HR and NDCG for each k, reciprocal ranks and weights; then the number of rows.
    """

    ks: tuple[int, ...]
    filtered: bool
    sums: torch.Tensor

    @classmethod
    def of(
        cls,
        ranks_B: torch.Tensor,
        ks: Sequence[int] = KS,
        filtered: bool = True,
        weights_B: torch.Tensor | None = None,
    ) -> RankingMetrics:
        """From the rank of each row's target, 0 for the best."""
        return cls(tuple(ks), filtered, ranking_terms(ranks_B, ks, weights_B).sum(0))

    def over(self, group: comm.Group) -> RankingMetrics:
        """Metrics over the rows of all ranks. Collective."""
        return RankingMetrics(self.ks, self.filtered, comm.all_reduce(self.sums.clone(), group))

    def __add__(self, other: RankingMetrics) -> RankingMetrics:
        if (self.ks, self.filtered) != (other.ks, other.filtered):
            raise ValueError("ranking metrics of different k, or with and without seen items, do not add up")
        return RankingMetrics(self.ks, self.filtered, self.sums + other.sums)

    @property
    def rows(self) -> int:
        return int(self.sums[-1])

    def metrics(self) -> dict[str, float | None]:
        """Metrics by name; None without rows. Names end in `/unseen` if seen items were excluded."""
        *values, weight, _ = self.sums.tolist()
        names = [name for k in self.ks for name in (f"hr@{k}", f"ndcg@{k}")] + ["mrr"]
        end = "/unseen" if self.filtered else ""
        return {f"{name}{end}": value / weight if weight else None for name, value in zip(names, values, strict=True)}


class BucketedRanks:
    """`RankingMetrics.sums` of numbered subsets of the rows, for example of days."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def update(self, buckets_B: torch.Tensor, ranks_B: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds rows, and copies them to the CPU."""
        terms = ranking_terms(ranks_B, weights_B=weights_B).cpu()
        buckets, index_B = buckets_B.cpu().unique(return_inverse=True)
        sums = terms.new_zeros(len(buckets), terms.shape[1]).index_add_(0, index_B, terms)
        for bucket, total in zip(buckets.tolist(), sums, strict=True):
            self._sums[bucket] = self._sums[bucket] + total if bucket in self._sums else total

    def compute(self, group: comm.Group) -> dict[int, torch.Tensor]:
        """The sums of every bucket over the ranks of a gloo group, ascending. Collective."""
        by_rank = comm.all_gather_object(self._sums, group)
        buckets = sorted({bucket for sums in by_rank for bucket in sums})
        return {bucket: torch.stack([sums[bucket] for sums in by_rank if bucket in sums]).sum(0) for bucket in buckets}


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
