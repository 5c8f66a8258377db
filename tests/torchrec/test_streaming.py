"""Every metric of tasks against its definition, row by row in plain Python; over the run, over a window, and reset."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayrec.torchrec.metrics.metric_module import REC_METRICS_MAPPING
from rayrec.torchrec.metrics.metrics_config import RecComputeMode, RecMetricEnum, RecTaskInfo, SessionMetricDef
from rayrec.torchrec.metrics.rec_metric import RecMetric, RecMetricException
from rayrec.torchrec.metrics.streaming import sessions, sums
from rayrec.torchrec.metrics.streaming.samples import auc, auprc, rauc
from rayrec.torchrec.metrics.throughput import LONGEST_WINDOW_S, ThroughputMetric

SIZES, WINDOW = (6, 9, 5), 15  # of the batches, of which the window holds the last two
TINY = 1e-12


@dataclass(frozen=True)
class Row:
    """A prediction, a label, a weight, and a session or group."""

    p: float
    y: float
    w: float
    key: int = 0


Batch = list[Row]
Figures = dict[str, float]
Law = Callable[[list[Batch]], Figures]  # the figures of some batches


def sure(p: float) -> float:
    return min(max(p, TINY), 1 - TINY)


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def bits(row: Row) -> float:
    return -(row.y * math.log2(sure(row.p)) + (1 - row.y) * math.log2(1 - sure(row.p)))


def base(rows: Sequence[Row], p: float | None = None) -> float:
    """Bits of predicting the mean label, or p, for all."""
    p = sure(sum(r.w * r.y for r in rows) / sum(r.w for r in rows)) if p is None else p
    return -sum(r.w * (r.y * math.log2(p) + (1 - r.y) * math.log2(1 - p)) for r in rows)


def entropy(rows: Sequence[Row]) -> float:
    return sum(r.w * bits(r) for r in rows)


def total(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    return sum(r.w * of(r) for r in rows)


def mean(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    return ratio(total(rows, of), sum(r.w for r in rows))


def flat(law: Callable[[list[Row]], Figures]) -> Law:
    return lambda batches: law([row for batch in batches for row in batch])


def recalibrated(rows: Sequence[Row], by: float) -> list[Row]:
    return [Row(r.p / (r.p + (1 - r.p) / by), r.y, r.w) for r in rows]


def mse(rows: list[Row]) -> Figures:
    error, weight = total(rows, lambda r: (r.p - r.y) ** 2), sum(r.w for r in rows)
    spread = total(rows, lambda r: (r.y - total(rows, lambda s: s.y) / weight) ** 2)
    return {
        "mse": error / weight,
        "rmse": math.sqrt(error / weight),
        "r_squared": 1 - error / spread if spread else 1.0,
    }


def nmse(rows: list[Row]) -> Figures:
    share = ratio(mean(rows, lambda r: (r.p - r.y) ** 2), mean(rows, lambda r: (1 - r.y) ** 2))
    return {"nmse": share, "nrmse": math.sqrt(share)}


def precision(rows: list[Row]) -> Figures:
    called = [r for r in rows if r.p >= 0.25]
    return {"precision": mean(called, lambda r: r.y)}


def recall(rows: list[Row]) -> Figures:
    """A prediction equal to the threshold is found and missed."""
    found, missed = (
        total([r for r in rows if of(r)], lambda r: r.y) for of in (lambda r: r.p >= 0.5, lambda r: r.p <= 0.5)
    )
    return {"recall": ratio(found, found + missed)}


def segmented(rows: list[Row]) -> Figures:
    found: Figures = {}
    for key in range(3):
        own = [r for r in rows if r.key == key]
        found[f"segmented_ne_{key}"] = entropy(own) / base(own) if sum(r.w for r in own) else math.nan
        found[f"logloss_{key}"] = entropy(own) / max(TINY, sum(r.w for r in own))
    return found


def pairs(batches: list[Batch]) -> Figures:
    right = whole = 0.0
    for batch in batches:
        for a, b in combinations(batch, 2):
            whole += a.w * b.w
            right += a.w * b.w * (((a.p > b.p) - (a.p < b.p)) == ((a.y > b.y) - (a.y < b.y)))
    return {"xauc": ratio(right, whole)}


def by_session(batch: Batch) -> list[Batch]:
    return [list(some) for _, some in groupby(sorted(batch, key=lambda r: r.key), key=lambda r: r.key)]


def session_rates(batches: list[Batch], top: int, ranked: bool) -> tuple[float, float, float]:
    """Weights of true positives, false negatives, false positives."""
    found = missed = wrong = 0.0
    for session in (session for batch in batches for session in by_session(batch)):
        for row in session:
            called = sum(other.p > row.p for other in session) < top
            y = float(sum(other.y > row.y for other in session) < top) if ranked else row.y
            found, missed, wrong = (
                found + row.w * called * y,
                missed + row.w * (not called) * y,
                wrong + row.w * called * (1 - y),
            )
    return found, missed, wrong


def ndcg(batches: list[Batch], **how: Any) -> Figures:
    sum_, count = 0.0, 0
    for session in (session for batch in batches for session in by_session(batch)):
        if how.get("single") is False and len(session) == 1:
            continue
        if how.get("scaled"):
            session = [Row(r.p * r.w, r.y * r.w, r.w) for r in session]

        def dcg(rows: list[Row]) -> float:
            rows = rows if how.get("k") is None else rows[: how["k"]]
            return sum((2**r.y - 1 if how.get("exponential") else r.y) / math.log2(n + 2) for n, r in enumerate(rows))

        ideal = dcg(sorted(session, key=lambda r: -r.y))
        share = dcg(sorted(session, key=lambda r: -r.p)) / (ideal or 1e-6)
        share = share if how.get("rising") else 1 - share
        sum_, count = sum_ + share * (1 if how.get("scaled") else max(r.w for r in session)), count + 1
    return {"ndcg": sum_ / count}


LAWS: dict[str, tuple[str, Mapping[str, Any], Law]] = {
    "ne": ("NE", {}, flat(lambda rows: {"ne": entropy(rows) / base(rows)})),
    "ne, log loss": (
        "NE",
        {"include_logloss": True},
        flat(lambda rows: {"ne": entropy(rows) / base(rows), "logloss": mean(rows, bits)}),
    ),
    "ne_positive": (
        "NE_POSITIVE",
        {},
        flat(lambda rows: {"ne_positive": total(rows, lambda r: -r.y * math.log2(sure(r.p))) / base(rows)}),
    ),
    "unweighted_ne": (
        "UNWEIGHTED_NE",
        {},
        flat(
            lambda rows: (lambda ones: {"unweighted_ne": entropy(ones) / base(ones)})([Row(r.p, r.y, 1) for r in rows])
        ),
    ),
    "cali_free_ne": (
        "CALI_FREE_NE",
        {},
        flat(lambda rows: {"cali_free_ne": entropy(rows) / base(rows) / base(rows, mean(rows, lambda r: r.p))}),
    ),
    "recalibrated_ne": (
        "RECALIBRATED_NE",
        {"recalibration_coefficient": 0.2},
        flat(lambda rows: {"ne": entropy(recalibrated(rows, 0.2)) / base(rows)}),
    ),
    "serving_ne": ("SERVING_NE", {}, flat(lambda rows: {"ne": entropy(rows) / base(rows)})),
    "segmented_ne": ("SEGMENTED_NE", {"num_groups": 3, "include_logloss": True}, flat(segmented)),
    "calibration": (
        "CALIBRATION",
        {},
        flat(lambda rows: {"calibration": ratio(total(rows, lambda r: r.p), total(rows, lambda r: r.y))}),
    ),
    "recalibrated_calibration": (
        "RECALIBRATED_CALIBRATION",
        {"recalibration_coefficient": 0.2},
        flat(
            lambda rows: {
                "calibration": ratio(total(recalibrated(rows, 0.2), lambda r: r.p), total(rows, lambda r: r.y))
            }
        ),
    ),
    "ctr": ("CTR", {}, flat(lambda rows: {"ctr": mean(rows, lambda r: r.y)})),
    "mse": ("MSE", {"include_r_squared": True}, flat(mse)),
    "nmse": ("NMSE", {}, flat(nmse)),
    "mae": ("MAE", {}, flat(lambda rows: {"mae": mean(rows, lambda r: abs(r.p - r.y))})),
    "accuracy": (
        "ACCURACY",
        {"threshold": 0.75},
        flat(lambda rows: {"accuracy": mean(rows, lambda r: (r.p >= 0.75) == r.y)}),
    ),
    "precision": ("PRECISION", {"threshold": 0.25}, flat(precision)),
    "recall": ("RECALL", {}, flat(recall)),
    "average": (
        "AVERAGE",
        {},
        flat(
            lambda rows: {"label_average": mean(rows, lambda r: r.y), "prediction_average": mean(rows, lambda r: r.p)}
        ),
    ),
    "weighted_avg": ("WEIGHTED_AVG", {}, flat(lambda rows: {"weighted_avg": mean(rows, lambda r: r.p)})),
    "num_positive_samples": (
        "NUM_POSITIVE_SAMPLES",
        {},
        flat(lambda rows: {"num_positive_samples": total(rows, lambda r: r.y)}),
    ),
    "sum_weights": ("SUM_WEIGHTS", {}, flat(lambda rows: {"sum_weights": total(rows, lambda r: 1)})),
    "num_missing_labels": ("NUM_MISSING_LABELS", {}, flat(lambda rows: {"num_missing_labels": 0.0})),
    "weighted_sum_predictions": (
        "WEIGHTED_SUM_PREDICTIONS",
        {},
        flat(lambda rows: {"weighted_sum_predictions": total(rows, lambda r: r.p)}),
    ),
    "xauc": ("XAUC", {}, pairs),
    "recall of sessions": (
        "RECALL_SESSION_LEVEL",
        {},
        lambda batches: (lambda f: {"recall_session_level": f[0] / (f[0] + f[1])})(session_rates(batches, 2, False)),
    ),
    "precision of sessions": (
        "PRECISION_SESSION_LEVEL",
        {},
        lambda batches: (lambda f: {"precision_session_level": f[0] / (f[0] + f[2])})(session_rates(batches, 2, False)),
    ),
    "ndcg": ("NDCG", {"session_key": "key"}, ndcg),
    "ndcg, first": ("NDCG", {"session_key": "key", "k": 2}, lambda batches: ndcg(batches, k=2)),
    "ndcg, exponential": (
        "NDCG",
        {"session_key": "key", "exponential_gain": True, "report_ndcg_as_decreasing_curve": False},
        lambda batches: ndcg(batches, exponential=True, rising=True),
    ),
    "ndcg, several": (
        "NDCG",
        {"session_key": "key", "remove_single_length_sessions": True},
        lambda batches: ndcg(batches, single=False),
    ),
    "ndcg, scaled": (
        "NDCG",
        {"session_key": "key", "scale_by_weights_tensor": True},
        lambda batches: ndcg(batches, scaled=True),
    ),
}
TASKS = [
    RecTaskInfo(name=name, session_metric_def=SessionMetricDef("key", top_threshold=2)) for name in ("one", "other")
]


def draw(seed: int) -> list[list[Batch]]:
    """Of each task the batches; keys are the same, and ties and weights of 0 are among them."""
    rng = random.Random(seed)
    keys = [[rng.randrange(3) for _ in range(size)] for size in SIZES]
    choices = [0.0, 1.0, 0.25, 0.5, 0.75, 0.9, 0.1]
    return [
        [
            [Row(rng.choice(choices), float(rng.random() < 0.4), rng.choice([0, 0.5, 1, 2]), key) for key in batch]
            for batch in keys
        ]
        for _ in TASKS
    ]


def metric(kind: str, options: Mapping[str, Any], fused: bool = False, **more: Any) -> RecMetric:
    mode = RecComputeMode.FUSED_TASKS_COMPUTATION if fused else RecComputeMode.UNFUSED_TASKS_COMPUTATION
    settings = {"tasks": TASKS, "window_size": WINDOW, "batch_size": max(SIZES), **more}
    return REC_METRICS_MAPPING[RecMetricEnum[kind]](1, 0, compute_mode=mode, **settings, **options)


def give(one: RecMetric, tasks: Sequence[Batch], names: Sequence[str] = ("one", "other")) -> None:
    def of(part: str) -> dict[str, torch.Tensor]:
        values = {name: [getattr(row, part) for row in rows] for name, rows in zip(names, tasks, strict=True)}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    keys = torch.tensor([row.key for row in tasks[0]])
    inputs = {"key": keys, "grouping_keys": keys}
    one.update(predictions=of("p"), labels=of("y"), weights=of("w"), required_inputs=inputs)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("name", list(LAWS))
def test_each_metric_is_what_it_is_defined_as(name: str, fused: bool) -> None:
    kind, options, law = LAWS[name]
    space = {"RECALIBRATED_NE": "recalibrated_ne"}.get(kind, kind.lower())
    for seed in range(4):
        drawn, one = draw(seed), metric(kind, options, fused)
        for batch in zip(*drawn, strict=True):
            give(one, batch)
        found = {key: float(value) for key, value in one.compute().items() if "total_examples" not in key}
        expected = {}
        for task, batches in zip(TASKS, drawn, strict=True):
            expected |= {f"{space}-{task.name}|lifetime_{key}": value for key, value in law(batches).items()}
            expected |= {f"{space}-{task.name}|window_{key}": value for key, value in law(batches[1:]).items()}
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
        one.reset()
        for batch in zip(*drawn, strict=True):
            give(one, batch)
        again = {key: float(value) for key, value in one.compute().items() if "total_examples" not in key}
        assert again == pytest.approx(found, nan_ok=True), "as if nothing had been before"


def test_a_session_may_be_ranked_by_its_labels_and_a_negative_task_by_what_is_left_of_1() -> None:
    tasks = [
        RecTaskInfo(name="one", session_metric_def=SessionMetricDef("key", 1, run_ranking_of_labels=True)),
        RecTaskInfo(name="other", is_negative_task=True, session_metric_def=SessionMetricDef("key", 1)),
    ]
    for seed in range(4):
        one, other = draw(seed)
        ranked, gains, scaled = (
            metric("RECALL_SESSION_LEVEL", {}, tasks=tasks),
            metric("NDCG", {"session_key": "key"}, tasks=tasks),
            metric("NDCG", {"session_key": "key", "scale_by_weights_tensor": True}, tasks=tasks),
        )
        for batch in zip(one, other, strict=True):
            for each in (ranked, gains, scaled):
                give(each, batch)
        found, missed, _ = session_rates(one, 1, ranked=True)
        recalled = ranked.compute()["recall_session_level-one|lifetime_recall_session_level"]
        assert float(recalled) == pytest.approx(found / (found + missed))
        turned = [[Row(1 - r.p, 1 - r.y, r.w, r.key) for r in batch] for batch in other]
        assert float(gains.compute()["ndcg-other|lifetime_ndcg"]) == pytest.approx(ndcg(turned)["ndcg"])
        by_weight = ndcg(turned, scaled=True)["ndcg"]
        assert float(scaled.compute()["ndcg-other|lifetime_ndcg"]) == pytest.approx(by_weight)
    for wrong in (None, SessionMetricDef("key")):
        unset = metric("RECALL_SESSION_LEVEL", {}, tasks=[RecTaskInfo(name="one", session_metric_def=wrong)])
        with pytest.raises(ValueError, match="task 'one': session_metric_def must be SessionMetricDef"):
            give(unset, [one[0]], ["one"])


def test_pairs_are_the_same_however_many_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, found = draw(7), []
    for at_once in (1, 30, 1 << 22):
        monkeypatch.setattr(sessions, "PAIRS_AT_ONCE", at_once)
        one = metric("XAUC", {})
        for batch in zip(*drawn, strict=True):
            give(one, batch)
        found.append({key: float(value) for key, value in one.compute().items()})
    assert found[0] == found[1] == pytest.approx(found[2])


def test_a_window_holds_no_more_batches_than_are_kept() -> None:
    one = metric("CTR", {}, tasks=TASKS[:1], window_size=10 * sums.MAX_BATCHES)
    for number in range(sums.MAX_BATCHES + 500):
        give(one, [[Row(0.5, float(number < 1000), 1)]], ["one"])
    found = {key.split("|")[1]: float(value) for key, value in one.compute().items()}
    kept = sums.MAX_BATCHES
    assert found == {"lifetime_ctr": pytest.approx(1000 / (kept + 500)), "window_ctr": pytest.approx(1 - 500 / kept)}


def test_a_batch_of_nan_leaves_a_window_with_its_batch() -> None:
    one = metric("MSE", {}, tasks=TASKS[:1], window_size=2, batch_size=1)
    shown = []
    for prediction in (math.nan, 0.5, 0.25, 0.25):
        give(one, [[Row(prediction, 0.0, 1)]], ["one"])
        shown.append(float(one.compute()["mse-one|window_mse"]))
    assert math.isnan(shown[0]) and math.isnan(shown[1])
    assert shown[2:] == pytest.approx([(0.25 + 0.0625) / 2, 0.0625])


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("kind", ["NE", "NE_POSITIVE"])
def test_labels_that_are_all_alike_have_a_base_rate_that_is_not_quite_sure(kind: str, label: int) -> None:
    one, rows = metric(kind, {}, tasks=TASKS[:1]), [Row(0.25, label, 2), Row(0.5, label, 1)]
    give(one, [rows], ["one"])
    bits_of = entropy(rows) if kind == "NE" or label else 0.0
    found = one.compute()[f"{kind.lower()}-one|lifetime_{kind.lower()}"]
    assert float(found) == pytest.approx(bits_of / base(rows), rel=1e-6)


def test_classes_of_several_tasks_in_one_computation() -> None:
    """The second task's model is always right."""
    both = metric("MULTICLASS_RECALL", {"number_of_classes": 2}, fused=True)
    scores, labels = torch.tensor([[0.1, 0.9], [0.2, 0.8]]), torch.tensor([0.0, 1.0])
    shown = {"one": scores, "other": torch.tensor([[0.9, 0.1], [0.2, 0.8]])}
    both.update(predictions=shown, labels=dict.fromkeys(shown, labels), weights={"one": labels + 1, "other": labels})
    found = both.compute()
    assert found["multiclass_recall-one|lifetime_multiclass_recall"].tolist() == pytest.approx([2 / 3, 1])
    assert found["multiclass_recall-other|window_multiclass_recall"].tolist() == [1, 1]


