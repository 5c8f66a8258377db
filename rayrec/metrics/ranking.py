"""Ranking metrics over a whole corpus, exact and in bounded memory: HR@k, recall@k, NDCG@k, MRR, of one target a row or
of several targets a group.

All items are scored, without sampling. Ties count against the model: a target ranks after all items of equal score, so
that a constant model finds nothing. Each rank scores its own part of the items.
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

    def selected(self, kept_B: torch.Tensor) -> Jagged:
        """The rows where `kept_B` holds, without ids below 0."""
        rows_N = torch.arange(len(kept_B), device=self.ids.device).repeat_interleave(self.offsets.diff())
        kept_N = kept_B[rows_N] & (self.ids >= 0)
        lengths = torch.bincount(rows_N[kept_N], minlength=len(kept_B))[kept_B]
        return Jagged(self.ids[kept_N], F.pad(lengths.cumsum(0), (1, 0)))

    def taken(self, rows: torch.Tensor) -> Jagged:
        """The rows with these numbers `[Q]`, in this order."""
        lengths = self.offsets.diff()[rows]
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        shift = (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(lengths)
        return Jagged(self.ids[torch.arange(len(shift), device=shift.device) + shift], offsets)

    @classmethod
    def joined(cls, parts: Sequence[Jagged]) -> Jagged:
        """The items of all parts, row by row; all parts have the same number of rows."""
        if len(parts) == 1:
            return parts[0]
        lengths = [part.offsets.diff() for part in parts]
        rows = torch.cat([torch.arange(len(n), device=n.device).repeat_interleave(n) for n in lengths])
        order = rows.argsort(stable=True)
        offsets = F.pad(torch.stack(lengths).sum(0).cumsum(0), (1, 0))
        return cls(torch.cat([part.ids for part in parts])[order], offsets)

    def over(self, group: comm.Group) -> Jagged:
        """The rows of all ranks, in their order. Collective."""
        lengths = comm.all_gather_uneven(self.offsets.diff(), group)
        return Jagged(comm.all_gather_uneven(self.ids, group), F.pad(lengths.cumsum(0), (1, 0)))


def part_of(count: int, rank: int, size: int) -> range:
    """The items that a rank scores, of `count`: ranks have equal parts, the last ones perhaps less."""
    step = -(-count // size)
    return range(min(rank * step, count), min((rank + 1) * step, count))


def target_ranks(
    queries_BD: torch.Tensor,
    items_ID: torch.Tensor,
    targets_B: torch.Tensor,
    seen: Jagged | None = None,
    *,
    group: comm.Group = None,
    top: TopItems | None = None,
) -> torch.Tensor:
    """Rank of each row's target among all items, `[B]`, 0 for the best; ties rank before the target.

    With a group, collective: each rank has its own rows, and the vectors of its part of the items (`part_of`). Memory:
    the queries and seen items of all ranks, and `BLOCK_BYTES` of scores.

    Args:
        queries_BD, items_ID: Vectors. A score is a dot product.
        targets_B: Ids in [0, number of all items).
        seen: Items to exclude for each row, except its target. Default: none.
        group: Process group of the ranks; None: one process has all items.
        top: Notes the best items of each row.

    Raises:
        ValueError: A target's score is not finite.
    """
    own, rank, size = len(queries_BD), 0, 1
    starts = [0, own]
    if group is not None and group.size() > 1:
        rank, size = group.rank(), group.size()
        counts = comm.all_gather(torch.tensor([own], device=queries_BD.device), group).flatten().tolist()
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        queries_BD = comm.gather_rows(queries_BD, counts, group)
        targets_B = comm.all_gather_uneven(targets_B, group)
        seen = None if seen is None else seen.over(group)
    total = int(comm.all_reduce(torch.tensor([len(items_ID)], device=queries_BD.device), group))
    first, stop_item = (part := part_of(total, rank, size)).start, part.stop
    not_worse = torch.zeros(len(queries_BD), dtype=torch.int64, device=queries_BD.device)
    step = max(1, BLOCK_BYTES // (4 * max(-(-total // size), 1)))  # equal on all ranks
    for start in range(0, len(queries_BD), step):
        stop = min(start + step, len(queries_BD))
        scores, targets = queries_BD[start:stop] @ items_ID.T, targets_B[start:stop]
        own_Q = ((targets >= first) & (targets < stop_item)).nonzero().flatten()
        target_scores = scores.new_zeros(len(targets))
        target_scores[own_Q] = scores[own_Q, targets[own_Q] - first]
        target_scores = comm.all_reduce(target_scores, group)
        if not bool(target_scores.isfinite().all()):
            raise ValueError("a target's score is not finite: check the model's vectors for NaN and infinity")
        if seen is not None:
            rows, ids = seen.rows(start, stop)
            is_own = (ids >= first) & (ids < stop_item)
            scores[rows[is_own], ids[is_own] - first] = float("-inf")
            scores[own_Q, targets[own_Q] - first] = target_scores[own_Q]
        not_worse[start:stop] = (scores >= target_scores[:, None]).sum(1)
        if top is not None:
            top.note(scores, first, group)
    return comm.all_reduce(not_worse, group)[starts[rank] : starts[rank] + own] - 1


class TopItems:
    """The items among the k best of any row, for coverage.

    Args:
        k: Length of each row's list.
        count: Number of items.
    """

    def __init__(self, k: int, count: int, device: torch.device) -> None:
        self.k, self.found = k, torch.zeros(count, dtype=torch.bool, device=device)

    def note(self, scores: torch.Tensor, first: int, group: comm.Group) -> None:
        """Adds the best items of some rows. Collective: merges the best of each rank's items.

        Args:
            scores: Of these rows and this rank's items, -inf for seen ones.
            first: The first of these items.
        """
        values, places = scores.topk(min(self.k, scores.shape[1]), dim=1)
        values = F.pad(values, (0, self.k - values.shape[1]), value=float("-inf"))
        ids = F.pad(places + first, (0, self.k - places.shape[1]))
        if group is not None and group.size() > 1:
            values, ids = (comm.all_gather(part, group).transpose(0, 1).flatten(1) for part in (values, ids))
            values, places = values.topk(self.k, dim=1)
            ids = ids.gather(1, places)
        self.found[ids[values > float("-inf")]] = True

    @property
    def coverage(self) -> float:
        """The share of items that is among the best of any row."""
        return float(self.found.double().mean()) if len(self.found) else 0.0


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

    def __init__(self, ks: Sequence[int] = KS) -> None:
        self._ks, self._sums = ks, dict[int, torch.Tensor]()

    def update(self, buckets_B: torch.Tensor, ranks_B: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds rows, and copies them to the CPU."""
        terms = ranking_terms(ranks_B, self._ks, weights_B).cpu()
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


