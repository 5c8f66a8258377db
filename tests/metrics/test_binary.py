"""Binary labels against metrics computed exactly, sample by sample."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.classification import BinaryAveragePrecision

from rayrec.distributed import comm
from rayrec.metrics import LabelMetrics, LogitBins
from rayrec.metrics.histogram import binned_auc
from tests.ranks import on_ranks


def exact_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mann-Whitney: the share of (negative, positive) pairs in the right order, ties counting half."""
    _, rank, count = np.unique(logits, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2
    positives = int(labels.sum())
    negatives = len(labels) - positives
    return (mean_rank[rank][labels == 1].sum() - positives * (positives + 1) / 2) / (positives * negatives)


FIGURES = (
    "auc", "ne", "logloss", "calibration", "ece", "samples", "auprc", "accuracy", "precision", "recall", "ctr", "mse",
    "mae",
)  # fmt: skip


def undefined(samples: int) -> dict[str, int | None]:
    return {**dict.fromkeys(FIGURES), "samples": samples}


def exact_ece(p: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Over twenty bands of equal weight in order of prediction."""
    order = np.argsort(p)
    p, labels, weights = p[order], labels[order], (np.ones(len(p)) if weights is None else weights)[order]
    middle = weights.cumsum() - weights / 2
    band = (middle / weights.sum() * 20).astype(int)
    total = 0.0
    for number in range(20):
        inside = band == number
        if weights[inside].sum():
            means = [np.average(values[inside], weights=weights[inside]) for values in (p, labels)]
            total += weights[inside].sum() * abs(means[0] - means[1])
    return float(total / weights.sum())


def exact_metrics(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    p = np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
    logloss = np.mean(np.logaddexp(0, np.where(labels == 1, -1, 1) * logits.astype(np.float64)))
    rate = labels.mean()
    # by rank, as probabilities in float32 would tie
    scores = torch.from_numpy(np.unique(logits, return_inverse=True)[1] / len(logits))
    return {
        "auc": exact_auc(logits, labels),
        "ne": logloss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)),
        "logloss": logloss,
        "calibration": p.sum() / labels.sum(),
        "ece": exact_ece(p, labels),
        "samples": len(labels),
        "auprc": float(BinaryAveragePrecision()(scores, torch.from_numpy(labels).long())),
        "accuracy": float(((p >= 0.5) == labels).mean()),
        "precision": float(labels[p >= 0.5].mean()),
        "recall": float((p >= 0.5)[labels == 1].mean()),
        "ctr": rate,
        "mse": float(((p - labels) ** 2).mean()),
        "mae": float(np.abs(p - labels).mean()),
    }


def error_bound(metrics: LabelMetrics) -> float | None:
    """How far `auc` can be from the exact area."""
    area = binned_auc(*metrics.state()["counts"][0])
    return area[1] if area else None


def clicks(rows: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of an ordinary model and labels drawn by them."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(rows, generator=generator) - 1
    labels = (torch.rand(rows, generator=generator) < torch.sigmoid(truth)).float()
    return truth * spread + torch.randn(rows, generator=generator), labels


@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_equals_exact_metrics(spread: float) -> None:
    logits, labels = clicks(200_000, seed=1, spread=spread)
    metrics = LabelMetrics()
    for start in range(0, len(logits), 3_000):
        metrics.update(logits[start : start + 3_000], labels[start : start + 3_000])
    figures, exact = metrics.compute(), exact_metrics(logits.numpy(), labels.numpy())
    assert figures.pop("auc") == pytest.approx(exact.pop("auc"), abs=1e-6)
    assert figures.pop("auprc") == pytest.approx(exact.pop("auprc"), abs=1e-4)
    assert figures.pop("ece") == pytest.approx(exact.pop("ece"), abs=2e-4)
    assert figures == pytest.approx(exact, rel=1e-6)
    bound = error_bound(metrics)
    assert bound is not None and bound < 1e-3


def test_a_reliability_diagram_is_that_of_the_rows_in_order() -> None:
    """Weighted, of two labels of which one is a number, which has none; a calibrated model is on the diagonal."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50_000, generator=generator) * 1.5 - 2
    labels = (torch.rand(50_000, generator=generator) < logits.sigmoid()).float()
    weights = torch.randint(0, 4, (50_000,), generator=generator).float()
    metrics = LabelMetrics(["number", "binary"], names=["value", "click"])
    metrics.update(torch.stack([logits, logits], dim=1), torch.stack([labels, labels], dim=1), weights)
    bands = metrics.reliability_of(metrics.state())
    assert len(bands) == 20 and {band["label"] for band in bands} == {"click"}
    assert sum(band["weight"] for band in bands) == weights.sum()
    order = logits.argsort()
    middle = weights[order].double().cumsum(0) - weights[order] / 2
    for number, band in enumerate(bands):
        inside = order[(middle / weights.sum() * 20).long() == number]
        inside = inside[weights[inside] > 0]
        for key, values in (("predicted", logits.sigmoid()), ("observed", labels)):
            mean = float((values[inside] * weights[inside]).sum() / weights[inside].sum())
            assert band[key] == pytest.approx(mean, abs=2e-3), (number, key)
        assert band["predicted"] == pytest.approx(band["observed"], abs=0.03)
    ece = metrics.compute()["tasks"]["click"]["ece"]
    assert ece == pytest.approx(exact_ece(logits.sigmoid().numpy(), labels.numpy(), weights.numpy()), abs=2e-4)
    assert ece < 0.01


@pytest.mark.parametrize("bins", [1 << 16, 1 << 13])
@pytest.mark.parametrize(("centre", "spread"), [(-9.0, 0.01), (-9.0, 0.003), (0.0, 0.001), (0.0, 1.0)])
def test_the_auc_of_narrow_logits_tells_how_wrong_it_may_be(centre: float, spread: float, bins: int) -> None:
    logits, labels = clicks(20_000, seed=4)
    logits = centre + spread * logits
    metrics = LabelMetrics(names=["click", "other"], bins=LogitBins(count=bins))
    metrics.update(torch.stack([logits, torch.zeros(20_000)], dim=1), torch.stack([labels, labels], dim=1))
    narrow, constant = metrics.compute()["tasks"].values()
    distance = abs(narrow["auc"] - exact_auc(logits.numpy(), labels.numpy()))
    assert distance <= narrow.get("auc_error", 1e-3)
    assert "auc_error" not in narrow or narrow["auc_error"] > 1e-3
    assert constant["auc"] == constant["auc_error"] == 0.5
    if (spread, bins) == (0.003, 1 << 13):
        assert distance > 0.05, "this case must show a wrong AUC"


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_weight_counts_as_so_many_examples(spread: float) -> None:
    """Whole weights against the rows written out as often, any others against the same weights scaled."""
    logits, labels = clicks(20_000, seed=2, spread=spread)
    times = torch.randint(0, 4, logits.shape, generator=torch.Generator().manual_seed(3))
    weighted, repeated, scaled = LabelMetrics(), LabelMetrics(), LabelMetrics()
    weighted.update(logits, labels, times.float())
    repeated.update(logits.repeat_interleave(times), labels.repeat_interleave(times))
    scaled.update(logits, labels, times * 0.37)
    found, expected = weighted.compute(), repeated.compute()
    assert found.pop("samples") == 20_000 and expected.pop("samples") == int(times.sum())
    assert found == pytest.approx(expected, rel=1e-12)
    assert scaled.compute() == pytest.approx(found | {"samples": 20_000}, rel=1e-6)


def test_several_labels_are_measured_apart() -> None:
    """Each as it would be alone on the examples where it was observed."""
    logits = torch.stack([clicks(900, seed)[0] for seed in (1, 2)], dim=1)
    labels = torch.stack([clicks(900, seed)[1] for seed in (1, 2)], dim=1)
    weights = torch.rand(900, generator=torch.Generator().manual_seed(4))
    labels[::3, 1] = math.nan
    both = LabelMetrics(names=["click", "like"])
    both.update(logits[:500], labels[:500], weights[:500])
    both.update(logits[500:], labels[500:], weights[500:])
    figures = both.compute()
    tasks = figures.pop("tasks")
    assert list(tasks) == ["click", "like"] and figures == tasks["click"]
    for number, name in enumerate(tasks):
        alone, seen = LabelMetrics(), ~labels[:, number].isnan()
        alone.update(logits[seen, number], labels[seen, number], weights[seen])
        assert tasks[name] == pytest.approx(alone.compute(), rel=1e-12)
    assert tasks["like"]["samples"] == 600


def test_weights_of_zero_leave_nothing_to_measure() -> None:
    metrics = LabelMetrics()
    metrics.update(torch.zeros(3), torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3))
    assert metrics.compute() == undefined(3)


logit_values = st.floats(-50, 50, width=32) | st.sampled_from([-1.0, 0.0, 0.25])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(logit_values, st.integers(0, 1)), min_size=2, max_size=60).filter(
        lambda rows: len({label for _, label in rows}) == 2
    ),
    st.integers(2, 5000),
)
def test_auc_stays_within_its_bound(rows: list[tuple[float, int]], bins: int) -> None:
    logits, labels = np.array([r[0] for r in rows], np.float32), np.array([r[1] for r in rows])
    metrics = LabelMetrics(bins=LogitBins(count=bins))
    metrics.update(torch.from_numpy(logits), torch.from_numpy(labels).float())
    auc, bound = metrics.compute()["auc"], error_bound(metrics)
    assert auc is not None and bound is not None
    assert abs(auc - exact_auc(logits, labels)) <= bound + 1e-12


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 1000))
def test_batching_does_not_matter(sizes: list[int], seed: int) -> None:
    logits, labels = clicks(sum(sizes), seed)
    once, often = LabelMetrics(), LabelMetrics()
    once.update(logits, labels)
    for part_logits, part_labels in zip(logits.split(sizes), labels.split(sizes), strict=True):
        often.update(part_logits, part_labels)
    for name, figure in once.compute().items():
        other = often.compute()[name]
        assert other is figure is None or other == pytest.approx(figure, rel=1e-12), name