def test_classes_and_other_tensors() -> None:
    classes = metric("MULTICLASS_RECALL", {"number_of_classes": 3}, tasks=TASKS[:1])
    scores = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3], [0.2, 0.3, 0.5]])
    labels, weights = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 2.0, 4.0])
    classes.update(predictions={"one": scores}, labels={"one": labels}, weights={"one": weights})
    key = "multiclass_recall-one|lifetime_multiclass_recall"
    assert classes.compute()[key].view(-1).tolist() == pytest.approx([1 / 7, 3 / 7, 1])
    tasks = [RecTaskInfo(name="one", tensor_name="x"), RecTaskInfo(name="other", tensor_name="y", weighted=False)]
    both = metric("TENSOR_WEIGHTED_AVG", {"description": "_d"}, tasks=tasks, fused=True)
    assert both.get_required_inputs() == {"x", "y"}
    of = dict.fromkeys(("one", "other"), labels)
    inputs = {"x": torch.tensor([3.0, 5.0, 9.0]), "y": torch.tensor([6.0, 1.0, 2.0])}
    both.update(predictions=of, labels=of, weights=dict.fromkeys(of, weights), required_inputs=inputs)
    found = both.compute()
    assert float(found["weighted_avg-one|lifetime_weighted_avg_d"]) == pytest.approx((3 + 10 + 36) / 7)
    assert float(found["weighted_avg-other|window_weighted_avg_d"]) == 3
    scalar = metric("SCALAR", {}, tasks=TASKS[:1], window_size=7, batch_size=3)
    for values in ([1.0, 2.0, 6.0], [2.0, 4.0, 3.0], [5.0, 6.0, 10.0]):
        scalar.update(predictions=of, labels={"one": torch.tensor(values)}, weights=None)
    found = {key: float(value) for key, value in scalar.compute().items()}
    assert found == {"scalar-one|lifetime_scalar": 7, "scalar-one|window_scalar": pytest.approx(5)}
    lost = metric("NUM_MISSING_LABELS", {}, tasks=TASKS[:1])
    lost.update(predictions=of, labels={"one": torch.tensor([math.nan, 1, math.nan])}, weights={"one": weights})
    assert float(lost.compute()["num_missing_labels-one|lifetime_num_missing_labels"]) == 5


