"""Metrics of tasks over ranks: what all ranks saw, in one exchange; and what a config is refused for."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.torchrec.metrics.all_metrics import TABLE, Row
from rayrec.torchrec.metrics.metric_module import RecMetricModule, StateMetric, generate_metric_module
from rayrec.torchrec.metrics.metrics_config import (
    BatchSizeStage,
    DefaultMetricsConfig,
    EmptyMetricsConfig,
    MetricsConfig,
    RecComputeMode,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
    StateMetricEnum,
    ThroughputDef,
)
from rayrec.torchrec.metrics.precision import PrecisionMetric
from rayrec.torchrec.metrics.rec_metric import MEASURES, RecMetric, RecMetricException
from rayrec.torchrec.metrics.streaming.measure import REQUIRED
from rayrec.torchrec.metrics.streaming.samples import SAMPLE_OPTIONS, auc, auprc, rauc
from rayrec.torchrec.metrics.throughput import RATE_OPTIONS, ThroughputMetric
from tests.ranks import on_ranks

BATCH, STEPS = 8, 6
SUMMED = (RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.MSE, RecMetricEnum.PRECISION)
KEPT = (RecMetricEnum.AUC, RecMetricEnum.AUPRC, RecMetricEnum.RAUC)


def batches(rank: int) -> Iterator[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        draw = torch.rand(3, BATCH, generator=numbers)
        yield {"label": (draw[0] > 0.5).float(), "prediction": draw[1], "weight": draw[2]}


def module(world: int, rank: int, *metrics: RecMetricEnum, batch: int = BATCH, **config: Any) -> RecMetricModule:
    wanted = {kind: RecMetricDef(rec_tasks=[RecTaskInfo()], window_size=40) for kind in metrics}
    settled = MetricsConfig(rec_tasks=[RecTaskInfo()], rec_metrics=wanted, **config)
    return generate_metric_module(RecMetricModule, settled, batch, world, rank, {}, torch.device("cpu"))


def measured(group: dist.ProcessGroup, on_all: bool) -> Any:
    rank = group.rank()
    metrics = module(group.size(), rank, *SUMMED, *KEPT, compute_on_all_ranks=on_all, should_validate_update=True)
    for step, batch in enumerate(batches(rank)):
        # rank 1 has nothing that counts in the last two steps
        metrics.update(batch | ({"weight": torch.zeros(BATCH)} if rank and step >= STEPS - 2 else {}))
    before = {key: value for key, value in metrics.local_compute().items() if "lifetime_auprc" not in key}
    with comm.count_collectives() as counted:
        found = dict(metrics.compute())
    own = metrics.local_compute()
    unchanged = all(torch.equal(own[key], value) for key, value in before.items())
    metrics.sync()
    synced = {key.replace("local_", ""): value for key, value in metrics.local_compute().items()}
    metrics.unsync()
    own = metrics.local_compute()
    restored = all(torch.equal(own[key], value) for key, value in before.items())
    return found, dict(counted), unchanged and restored, synced


@pytest.mark.parametrize("on_all", [False, True])
def test_figures_are_those_of_all_ranks_together(on_all: bool) -> None:
    (first, counted, restored, synced), (second, _, also, _) = on_ranks(2, measured, on_all)
    assert counted == {"all_reduce": 1, "all_gather_object": 1} and restored and also
    assert second == {} or (
        on_all and all(torch.equal(first[key], second[key]) for key in synced if "lifetime_auprc" not in key)
    )
    whole = module(1, 0, *SUMMED, *KEPT, batch=2 * BATCH)
    for step, (one, other) in enumerate(zip(batches(0), batches(1), strict=True)):
        other |= {"weight": torch.zeros(BATCH)} if step >= STEPS - 2 else {}
        whole.update({name: torch.cat((one[name], other[name])) for name in one})
    for key, value in whole.compute().items():
        if "lifetime" in key and "auprc" not in key:
            torch.testing.assert_close(first[key], value)
        if "auprc" not in key:
            torch.testing.assert_close(synced[key], first[key])


def test_areas_of_small_samples_by_hand() -> None:
    """Positives at 0.9 and 0.4, negatives at 0.4 and 0.1: pairs 1, 1, ½ and 1 of 4."""
    scores, labels, ones = torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(4)
    assert float(auc(scores, labels, ones)) == pytest.approx(3.5 / 4)
    assert float(auprc(scores, labels, ones)) == pytest.approx((1 + 2 / 3) / 2)
    assert float(rauc(torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 3, 2, 0]), ones)) == pytest.approx(1 - 4 / 6)
    assert float(auc(scores, ones, ones)) == 0.5 and float(auc(*torch.zeros(3, 0))) == 0.5
    assert float(rauc(*torch.zeros(3, 1))) == 0.5 and float(auprc(*torch.zeros(3, 0))) == 0.0


def test_a_window_keeps_the_last_batch_even_where_it_is_larger() -> None:
    metrics = module(1, 0, RecMetricEnum.CTR, RecMetricEnum.AUC)
    for label in (0.0, 1.0):
        ones = torch.ones(60)
        metrics.update({"label": ones * label, "prediction": ones * 0.5, "weight": ones})
    assert metrics.compute()["ctr-DefaultTask|window_ctr"] == 1.0


class Learning(StateMetric):
    def get_metrics(self) -> dict[str, Any]:
        return {"rate": 0.5}


def test_figures_of_other_parts_stand_beside() -> None:
    config = MetricsConfig(state_metrics=[StateMetricEnum.OPTIMIZERS])
    parts = {StateMetricEnum.OPTIMIZERS: Learning()}
    metrics = generate_metric_module(RecMetricModule, config, 1, 1, 0, dict(parts), torch.device("cpu"))
    assert metrics.compute() == {"optimizers-optimizers|rate": 0.5}
    assert metrics.compute().resolve() == {"optimizers-optimizers|rate": 0.5}


def test_figures_are_there_at_once() -> None:
    """For code that waits for them."""
    metrics, told = module(1, 0, RecMetricEnum.CTR), []  # type: ignore[var-annotated]
    metrics.update(next(batches(0)))
    found = metrics.compute()
    assert found.is_resolved() and found.resolve() is found
    found.subscribe(told.append)
    assert told == [found]
    with pytest.raises(RecMetricException, match=r"use compute\(\)"):
        metrics.async_compute()


def test_what_metrics_need_beside_is_taken_from_the_models_outputs() -> None:
    assert module(1, 0, RecMetricEnum.CTR).get_required_inputs() is None
    metrics = module(1, 0, RecMetricEnum.NDCG)
    assert metrics.get_required_inputs() == ["session_id"]
    labels, scores = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.9, 0.1, 0.8, 0.2])
    sessions = torch.tensor([[5], [5], [6], [6]])
    metrics.update({"label": labels, "prediction": scores, "weight": torch.ones(4), "session_id": sessions})
    lost = (1 - 1 / math.log2(3)) / 2  # the second session's positive comes second
    assert float(metrics.compute()["ndcg-DefaultTask|lifetime_ndcg"]) == pytest.approx(lost)


def test_batches_that_wait_may_be_empty() -> None:
    batch = next(batches(0))
    empty = {name: part[:0] for name, part in batch.items()}
    apart, waiting = module(1, 0, RecMetricEnum.CTR), module(1, 0, RecMetricEnum.CTR, fused_update_limit=3)
    for one in (empty, batch, empty):
        apart.update(one)
        waiting.update(one)
    expected = {key: float(value) for key, value in apart.compute().items()}
    assert {key: float(value) for key, value in waiting.compute().items()} == pytest.approx(expected)
    assert 0 < expected["ctr-DefaultTask|lifetime_ctr"] < 1


def test_what_is_not_offered_says_what_to_use() -> None:
    for kind in set(RecMetricEnum) - {RecMetricEnum.SEGMENTED_NE, RecMetricEnum.MULTICLASS_RECALL}:
        try:
            module(1, 0, kind)
        except RecMetricException as error:
            assert str(kind) in str(error) and "use " in str(error)
    with pytest.raises(RecMetricException, match="include_logloss"):
        module(1, 0, RecMetricEnum.LOG_LOSS)
    with pytest.raises(TypeError, match="no option"):
        PrecisionMetric(1, 0, 1, [RecTaskInfo()], treshold=1)


def test_the_time_between_computations_sets_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.5])
    own = SimpleNamespace(monotonic=lambda: next(clock))  # other threads read the time as well
    monkeypatch.setattr("rayrec.torchrec.metrics.metric_module.time", own)
    metrics = module(1, 0, RecMetricEnum.CTR, compute_interval_steps=10, min_compute_interval=4.0)
    metrics.compute()
    assert metrics.compute_interval_steps == 10
    metrics.compute()  # 10 steps took 2 s; at least 4 s are wanted, and a second more is taken
    assert metrics.compute_interval_steps == 25
    metrics.compute()  # once and for all
    assert metrics.compute_interval_steps == 25


def steps_of_rank(group: dist.ProcessGroup) -> int:
    """Between this rank's two computations lie 2 or 4 seconds."""
    clock = iter([10.0, 12.0 + 2 * group.rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayrec.torchrec.metrics.metric_module.time", SimpleNamespace(monotonic=lambda: next(clock)))
        metrics = module(2, group.rank(), RecMetricEnum.CTR, compute_interval_steps=10, min_compute_interval=4.0)
        metrics.compute()
        metrics.compute()
    return metrics.compute_interval_steps


def test_all_ranks_take_the_most_steps_of_any() -> None:
    assert on_ranks(2, steps_of_rank) == [25, 25]


@pytest.mark.parametrize(
    ("shortest", "longest", "steps"),
    [
        (0.0, float("inf"), 10),
        (2.0, 2.0, 10),  # it took 2 s, and both ends are allowed
        (2.0, 9.0, 10),
        (3.0, 9.0, 30),  # half way between: 6 s
        (0.0, 1.5, 2),  # a second less than the longest
        (0.0, 1.0, 5),  # no longer than a second: itself
        (0.0, 1e-9, 1),
    ],
)
def test_the_steps_that_fit_between_two_lapses(
    monkeypatch: pytest.MonkeyPatch, shortest: float, longest: float, steps: int
) -> None:
    now = [10.0]
    monkeypatch.setattr("rayrec.torchrec.metrics.metric_module.time", SimpleNamespace(monotonic=lambda: now[0]))
    bounds = {"min_compute_interval": shortest, "max_compute_interval": longest}
    metrics = module(1, 0, RecMetricEnum.CTR, compute_interval_steps=10, **bounds)
    metrics.compute()
    now[0] = 12.0
    metrics.compute()
    assert (metrics.compute_interval_steps, metrics.compute_count) == (steps, 2)


def test_it_is_time_once_in_so_many_batches() -> None:
    metrics, batch = module(1, 0, RecMetricEnum.CTR, compute_interval_steps=2), next(batches(0))
    found = []
    for _ in range(4):
        metrics.update(batch)
        found.append(metrics.should_compute())
    assert found == [False, True, False, True] and metrics.trained_batches == 4
    for wrong in ({"max_compute_interval": 0.0}, {"min_compute_interval": -1.0}):
        with pytest.raises(ValueError, match="compute intervals of"):
            module(1, 0, RecMetricEnum.CTR, **wrong)


def test_without_a_metric_no_output_is_needed() -> None:
    metrics = module(1, 0)
    metrics.update({})
    assert metrics.trained_batches == 1 and metrics.compute() == {}


def test_outputs_are_taken_by_task_and_must_agree() -> None:
    metrics, three = module(1, 0, RecMetricEnum.CTR), torch.ones(3)
    with pytest.raises(ValueError, match=r"task 'DefaultTask': the weight 'weight' is not among the model's outputs"):
        metrics.update({"label": three, "prediction": three})
    with pytest.raises(ValueError, match="prediction has 2 values, but label has 3"):
        metrics.update({"label": three, "prediction": torch.ones(2), "weight": three})
    with pytest.raises(ValueError, match="weight has 6 values, but label has 3"):
        metrics.update({"label": three, "prediction": three, "weight": torch.ones(3, 2)})
    empty = torch.empty(0)
    metrics.update({"label": empty, "prediction": empty, "weight": empty})
    one = torch.tensor([[1.0]])  # of a batch of one, in any shape
    metrics.update({"label": one, "prediction": one, "weight": one * 2})
    metrics.update({"label": three[:, None] * 0, "prediction": three, "weight": three})
    assert float(metrics.compute()["ctr-DefaultTask|lifetime_ctr"]) == pytest.approx(2 / 5)


def test_a_config_names_its_tasks_once() -> None:
    tasks = [RecTaskInfo(name="one"), RecTaskInfo(name="other")]

    def made(**of: Any) -> RecMetricModule:
        config = MetricsConfig(rec_tasks=tasks, rec_metrics={RecMetricEnum.CTR: RecMetricDef(**of)})
        return generate_metric_module(RecMetricModule, config, 1, 1, 0, {}, torch.device("cpu"))

    assert [task.name for task in made(rec_task_indices=[1]).rec_metrics[0]._tasks] == ["other"]
    with pytest.raises(ValueError, match=r"rec_task_indices \[2\], but rec_tasks has 2 tasks"):
        made(rec_task_indices=[0, 2])
    for wrong in ({}, {"rec_tasks": tasks, "rec_task_indices": [0]}):
        with pytest.raises(ValueError, match="needs either rec_tasks or rec_task_indices"):
            made(**wrong)
    stages = [BatchSizeStage(4, None), BatchSizeStage(8, 2)]
    with pytest.raises(ValueError, match="the last stage ends at 2"):
        generate_metric_module(
            RecMetricModule, MetricsConfig(), 1, 1, 0, {}, torch.device("cpu"), batch_size_stages=stages
        )


def test_modes_are_torchrecs_numbers() -> None:
    assert [(mode.name, mode.value) for mode in RecComputeMode] == [
        ("FUSED_TASKS_COMPUTATION", 1),
        ("UNFUSED_TASKS_COMPUTATION", 2),
        ("FUSED_TASKS_AND_STATES_COMPUTATION", 3),
    ]


def test_batch_sizes_by_iteration() -> None:
    stages = [BatchSizeStage(4, 2), BatchSizeStage(8, None)]
    metric = ThroughputMetric(batch_size=1, world_size=2, window_seconds=5, batch_size_stages=stages)
    for _ in range(3):
        metric.update()
    found = metric.compute()
    assert found["throughput-throughput|total_examples"] == 2 * (4 + 4 + 8)
    assert found["throughput-throughput|batch_size"] == 8


def defaults(call: Any) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


def test_what_is_measured_where_nothing_is_said_is_torchrecs() -> None:
    unfused = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    assert vars(MetricsConfig()) == {
        "rec_tasks": [],
        "rec_metrics": {},
        "throughput_metric": None,
        "rec_compute_mode": unfused,
        "fused_update_limit": 0,
        "state_metrics": [],
        "compute_interval_steps": 100,
        "min_compute_interval": 0.0,
        "max_compute_interval": float("inf"),
        "compute_on_all_ranks": False,
        "should_validate_update": False,
        "enable_pt2_compile": False,
        "should_clone_update_inputs": False,
        "use_cpu_offloaded_rec_metric_module": None,
    }
    assert MetricsConfig() == EmptyMetricsConfig
    assert RecMetricDef() == RecMetricDef(rec_tasks=[], rec_task_indices=[], window_size=10_000_000, arguments=None)
    assert SessionMetricDef("s") == SessionMetricDef("s", top_threshold=None, run_ranking_of_labels=False)
    assert ThroughputDef() == ThroughputDef(window_size=100, warmup_steps=100)
    assert BatchSizeStage() == BatchSizeStage(batch_size=0, max_iters=0)
    task = RecTaskInfo("DefaultTask", "label", "prediction", "weight", None, False, None, True)
    assert RecTaskInfo() == task
    assert DefaultMetricsConfig == MetricsConfig(
        rec_tasks=[task],
        rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[task])},
        throughput_metric=ThroughputDef(),
    )
    assert defaults(RecMetric) == {
        "compute_mode": unfused,
        "window_size": 100,
        "fused_update_limit": 0,
        "compute_on_all_ranks": False,
        "should_validate_update": False,
        "process_group": None,
    }
    assert defaults(RecMetricModule) == {
        **dict.fromkeys(("rec_tasks", "rec_metrics", "throughput_metric", "state_metrics")),
        "compute_interval_steps": 100,
        "min_compute_interval": 0.0,
        "max_compute_interval": float("inf"),
    }
    assert defaults(ThroughputMetric) == {"warmup_steps": 100, "batch_size_stages": None}