def test_bins_ascend_and_hold_every_float() -> None:
    bins = LogitBins()
    values = torch.tensor([-math.inf, -3e38, -1e4, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 1e4, 3e38, math.inf])
    index = bins.index(values)
    assert index[0] == 0 and index[-1] == bins.count - 1
    assert (index[2:11].diff() > 0).all() and (index.diff() >= 0).all()


def test_bins_and_areas_by_hand() -> None:
    """Four bins, evenly wide in asinh: -0.5 and 0.5 lie just beyond the inner edges, and NaN counts as the lowest."""
    values = torch.tensor([math.nan, -math.inf, -1.0, -0.5, -0.4, 0.0, 0.4, 0.5, 1.0, math.inf])
    assert LogitBins(count=4, limit=1.0).index(values).tolist() == [0, 0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert LogitBins() == LogitBins(count=65_536, limit=10_000.0)
    for wrong in ({"count": 1}, {"limit": 0.0}, {"limit": -1.0}):
        with pytest.raises(ValueError, match="count must be ≥ 2 and limit > 0"):
            LogitBins(**wrong)  # type: ignore[arg-type]
    two = LabelMetrics(bins=LogitBins(count=2))
    two.update(torch.tensor([-1.0, 1.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert two.compute()["auc"] == 3 / 4 and error_bound(two) == 1 / 4, "two of four pairs lie in one bin"


def test_what_is_asked_of_nothing_is_none() -> None:
    for labels, precision, recall in (([0.0, 1.0], None, 0.0), ([0.0, 0.0], None, None)):
        unsure = LabelMetrics()
        unsure.update(torch.tensor([-1.0, -2.0]), torch.tensor(labels))
        found = unsure.compute()
        assert (found["precision"], found["recall"], found["accuracy"]) == (precision, recall, 1 - sum(labels) / 2)


def test_nothing_seen() -> None:
    metrics = LabelMetrics()
    nothing = undefined(0)
    assert metrics.compute() == nothing
    metrics.update(torch.empty(0), torch.empty(0))
    assert metrics.compute() == nothing and error_bound(metrics) is None


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class(label: float) -> None:
    metrics = LabelMetrics()
    metrics.update(torch.zeros(4), torch.full((4,), label))
    figures = metrics.compute()
    assert figures["auc"] is None and figures["ne"] is None
    assert figures["logloss"] == pytest.approx(math.log(2))
    assert figures["calibration"] == (0.5 if label else None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_diverged_model_has_no_figures_but_valid_json(wrong: float) -> None:
    metrics = LabelMetrics()
    metrics.update(torch.tensor([0.0, wrong, 1.0]), torch.tensor([0.0, 1.0, 1.0]))
    figures = metrics.compute()
    assert figures == undefined(3)
    json.dumps(figures, allow_nan=False)


def test_state_round_trip_and_reset() -> None:
    logits, labels = clicks(500, seed=3)
    first, second = LabelMetrics(), LabelMetrics()
    first.update(logits[:200], labels[:200])
    state = first.state()
    first.update(logits[200:], labels[200:])
    second.load_state(state)
    second.update(logits[200:], labels[200:])
    assert second.compute() == first.compute()
    assert int(state["counts"].sum()) == 200, "a state must not change with later batches"
    second.reset()
    assert second.compute()["samples"] == 0


def test_half_precision_logits_keep_no_graph() -> None:
    logits = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    metrics = LabelMetrics()
    metrics.update(logits, torch.tensor([0, 1] * 4))
    assert metrics.compute()["logloss"] == pytest.approx(math.log(2))
    assert not metrics.state()["totals"].requires_grad


def test_refuses_what_does_not_fit() -> None:
    metrics = LabelMetrics()
    with pytest.raises(ValueError, match=r"\[4, 1\].*squeeze"):
        metrics.update(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(ValueError, match=r"weights \[3\]"):
        metrics.update(torch.zeros(4), torch.zeros(4), torch.ones(3))
    with pytest.raises(ValueError, match="same bins"):
        metrics.load_state(LabelMetrics(bins=LogitBins(count=16)).state())
    with pytest.raises(ValueError, match="expected"):
        metrics.load_state({})
    with pytest.raises(ValueError, match=r"logits \[4\] and labels \[4, 2\] must both be of shape \[B, 2\]"):
        LabelMetrics(names=["a", "b"]).update(torch.zeros(4), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="count"):
        LogitBins(count=1)


def figures_of_rank(group: dist.ProcessGroup, sizes: list[int]) -> tuple[dict[str, float | int | None], int, int]:
    """Metrics over all ranks, this rank's part of the rows being `sizes[rank]`; collectives; samples seen here."""
    logits, labels = clicks(sum(sizes), seed=11)
    metrics = LabelMetrics()
    metrics.update(logits.split(sizes)[group.rank()], labels.split(sizes)[group.rank()])
    with comm.count_collectives() as counter:
        figures = metrics.compute(group)
    here = metrics.compute()["samples"]
    assert isinstance(here, int)
    return figures, sum(counter.values()), here


def test_ranks_add_up() -> None:
    sizes = [700, 300]
    whole = LabelMetrics()
    whole.update(*clicks(sum(sizes), seed=11))
    expected = whole.compute()
    for (figures, collectives, here), size in zip(on_ranks(2, figures_of_rank, sizes), sizes, strict=True):
        assert figures == pytest.approx(expected, rel=1e-12)
        assert collectives == 1
        assert here == size, "summing over ranks must not change what a rank has seen"


def test_a_rank_without_rows() -> None:
    for figures, _, _ in on_ranks(2, figures_of_rank, [0, 50]):
        assert figures["samples"] == 50 and figures["auc"] is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_same_on_the_gpu() -> None:
    logits, labels = clicks(100_000, seed=5)
    here, there = LabelMetrics(), LabelMetrics(device="cuda")
    here.update(logits, labels)
    there.update(logits.cuda(), labels.cuda())
    assert there.compute() == pytest.approx(here.compute(), rel=1e-9)