@pytest.mark.parametrize("kind", ["NE", "NE_POSITIVE", "UNWEIGHTED_NE", "CALI_FREE_NE", "RECALIBRATED_NE"])
def test_a_task_without_a_weight_may_be_told_apart(kind: str) -> None:
    """By a figure of 1e-12 in place of NaN, where that is asked for."""
    for allowed in (False, True):
        one = metric(kind, {"allow_missing_label_with_zero_weight": allowed}, tasks=TASKS[:1])
        give(one, [[Row(0.5, 1, 0), Row(0.5, 0, 0)]], ["one"])
        found = next(value for key, value in one.compute().items() if "lifetime" in key)
        if kind == "UNWEIGHTED_NE":
            assert float(found) == 1.0
        else:
            assert float(found) == TINY if allowed else math.isnan(found)
    serving = metric("SERVING_NE", {}, tasks=TASKS[:1])  # which cannot be asked
    give(serving, [[Row(0.5, 1, 0), Row(0.5, 0, 0)]], ["one"])
    assert math.isnan(serving.compute()["serving_ne-one|lifetime_ne"])


@pytest.mark.parametrize("kind", ["SERVING_NE", "SERVING_CALIBRATION"])
def test_examples_with_a_weight_are_counted(kind: str) -> None:
    one = metric(kind, {}, tasks=TASKS[:1])
    give(one, [[Row(0.5, 1, 0), Row(0.25, 0, 0.5), Row(0.5, 1, 3)]], ["one"])
    found = one.compute()
    assert int(found[f"{kind.lower()}-one|total_examples"]) == 2
    if kind == "SERVING_CALIBRATION":
        assert float(found["serving_calibration-one|lifetime_calibration"]) == pytest.approx(1.625 / 3)