def test_options_where_nothing_is_said_are_torchrecs() -> None:
    missing, threshold = {"allow_missing_label_with_zero_weight": False}, {"threshold": 0.5}
    expected = {
        "ne": {"include_logloss": False, **missing},
        "ne_positive": missing,
        "unweighted_ne": missing,
        "cali_free_ne": missing,
        "recalibrated_ne": {"include_logloss": False, **missing, "recalibration_coefficient": 1.0},
        "recalibrated_calibration": {"recalibration_coefficient": 1.0},
        "segmented_ne": {
            "num_groups": REQUIRED,
            "grouping_keys": "grouping_keys",
            "cast_keys_to_int": False,
            "include_logloss": False,
        },
        "mse": {"include_r_squared": False},
        **dict.fromkeys(("accuracy", "precision", "recall"), threshold),
        "multiclass_recall": {"number_of_classes": REQUIRED},
        "recall_session_level": {"tasks": ()},
        "precision_session_level": {"tasks": ()},
        "ndcg": {
            "tasks": (),
            "exponential_gain": False,
            "session_key": "session_id",
            "k": -1,
            "report_ndcg_as_decreasing_curve": True,
            "remove_single_length_sessions": False,
            "scale_by_weights_tensor": False,
        },
        "tensor_weighted_avg": {"tasks": (), "description": None},
        "auc": {"grouped_auc": False, "apply_bin": False},
        "auprc": {"grouped_auprc": False},
        "rauc": {"grouped_rauc": False},
        "tower_qps": {"warmup_steps": 100},
    }
    offered = {name: measure.options for name, measure in MEASURES.items()} | SAMPLE_OPTIONS | RATE_OPTIONS
    assert {name: options for name, options in offered.items() if options} == expected