def metrics_of_groups(
    group_N: torch.Tensor,
    target_N: torch.Tensor,
    rank_N: torch.Tensor,
    ks: Sequence[int] = KS,
    weight_N: torch.Tensor | None = None,
    filtered: bool = True,
) -> dict[str, float | None]:
    """Metrics of groups, such as users, with several targets each: means over the groups, on the CPU.

    For a group with targets T, of which hits h are among the first k items: `hr@k` = [h > 0], `recall@k` = h / |T|,
    `precision@k` = h / k, `map@k` = Σ precision at each hit / min(|T|, k), `ndcg@k` = DCG / DCG of a perfect ranking,
    `mrr` = 1 / the first target's place.

    Args:
        group_N, target_N, rank_N: Group, item and rank (0: best) of each target; a repeated target counts once.
        weight_N: The weight of a group is the mean over its targets. None: 1.

    Returns:
        Metrics by name, None without groups. Names end in `/unseen` if seen items were excluded.
    """
    group_N, target_N, rank_N = group_N.cpu(), target_N.cpu(), rank_N.cpu()
    weight_N = torch.ones(len(group_N), dtype=torch.float64) if weight_N is None else weight_N.double().cpu()
    order = rank_N.argsort(stable=True)
    order = order[target_N[order].argsort(stable=True)]
    order = order[group_N[order].argsort(stable=True)]
    same = torch.zeros(len(order), dtype=torch.bool)
    if len(order) > 1:
        before, after = order[:-1], order[1:]
        same[1:] = (group_N[before] == group_N[after]) & (target_N[before] == target_N[after])
    order = order[~same]
    order = order[rank_N[order].argsort(stable=True)]
    order = order[group_N[order].argsort(stable=True)]
    _, index_N, size_G = group_N[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank_N, starts = rank_N[order].double(), size_G.cumsum(0) - size_G
    hits_before = torch.arange(len(order)) - starts[index_N]
    size_G = size_G.double()

    def summed(values_N: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(size_G), dtype=torch.float64).index_add(0, index_N, values_N.double())

    weight_G = summed(weight_N[order]) / size_G
    gains_N, ideal = 1 / torch.log2(rank_N + 2), (1 / torch.log2(torch.arange(max(ks)).double() + 2)).cumsum(0)
    by_name: dict[str, torch.Tensor] = {}
    for k in ks:
        hit_N = rank_N < k
        hits_G, most_G = summed(hit_N), size_G.clamp(max=k)
        by_name |= {
            f"hr@{k}": (hits_G > 0).double(),
            f"recall@{k}": hits_G / size_G,
            f"precision@{k}": hits_G / k,
            f"map@{k}": summed(hit_N * (hits_before + 1) / (rank_N + 1)) / most_G,
            f"ndcg@{k}": summed(hit_N * gains_N) / ideal[most_G.long() - 1],
        }
    by_name["mrr"] = summed((hits_before == 0) / (rank_N + 1))
    end, total = "/unseen" if filtered else "", float(weight_G.sum())
    return {
        f"{name}{end}": float((values * weight_G).sum()) / total if total else None for name, values in by_name.items()
    }