def test_what_a_metric_is_given_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        metric("NE", {}, fused=True, fused_update_limit=1)
    metric("NE", {}, fused_update_limit=1)
    with pytest.raises(ValueError, match="window of 8 examples per rank is smaller than a batch of 9"):
        REC_METRICS_MAPPING[RecMetricEnum.NE](2, 0, 9, TASKS, window_size=16)
    REC_METRICS_MAPPING[RecMetricEnum.NE](2, 0, 9, TASKS, window_size=17, enable_pt2_compile=True)
    with pytest.raises(TypeError, match=r"SegmentedNEMetric needs \['num_groups'\]"):
        metric("SEGMENTED_NE", {})
    with pytest.raises(TypeError, match=r"NDCGMetric has no option \['tusks'\]; it has \['exponential_gain', 'k'"):
        metric("NDCG", {"tusks": 1})
    whole = metric("SEGMENTED_NE", {"num_groups": 2})
    of = {name: torch.ones(2) for name in ("one", "other")}
    with pytest.raises(ValueError, match="make it int64, or set cast_keys_to_int=True"):
        whole.update(predictions=of, labels=of, weights=of, required_inputs={"grouping_keys": torch.ones(2)})
    with pytest.raises(RecMetricException, match=r"segmented_ne needs \['grouping_keys'\] among"):
        metric("SEGMENTED_NE", {"num_groups": 2}).update(predictions=of, labels=of, weights=of)