def test_a_config_names_no_task_beyond_its_list() -> None:
    tasks = [RecTaskInfo(name="a"), RecTaskInfo(name="b")]
    MetricsConfig(rec_tasks=tasks, rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_task_indices=[0, 1])})
    with pytest.raises(ValueError, match=r"ne: rec_task_indices \[2\], but rec_tasks has 2 tasks"):
        MetricsConfig(rec_tasks=tasks, rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_task_indices=[1, 2])})


def test_a_config_measures_only_its_own_tasks() -> None:
    """Nothing would ever be added to another one's figures."""
    own, strange = RecTaskInfo(name="click"), RecTaskInfo(name="buy")
    MetricsConfig(rec_tasks=[strange, own], rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[own])})
    with pytest.raises(ValueError, match=r"auc: tasks \['buy'\] are not among the model's \['click'\]"):
        MetricsConfig(rec_tasks=[own], rec_metrics={RecMetricEnum.AUC: RecMetricDef(rec_tasks=[own, strange])})


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.module)
def test_each_metric_has_a_module_whose_classes_pickle(row: Row) -> None:
    path = f"rayrec.torchrec.metrics.{row.module}"
    namespace: dict[str, Any] = {}
    exec(f"import {path} as module; from {path} import {row.metric} as metric", namespace)
    module, metric = namespace["module"], namespace["metric"]
    assert module.__name__ == metric.__module__ == path and module.__doc__ == metric.__doc__ == row.text
    assert pickle.loads(pickle.dumps(metric)) is metric
    assert pickle.loads(f"c{path}\n{row.metric}\n.".encode()) is metric
    for name in {row.computation or f"{row.metric}Computation"} & set(dir(module)):
        assert pickle.loads(pickle.dumps(getattr(module, name))) is getattr(module, name)
