"""Numbers and mixed labels against their definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rayrec.metrics import GroupedAuc, LabelMetrics
from tests.ranks import on_ranks


def drawn(rows: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Predictions and labels [B, 2], weights [B]; a third of the second label was not observed."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randn(rows, 2, generator=generator) * 3 + 1
    predictions = labels * 0.5 + torch.randn(rows, 2, generator=generator)
    labels[::3, 1] = math.nan
    return predictions, labels, torch.randint(0, 3, (rows,), generator=generator).float()


def by_hand(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> dict[str, Any]:
    seen = ~labels.isnan()
    p, y, w = (part[seen].double().numpy() for part in (predictions, labels, weights))
    mse, mean = np.average((p - y) ** 2, weights=w), np.average(y, weights=w)
    return {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": np.average(abs(p - y), weights=w),
        "r2": 1 - mse / np.average((y - mean) ** 2, weights=w),
        "label_mean": mean,
        "prediction_mean": np.average(p, weights=w),
        "samples": len(y),
    }


def test_numbers_are_measured_apart_as_they_are_defined() -> None:
    predictions, labels, weights = drawn()
    both = LabelMetrics(["number"] * 2, names=["stars", "seconds"])
    for rows in (slice(0, 25), slice(25, None)):
        both.update(predictions[rows], labels[rows], weights[rows])
    figures = both.compute()
    tasks = figures.pop("tasks")
    assert list(tasks) == ["stars", "seconds"] and figures == tasks["stars"]
    for place, name in enumerate(tasks):
        assert tasks[name] == pytest.approx(by_hand(predictions[:, place], labels[:, place], weights), rel=1e-9)
    one = LabelMetrics(["number"])
    one.update(predictions[:, 1], labels[:, 1])
    assert one.compute() == pytest.approx(by_hand(predictions[:, 1], labels[:, 1], torch.ones(60)), rel=1e-9)
    again = LabelMetrics(["number"])
    again.load_state(one.state())
    assert again.compute() == one.compute()
    one.reset()
    assert one.compute() == {**dict.fromkeys(again.compute()), "samples": 0} and again.compute()["samples"] == 40


def test_numbers_that_are_not_defined_are_none() -> None:
    metrics = LabelMetrics(["number"])
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))
    found = metrics.compute()
    assert found["r2"] is None and found["mse"] == 2.5, "labels that are all alike have no variance"
    metrics.update(torch.tensor([math.inf]), torch.tensor([0.0]))
    found = metrics.compute()
    assert {name for name, value in found.items() if value is None} == {"mse", "rmse", "mae", "r2", "prediction_mean"}
    assert (found["label_mean"], found["samples"]) == (2.0, 3)
    for weight in (0.0, 1.0):
        unweighted = LabelMetrics(["number"])
        unweighted.update(torch.ones(1), torch.zeros(1), torch.tensor([weight]))
        assert unweighted.compute()["mse"] == (1.0 if weight else None)


def test_what_does_not_fit_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \[3, 1\] and labels \[3, 1\] must both be of shape \[B\]"):
        LabelMetrics(["number"]).update(torch.ones(3, 1), torch.ones(3, 1))
    for wrong in ((torch.ones(3), torch.ones(2)), (torch.ones(()), torch.ones(()))):
        with pytest.raises(ValueError, match="must both be of shape"):
            LabelMetrics(["number"]).update(*wrong)
    both = LabelMetrics(["number"] * 2, names=["a", "b"])
    for state, words in (
        (LabelMetrics(["number"]).state(), "same bins and labels"),
        ({}, "expected"),
        ({**both.state(), "more": torch.ones(1)}, "expected"),
    ):
        with pytest.raises(ValueError, match=words):
            both.load_state(state)


def test_labels_of_both_kinds_are_each_measured_as_theirs() -> None:
    predictions, numbers, weights = drawn()
    clicks = (numbers > 0).float()
    logits = torch.stack([predictions[:, 0], predictions[:, 1], predictions[:, 0] - 1], dim=1)
    labels = torch.stack([numbers[:, 0], clicks[:, 1], clicks[:, 0]], dim=1)
    mixed = LabelMetrics(["number", "binary", "binary"], names=["stars", "like", "click"])
    mixed.update(logits, labels, weights)
    number, binary = LabelMetrics(["number"], names=["stars"]), LabelMetrics(names=["like", "click"])
    number.update(logits[:, :1], labels[:, :1], weights)
    binary.update(logits[:, 1:], labels[:, 1:], weights)
    found = mixed.compute()
    assert found == {**found["tasks"]["stars"], "tasks": {**number.compute()["tasks"], **binary.compute()["tasks"]}}
    assert list(found["tasks"]) == ["stars", "like", "click"]
    again = LabelMetrics(["number", "binary", "binary"], names=["stars", "like", "click"])
    again.load_state(mixed.state())
    mixed.reset()
    assert again.compute() == found and mixed.compute()["samples"] == 0


def mixed_of_rank(group: dist.ProcessGroup) -> tuple[dict[str, Any], int]:
    """Figures of all ranks' rows, and how many of them this rank has."""
    predictions, labels, weights = drawn()
    labels[:, 0] = (labels[:, 0] > 0).float()
    mine = slice(group.rank(), None, group.size())
    mixed = LabelMetrics(["binary", "number"], names=["click", "stars"])
    mixed.update(predictions[mine], labels[mine], weights[mine])
    return mixed.compute(group), mixed.compute()["samples"]


def test_labels_of_both_kinds_add_up_over_ranks() -> None:
    predictions, labels, weights = drawn()
    expected = by_hand(predictions[:, 1], labels[:, 1], weights)
    for found, here in on_ranks(2, mixed_of_rank):
        assert found["tasks"]["stars"] == pytest.approx(expected, rel=1e-9)
        assert (found["samples"], here) == (60, 30)


def test_the_first_of_several_labels_stands_above() -> None:
    auc = GroupedAuc(["one", "other"])
    auc.update(torch.tensor([1, 1]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    found = auc.compute()
    assert found["gauc"] == 1.0 == found["tasks"]["one"]["gauc"] and found["tasks"]["other"]["gauc"] == 0.0


def test_rows_without_a_weight_are_in_no_group() -> None:
    auc, one, zero = GroupedAuc(k=1), torch.tensor([1]), torch.tensor([0.0])
    auc.update(one, torch.tensor([2.0]), torch.tensor([1.0]), zero)
    auc.update(one, torch.tensor([1.0]), torch.tensor([0.0]))
    assert auc.compute() == {"gauc": None, "groups": 0, "ndcg@1": None, "recall@1": None}
    auc.update(one, torch.tensor([math.nan]), torch.tensor([1.0]), zero)  # its logit does not count either
    auc.update(one, torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([2.0]))
    assert auc.compute() == {"gauc": 0.0, "groups": 1, "ndcg@1": 0.0, "recall@1": 0.0}
    light = GroupedAuc(k=1)
    light.update(torch.tensor([1, 1]), torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.5]))
    assert light.compute() == {"gauc": 1.0, "groups": 1, "ndcg@1": 1.0, "recall@1": 1.0}
    auc.update(one, torch.tensor([math.inf]), torch.tensor([0.0]))
    assert auc.compute() == {"gauc": None, "groups": 0, "ndcg@1": None, "recall@1": None}