@pytest.mark.parametrize("fused", [False, True])
def test_outputs_may_be_one_tensor_and_batches_may_wait(fused: bool) -> None:
    drawn = draw(3)
    apart, together = metric("MSE", {}, fused), metric("MSE", {}, fused)
    waiting = metric("MSE", {}, fused_update_limit=2, window_size=100)
    for number, batch in enumerate(zip(*drawn, strict=True)):
        give(apart, batch)
        give(waiting, batch)
        assert len(waiting._pending) == (number + 1) % 2
        parts = {part: torch.tensor([[getattr(r, part) for r in rows] for rows in batch]) for part in ("p", "y", "w")}
        together.update(predictions=parts["p"], labels=parts["y"], weights=parts["w"])
    found = {key: float(value) for key, value in apart.compute().items()}
    assert {key: float(value) for key, value in together.compute().items()} == pytest.approx(found, rel=1e-5)
    lifetime = {key: value for key, value in found.items() if "lifetime" in key}
    late = {key: float(value) for key, value in waiting.compute().items() if "lifetime" in key}
    assert late == pytest.approx(lifetime)
    assert waiting.state_dict().keys() == metric("MSE", {}).state_dict().keys()


def test_a_task_that_the_model_gave_nothing_for_is_left_out() -> None:
    one = metric("CTR", {})
    give(one, [[Row(0.5, 1, 1)]], ["other"])
    one.update(
        predictions=dict.fromkeys(("one", "other"), torch.empty(0)),
        labels=dict.fromkeys(("one", "other"), torch.empty(0)),
        weights=None,
    )
    found = {key: float(value) for key, value in one.compute().items() if "lifetime" in key}
    assert found == {"ctr-one|lifetime_ctr": 0.0, "ctr-other|lifetime_ctr": 1.0}


