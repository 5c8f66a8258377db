"""AUC inside groups and figures by bucket, against the same computed group by group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.retrieval import RetrievalNormalizedDCG

from rayrec.distributed import comm
from rayrec.metrics import BucketedMetrics, GroupedAuc, LabelMetrics
from tests.metrics.test_binary import clicks
from tests.ranks import on_ranks

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def pairs_in_order(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """Weighted Mann-Whitney, pair by pair."""
    won = total = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            pair = weights[i] * weights[j]
            won += pair * (1.0 if logits[i] > logits[j] else 0.5 if logits[i] == logits[j] else 0.0)
            total += pair
    return won / total


def by_hand(rows: Rows) -> tuple[float | None, int]:
    keys, logits, labels, weights = (part.double().numpy() for part in rows)
    areas, impressions = [], []
    for key in np.unique(keys):
        mine = (keys == key) & (weights > 0)
        if len(np.unique(labels[mine])) == 2:
            areas.append(pairs_in_order(logits[mine], labels[mine], weights[mine]))
            impressions.append(weights[mine].sum())
    return (float(np.average(areas, weights=impressions)) if areas else None), len(areas)


def rows_of(count: int, groups: int, seed: int) -> Rows:
    """Ties and weights of 0 among them, groups of unlike sizes, and keys of all signs."""
    logits, labels = clicks(count, seed)
    generator = torch.Generator().manual_seed(seed)
    keys = (torch.rand(count, generator=generator) ** 2 * groups).long() - 3
    weights = torch.randint(0, 4, (count,), generator=generator) / 2
    return keys * 2**40, (logits * 4).round() / 4, labels, weights


@settings(max_examples=40)
@given(st.integers(0, 120), st.integers(1, 30), st.integers(0, 1000))
def test_equals_the_groups_taken_one_by_one(count: int, groups: int, seed: int) -> None:
    rows = rows_of(count, groups, seed)
    metric = GroupedAuc()
    for part in zip(*(column.split(50) for column in rows), strict=True):
        metric.update(*part)
    found, expected = metric.compute(), by_hand(rows)
    assert found["groups"] == expected[1]
    assert found["gauc"] == (None if expected[0] is None else pytest.approx(expected[0], rel=1e-9))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_first_k_of_each_group(k: int) -> None:
    """NDCG against torchmetrics, recall group by group; without ties, and groups without a positive are left out."""
    keys, logits, labels, _ = rows_of(400, 30, seed=8)
    logits = logits + torch.arange(400) * 1e-3
    metric = GroupedAuc(k=k)
    metric.update(keys, logits, labels)
    found = metric.compute()
    groups = torch.unique(keys, return_inverse=True)[1]
    expected = RetrievalNormalizedDCG(top_k=k, empty_target_action="skip")(logits, labels.long(), indexes=groups)
    assert found[f"ndcg@{k}"] == pytest.approx(float(expected), rel=1e-6)
    recalls = []
    for group in groups.unique():
        mine = labels[groups == group][logits[groups == group].argsort(descending=True)]
        if mine.any():
            recalls.append(float(mine[:k].sum() / mine.sum()))
    assert found[f"recall@{k}"] == pytest.approx(np.mean(recalls), rel=1e-6)


def gauc_of_rank(group: dist.ProcessGroup, rows: Rows) -> dict[str, Any]:
    """The last rank has no rows; a group's rows are on several others."""
    metric = GroupedAuc()
    if group.rank() < group.size() - 1:
        mine = slice(group.rank(), None, group.size() - 1)
        metric.update(*(part[mine] for part in rows))
    return metric.compute(group)


@pytest.mark.parametrize("world", [2, 3])
def test_groups_may_be_spread_over_ranks(world: int) -> None:
    rows = rows_of(800, 40, seed=5)
    alone = GroupedAuc()
    alone.update(*rows)
    expected = alone.compute()
    assert expected["groups"] > 10 and expected["gauc"] == pytest.approx(by_hand(rows)[0], rel=1e-9)
    for found in on_ranks(world, gauc_of_rank, rows):
        assert found == pytest.approx(expected, rel=1e-12)


def test_several_labels_and_rows_that_were_not_observed() -> None:
    keys, logits, labels, weights = rows_of(300, 20, seed=6)
    second = labels.roll(1)
    second[::2] = math.nan
    both = GroupedAuc(["click", "like"])
    both.update(keys, torch.stack([logits, -logits], dim=1), torch.stack([labels, second], dim=1), weights)
    seen = ~second.isnan()
    tasks = both.compute()["tasks"]
    assert tasks["click"]["gauc"] == pytest.approx(by_hand((keys, logits, labels, weights))[0])
    assert tasks["like"]["gauc"] == pytest.approx(by_hand((keys[seen], -logits[seen], second[seen], weights[seen]))[0])