def test_batches_whose_weights_are_all_0_do_not_count() -> None:
    """Under `should_validate_update`: figures are 0 until there is another, task by task where they are fused."""
    for fused in (False, True):
        one = metric("CALIBRATION", {}, fused, should_validate_update=True)
        give(one, [[Row(0.5, 1, 0)], [Row(0.5, 0, 0)]])
        assert {float(value) for value in one.compute().values()} == {0.0}
        give(one, [[Row(0.5, 1, 0)], [Row(0.5, 1, 2)]])
        found = {key: float(value) for key, value in one.compute().items() if "lifetime" in key}
        assert found == {"calibration-one|lifetime_calibration": 0.0, "calibration-other|lifetime_calibration": 0.5}
        valid = [computation.has_valid_update.tolist() for computation in one._metrics_computations]
        assert valid == ([[0, 1]] if fused else [[0], [1]])
        one.reset()
        assert {float(value) for value in one.compute().values()} == {0.0}


def area(rows: Sequence[Row]) -> float:
    won = total_ = 0.0
    for a in rows:
        for b in rows:
            weight = a.w * a.y * b.w * (1 - b.y)
            total_, won = total_ + weight, won + weight * ((a.p > b.p) + 0.5 * (a.p == b.p))
    return won / total_ if total_ else 0.5


def average_precision(rows: Sequence[Row]) -> float:
    positive = total(rows, lambda r: r.y)
    found = 0.0
    for p in {r.p for r in rows}:
        called, level = [r for r in rows if r.p >= p], [r for r in rows if r.p == p]
        if sum(r.w for r in called):
            found += mean(called, lambda r: r.y) * total(level, lambda r: r.y) / positive if positive else 0.0
    return found


def ordered(rows: Sequence[Row]) -> float:
    """Of pairs of one prediction, all are in order."""
    some = [*combinations(rows, 2)]
    wrong = sum((a.p - b.p) * (a.y - b.y) < 0 for a, b in some)
    return 1 - wrong / len(some) if some else 0.5


def test_areas_are_those_of_pairs() -> None:
    rng = random.Random(1)
    for size in [*range(1, 9), 40]:
        for levels in (2, 5):
            rows = [Row(rng.randrange(levels) / 4, rng.randrange(2), rng.choice([0, 1, 2.5])) for _ in range(size)]
            of = [torch.tensor([float(getattr(r, part)) for r in rows]) for part in ("p", "y", "w")]
            assert float(auc(*of)) == pytest.approx(area(rows), abs=1e-6)
            assert float(auprc(*of)) == pytest.approx(average_precision(rows), abs=1e-6)
            stars = [Row(r.p, rng.randrange(6), 1) for r in rows]
            of[1] = torch.tensor([float(r.y) for r in stars])
            assert float(rauc(*of)) == pytest.approx(ordered(stars), abs=1e-6)


@pytest.mark.parametrize(("kind", "law"), [("AUC", area), ("AUPRC", average_precision), ("RAUC", ordered)])
def test_areas_of_a_window_cut_through_batches_and_of_its_groups(kind: str, law: Any) -> None:
    drawn = draw(5)
    one = metric(kind, {f"grouped_{kind.lower()}": True}, window_size=12)
    for batch in zip(*drawn, strict=True):
        give(one, batch)
    found = one.compute()
    name = kind.lower()
    for task, batches in zip(TASKS, drawn, strict=True):
        last = [row for batch in batches for row in batch][-12:]
        assert float(found[f"{name}-{task.name}|window_{name}"]) == pytest.approx(law(last), abs=1e-6)
        groups = [law([r for r in last if r.key == key]) for key in {r.key for r in last}]
        wanted = sum(groups) / len(groups)
        assert float(found[f"{name}-{task.name}|window_grouped_{name}"]) == pytest.approx(wanted, abs=1e-6)


def test_the_area_of_the_run_is_the_mean_of_those_that_were_asked_for() -> None:
    """Of "auprc", each by its weight."""
    one, shown = metric("AUPRC", {}, tasks=TASKS[:1], window_size=9), []
    for batch in draw(2)[0]:
        give(one, [batch], ["one"])
        shown.append(one.compute())
    key = "auprc-one|lifetime_auprc"
    weights, areas, rows = [], [], []
    for batch in draw(2)[0]:
        rows = [*rows, *batch][-9:]
        weights.append(sum(r.w for r in rows))
        areas.append(average_precision(rows))
    expected = sum(a * w for a, w in zip(areas, weights, strict=True)) / sum(weights)
    assert float(shown[-1][key]) == pytest.approx(expected)
    empty = metric("AUPRC", {"grouped_auprc": True}, tasks=TASKS[:1])
    assert float(empty.compute()[key]) == float(empty.compute()["auprc-one|window_grouped_auprc"]) == 0.5