def test_each_of_several_labels_has_all_figures_as_if_alone() -> None:
    keys, logits, labels, weights = rows_of(200, 20, seed=9)
    scores, marks = torch.stack([logits, -logits], dim=1), torch.stack([labels, labels.roll(3)], dim=1)
    both = GroupedAuc(["click", "like"], k=2)
    both.update(keys, scores, marks, weights)
    for place, (_, figures) in enumerate(both.compute()["tasks"].items()):
        alone = GroupedAuc(k=2)
        alone.update(keys, scores[:, place], marks[:, place], weights)
        assert figures == alone.compute() and set(figures) == {"gauc", "groups", "ndcg@2", "recall@2"}


def test_nothing_to_compare() -> None:
    metric = GroupedAuc()
    assert metric.compute() == {"gauc": None, "groups": 0, "ndcg@10": None, "recall@10": None}
    metric.update(torch.tensor([1, 2]), torch.zeros(2), torch.tensor([0.0, 1.0]))
    found = metric.compute()
    assert (found["gauc"], found["groups"]) == (None, 0), "no group has both labels"
    assert (found["ndcg@10"], found["recall@10"]) == (1.0, 1.0)
    metric.update(torch.tensor([1]), torch.tensor([math.inf]), torch.tensor([1.0]))
    assert metric.compute()["gauc"] is None


def buckets_of_rank(group: dist.ProcessGroup | None, rows: Rows, ranks: int) -> dict[int, dict[str, Any]]:
    mine = slice(None) if group is None else slice(group.rank() * 200, None if group.rank() == ranks - 1 else 200)
    metric = BucketedMetrics()
    buckets, *rest = (part[mine] for part in rows)
    metric.update(buckets, *rest)
    return metric.compute(group)


def test_buckets_are_measured_apart_on_any_number_of_ranks() -> None:
    """Ranks have seen other buckets; within the coarser bins' error of the AUC."""
    _, logits, labels, weights = rows_of(500, 10, seed=7)
    buckets = torch.arange(500) // 60 - 2
    alone = buckets_of_rank(None, (buckets, logits, labels, weights), 1)
    assert list(alone) == list(range(-2, 7))
    for bucket, figures in alone.items():
        exact, inside = LabelMetrics(), buckets == bucket
        exact.update(logits[inside], labels[inside], weights[inside])
        assert figures == pytest.approx(exact.compute(), rel=1e-3)
    for found in on_ranks(2, buckets_of_rank, (buckets, logits, labels, weights), 2):
        assert list(found) == list(alone)
        assert all(found[bucket] == pytest.approx(alone[bucket], rel=1e-12) for bucket in alone)


def blocks_of_rank(group: dist.ProcessGroup, count: int) -> tuple[dict[int, dict[str, Any]], int]:
    metric = BucketedMetrics()
    buckets = torch.arange(group.rank(), count, group.size())
    for part in (buckets[: len(buckets) // 3], buckets):  # the second batch has old and new buckets
        metric.update(part, torch.full((len(part),), 1.0), torch.ones(len(part)))
    with comm.count_collectives() as counter:
        return metric.compute(group), counter["all_reduce"]


def test_many_buckets_are_combined_in_few_collectives() -> None:
    for found, collectives in on_ranks(2, blocks_of_rank, 700):
        assert list(found) == list(range(700))
        assert sorted({figures["samples"] for figures in found.values()}) == [1, 2]
        assert collectives == 2, "700 buckets of 128 KiB, 64 MiB at a time"


def test_a_thousand_buckets_are_allowed() -> None:
    metric = BucketedMetrics()
    metric.update(torch.arange(1000), torch.zeros(1000), torch.zeros(1000))
    metric.update(torch.tensor([7]), torch.zeros(1), torch.zeros(1))
    found = metric.compute()
    assert len(found) == 1000 and found[7]["samples"] == 2
    metric.update(torch.tensor([1000]), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="more than 1,000 time buckets"):
        metric.compute()


def test_buckets_of_labels_of_both_kinds() -> None:
    metric = BucketedMetrics(["click", "stars"], ["binary", "number"])
    scores, labels = torch.tensor([[0.0, 3.0], [0.0, 5.0]]), torch.tensor([[1.0, 4.0], [0.0, 5.0]])
    metric.update(torch.tensor([7, 9]), scores, labels)
    found = metric.compute()
    assert [found[bucket]["tasks"]["stars"]["mae"] for bucket in (7, 9)] == [1.0, 0.0]
    assert [found[bucket]["ctr"] for bucket in (7, 9)] == [1.0, 0.0]