def test_labels_may_be_cut_into_two() -> None:
    one = metric("AUC", {"apply_bin": True}, tasks=TASKS[:1])
    rows = [Row(0.9, 0.039, 1), Row(0.1, 0.0389, 1), Row(0.2, 0.5, 1)]
    give(one, [rows], ["one"])
    assert float(one.compute()["auc-one|window_auc"]) == 1.0


def clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    ticks = iter(seconds)
    monkeypatch.setattr("rayrec.torchrec.metrics.throughput.time", SimpleNamespace(monotonic=lambda: next(ticks)))


def test_examples_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the run, of the window's seconds, and since the process started; the clock starts after the warm-up."""
    clock(monkeypatch, 100, 103, 104, 106, 110, 111)
    one = ThroughputMetric(batch_size=10, world_size=2, window_seconds=7, warmup_steps=2)
    shown = []
    for _ in range(6):
        one.update()
        found = {key.removeprefix("throughput-throughput|"): float(value) for key, value in one.compute().items()}
        shown.append(found)
    assert shown[0] == {"total_examples": 20, "attempt_examples": 20} and "window_throughput" not in shown[1]
    assert shown[2] == {"total_examples": 60, "attempt_examples": 60} | dict.fromkeys(
        ("lifetime_throughput", "window_throughput", "attempt_throughput"), 20.0
    )
    assert shown[4]["lifetime_throughput"] == shown[4]["attempt_throughput"] == pytest.approx(60 / 7)
    assert shown[4]["window_throughput"] == pytest.approx(60 / 7)
    assert shown[5]["window_throughput"] == pytest.approx(60 / 7)  # 2, 4 and 1 s: the oldest left
    saved = one.state_dict()
    assert set(saved) == {"total_examples", "warmup_examples", "time_lapse_after_warmup"}
    clock(monkeypatch, 0, 8, 28)
    again = ThroughputMetric(batch_size=10, world_size=2, window_seconds=7, warmup_steps=1)
    again.load_state_dict(saved)
    again.update()
    assert not any("throughput" in key.partition("|")[2] for key in again.compute()), "it is warming up"
    for _ in range(2):
        again.update()
    found = {key.removeprefix("throughput-throughput|"): float(value) for key, value in again.compute().items()}
    assert (found["total_examples"], found["attempt_examples"]) == (180, 60)
    assert found["lifetime_throughput"] == pytest.approx((180 - 60) / (8 + 28))
    assert (found["attempt_throughput"], found["window_throughput"]) == (pytest.approx(40 / 28), 0.0)
    assert ThroughputMetric(batch_size=1, world_size=1, window_seconds=10**6)._window_s == LONGEST_WINDOW_S == 7200
    for wrong in ({"window_seconds": 0}, {"window_seconds": 1, "warmup_steps": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            ThroughputMetric(batch_size=1, world_size=1, **wrong)


def test_examples_per_second_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 50, 53, 55, 59)
    one = metric("TOWER_QPS", {"warmup_steps": 1}, tasks=TASKS[:1], window_size=13, batch_size=4)
    rows = [Row(0.5, 1, 1)] * 9
    shown = []
    for size in (4, 6, 4, 9):
        give(one, [rows[:size]], ["one"])
        shown.append({key.removeprefix("qps-one|"): float(value) for key, value in one.compute().items()})
    assert shown[0] == {"lifetime_qps": 0, "window_qps": 0, "total_examples": 4}
    assert shown[1] == {"lifetime_qps": 2, "window_qps": 2, "total_examples": 10}
    assert shown[2] == {"lifetime_qps": 2, "window_qps": 2, "total_examples": 14}
    assert shown[3] == pytest.approx({"lifetime_qps": 19 / 9, "window_qps": 13 / 6, "total_examples": 23})
    (here,) = one._computations()
    kept, other = (
        here.gathered_state(),
        (torch.tensor([7]), torch.tensor([2]), torch.tensor([10.0], dtype=torch.float64), [(5, 10.0)]),
    )
    here.load_state(here.summed_state(), [kept, other])
    of_both = {name: float(value) for prefix, name, value in here.results() if prefix != "window_"}
    assert of_both == pytest.approx({"qps": (19 + 5) / 10, "total_examples": 30})
    window = next(float(value) for prefix, _, value in here.results() if prefix == "window_")
    assert window == pytest.approx((13 + 5) / 10)
    here.load_state(here.summed_state(), [kept])
    again = {f"{prefix}{name}": float(value) for prefix, name, value in here.results()}
    assert again == pytest.approx(shown[3])
    one.reset()
    assert {float(value) for value in one.compute().values()} == {0.0}
