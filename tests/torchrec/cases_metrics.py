"""Cases of metrics: figures of drawn batches, over the run and over a window, in every way of asking for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.package import Package, attempt

CASES = case = Cases()
BATCH, WINDOW = 16, 50  # a window of three batches
RATES = "9/metrics of a rate: NE"
ORDERS = "9/ranking: AUC"
MEANS = "9/counts and means: CTR"


def outputs(batches: int, seed: int = 3) -> Iterator[dict[str, torch.Tensor]]:
    """What a model of two tasks puts out; some weights are 0."""
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        draw = torch.rand(6, BATCH, generator=numbers)
        yield {
            "label": (draw[0] > 0.6).float(),
            "prediction": draw[1],
            "weight": (draw[2] * 4).floor(),
            "label2": (draw[3] > 0.2).float(),
            "prediction2": draw[4],
            "weight2": draw[5],
            "group": torch.arange(BATCH) % 3,
            "session": torch.arange(BATCH) // 4,
            "value": draw[2] - draw[3],
            "stars": (draw[0] * 5).floor(),
            "guess": draw[1] * 5,
            "class": (draw[0] * 3).floor(),
            "classes": torch.stack((draw[1], draw[3], draw[4]), dim=1),
        }


def tasks(rec: Package) -> list[Any]:
    info = rec("metrics.metrics_config").RecTaskInfo
    return [info(), info("Second", "label2", "prediction2", "weight2")]


def module(rec: Package, metrics: dict[str, dict[str, Any] | None], of: list[Any] | None = None, **config: Any) -> Any:
    """A metric module of named metrics."""
    configs, modules = rec("metrics.metrics_config"), rec("metrics.metric_module")
    of = tasks(rec) if of is None else of
    wanted = {
        configs.RecMetricEnum[name]: configs.RecMetricDef(rec_tasks=of, window_size=WINDOW, arguments=arguments)
        for name, arguments in metrics.items()
    }
    return modules.generate_metric_module(
        modules.RecMetricModule,
        configs.MetricsConfig(rec_tasks=of, rec_metrics=wanted, **config),
        batch_size=BATCH,
        world_size=1,
        my_rank=0,
        state_metrics_mapping={},
        device=torch.device("cpu"),
    )


def figures(rec: Package, *names: str, arguments: dict[str, Any] | None = None, **config: Any) -> Any:
    """Of seven batches, asked for twice."""
    measured = module(rec, {name: None if arguments is None else dict(arguments) for name in names}, **config)
    found = []
    for step, batch in enumerate(outputs(7)):
        measured.update(batch)
        if step in (1, 6):
            found.append(copy.deepcopy(dict(measured.compute())))  # TorchRec hands out some of its own sums
    return found


def of_names(line: str, *names: str) -> None:
    """A case a metric."""

    def make(name: str) -> Callable[[Package], Any]:
        def run(rec: Package) -> Any:
            return figures(rec, name)

        run.__name__ = f"figures_of_{name.lower()}"
        return run

    for name in names:
        case(line)(make(name))


of_names(RATES, "NE", "NE_POSITIVE", "UNWEIGHTED_NE", "CALI_FREE_NE", "SERVING_NE")
of_names(ORDERS, "AUC", "AUPRC", "RAUC", "XAUC")
of_names(MEANS, "CTR", "CALIBRATION", "SERVING_CALIBRATION", "ACCURACY", "PRECISION", "RECALL", "MSE", "MAE", "NMSE")
of_names(MEANS, "AVERAGE", "NUM_POSITIVE_SAMPLES", "NUM_MISSING_LABELS", "SUM_WEIGHTS", "WEIGHTED_SUM_PREDICTIONS")


@case(RATES)
def logloss_and_recalibration(rec: Package) -> Any:
    one = figures(rec, "NE", arguments={"include_logloss": True})
    two = figures(rec, "RECALIBRATED_NE", "RECALIBRATED_CALIBRATION", arguments={"recalibration_coefficient": 0.3})
    return [one, two]


@case(RATES)
def ne_of_labels_that_are_missing(rec: Package) -> Any:
    measured = module(rec, {"NE": {"allow_missing_label_with_zero_weight": True}})
    for batch in outputs(2):
        measured.update(batch | {"weight2": torch.zeros(BATCH)})
    return dict(measured.compute())


@case(RATES)
def segmented_ne(rec: Package) -> Any:
    found = figures(rec, "SEGMENTED_NE", arguments={"num_groups": 3, "grouping_keys": "group", "include_logloss": True})
    return [{key: value.view(1) for key, value in one.items()} for one in found]  # TorchRec's are scalars


@case(ORDERS)
def areas_by_group(rec: Package) -> Any:
    found = []
    for name in ("AUC", "AUPRC", "RAUC"):
        measured = module(rec, {name: {f"grouped_{name.lower()}": True}})
        for batch in outputs(3):
            measured.update(batch | {"grouping_keys": batch["group"]})
        found.append(measured.compute()[f"{name.lower()}-Second|window_{name.lower()}"])
    return found


@case(ORDERS)
def auprc_by_group(rec: Package) -> Any:
    measured = module(rec, {"AUPRC": {"grouped_auprc": True}})
    for batch in outputs(3):
        measured.update(batch | {"grouping_keys": batch["group"]})
    return dict(measured.compute())


@case(ORDERS)
def auc_by_group(rec: Package) -> Any:
    measured = module(rec, {"AUC": {"grouped_auc": True}, "RAUC": {"grouped_rauc": True}})
    for batch in outputs(3):
        measured.update(batch | {"grouping_keys": batch["group"]})
    return dict(measured.compute())


@case(ORDERS, "equal predictions count half each way; TorchRec counts them in sorted order, which is arbitrary")
def auc_of_equal_predictions(rec: Package) -> Any:
    measured = module(rec, {"AUC": None})
    for batch in outputs(2):
        measured.update(batch | {"prediction": (batch["prediction"] * 3).floor() / 3})
    return dict(measured.compute())


@case(ORDERS)
def ndcg(rec: Package) -> Any:
    stars = rec("metrics.metrics_config").RecTaskInfo("ndcg", "stars", "guess", "weight")
    found = []
    for arguments in ({}, {"k": 2, "report_ndcg_as_decreasing_curve": False}, {"exponential_gain": True}):
        measured = module(rec, {"NDCG": {"session_key": "session", **arguments}}, [stars])
        for batch in outputs(5):
            measured.update(batch)
        found.append(dict(measured.compute()))
    return found


@case(MEANS)
def sessions(rec: Package) -> Any:
    configs = rec("metrics.metrics_config")
    of = [
        configs.RecTaskInfo(session_metric_def=configs.SessionMetricDef("session", 2)),
        configs.RecTaskInfo("Ranked", "stars", "guess", "weight", configs.SessionMetricDef("session", 2, True)),
    ]
    measured = module(rec, {"RECALL_SESSION_LEVEL": None, "PRECISION_SESSION_LEVEL": None}, of)
    for batch in outputs(5):
        measured.update(batch)
    return dict(measured.compute())


@case(MEANS)
def errors_of_numbers(rec: Package) -> Any:
    stars = rec("metrics.metrics_config").RecTaskInfo("stars", "stars", "guess", "weight")
    measured = module(rec, {"MSE": {"include_r_squared": True}}, [stars])
    for batch in outputs(5):
        measured.update(batch)
    return dict(measured.compute())


@case(MEANS)
def thresholds(rec: Package) -> Any:
    return figures(rec, "ACCURACY", "PRECISION", "RECALL", arguments={"threshold": 0.7})


@case(MEANS)
def classes(rec: Package) -> Any:
    task = rec("metrics.metrics_config").RecTaskInfo("classes", "class", "classes", "weight")
    measured = module(rec, {"MULTICLASS_RECALL": {"number_of_classes": 3}}, [task])
    for batch in outputs(5):
        measured.update(batch)
    return dict(measured.compute())


@case(MEANS)
def averages_of_the_run(rec: Package) -> Any:
    info = rec("metrics.metrics_config").RecTaskInfo
    of = [info("a", weight_name="weight2", tensor_name="value"), info("b", tensor_name="guess", weighted=False)]
    one = module(rec, {"WEIGHTED_AVG": None, "SCALAR": None})
    two = module(rec, {"TENSOR_WEIGHTED_AVG": None}, of)
    found: dict[str, Any] = {}
    for batch in outputs(5):
        one.update(batch)
        two.update(batch)
    for key, value in [*one.compute().items(), *two.compute().items()]:
        if "lifetime" in key:
            found[key + str(len(found))] = value.double()
    return found


@case(MEANS, "a window counts examples; TorchRec counts a batch as one for averages of outputs")
def averages_of_the_window(rec: Package) -> Any:
    return [value for one in figures(rec, "WEIGHTED_AVG", "SCALAR") for key, value in one.items() if "window" in key]


@case("9/metric_module.generate_metric_module")
def wrong_configs(rec: Package) -> Any:
    configs = rec("metrics.metrics_config")
    return [
        attempt(lambda: module(rec, {"NE": None}, [])),
        attempt(lambda: configs.MetricsConfig(rec_metrics={configs.RecMetricEnum.NE: configs.RecMetricDef([], [1])})),
        attempt(lambda: module(rec, {"MULTICLASS_RECALL": None})),
        attempt(lambda: module(rec, {"NE": None}, rec_compute_mode=fused(rec), fused_update_limit=2)),
        attempt(lambda: module(rec, {"NE": None}, max_compute_interval=0.0)),
        attempt(lambda: module(rec, {"LOG_LOSS": None})),
        attempt(lambda: configs_with_a_small_window(rec)),
    ]


def configs_with_a_small_window(rec: Package) -> Any:
    configs, modules = rec("metrics.metrics_config"), rec("metrics.metric_module")
    of = configs.RecMetricDef(rec_tasks=tasks(rec), window_size=BATCH - 1)
    config = configs.MetricsConfig(rec_tasks=tasks(rec), rec_metrics={configs.RecMetricEnum.NE: of})
    return modules.generate_metric_module(modules.RecMetricModule, config, BATCH, 1, 0, {}, torch.device("cpu"))


def fused(rec: Package) -> Any:
    return rec("metrics.metrics_config").RecComputeMode.FUSED_TASKS_COMPUTATION


@case("9/metric_module.RecMetricModule")
def fused_tasks(rec: Package) -> Any:
    return figures(rec, "NE", "AUC", "MSE", "CTR", rec_compute_mode=fused(rec))


@case("9/metric_module.RecMetricModule")
def fused_updates(rec: Package) -> Any:
    return figures(rec, "NE", "CALIBRATION", fused_update_limit=3)


@case("9/metric_module.RecMetricModule")
def batches_without_weight(rec: Package) -> Any:
    measured = module(rec, {"NE": None, "CTR": None}, should_validate_update=True)
    found = []
    for step, batch in enumerate(outputs(4)):
        nothing = torch.zeros(BATCH)
        measured.update(batch | {"weight2": nothing} | ({"weight": nothing} if step < 2 else {}))
        found.append(dict(measured.compute()))
    return found


@case("9/metric_module.RecMetricModule")
def ways_to_ask(rec: Package) -> Any:
    measured = module(rec, {"NE": None, "AUC": None}, compute_interval_steps=2)
    found: list[Any] = [measured.should_compute()]
    for batch in outputs(3):
        measured.update(batch)
        found.append([measured.should_compute(), measured.trained_batches])
    found += [dict(measured.local_compute()), measured.get_required_inputs(), len(measured.compute())]
    measured.reset()
    measured.update(next(outputs(1, seed=5)))
    return [*found, dict(measured.compute())]


@case("9/metric_module.RecMetricModule")
def state_of_a_run(rec: Package) -> Any:
    first = module(rec, {"NE": None, "CTR": None, "AUC": None})
    for batch in outputs(3):
        first.update(batch)
    state = first.state_dict()
    shown = copy.deepcopy(dict(state))
    second = module(rec, {"NE": None, "CTR": None, "AUC": None})
    second.load_state_dict(state)
    second.update(next(outputs(1, seed=5)))
    return [shown, {key: value for key, value in second.compute().items() if "lifetime" in key}]


@case("9/metric_module.RecMetricModule")
def outputs_that_do_not_fit(rec: Package) -> Any:
    measured = module(rec, {"NE": None})
    good = next(outputs(1))
    short = {name: value for name, value in good.items() if name != "weight"}
    return [
        attempt(lambda: measured.update(short)),
        attempt(lambda: measured.update(good | {"prediction": torch.rand(3)})),
        measured.update(good | {name: torch.zeros(0) for name in ("label", "prediction", "weight")}),
        dict(measured.compute()),
    ]


@case("9/metrics_config.MetricsConfig")
def default_configs(rec: Package) -> Any:
    configs = rec("metrics.metrics_config")
    default, empty = configs.DefaultMetricsConfig, configs.EmptyMetricsConfig
    return [
        [str(kind) for kind in default.rec_metrics],
        next(iter(default.rec_metrics.values())).window_size,
        [default.throughput_metric.window_size, default.throughput_metric.warmup_steps],
        [default.compute_interval_steps, default.fused_update_limit, default.compute_on_all_ranks],
        [empty.rec_tasks, empty.rec_metrics, empty.throughput_metric],
    ]


@case("9/metrics_config.RecTaskInfo")
def task_infos(rec: Package) -> Any:
    configs = rec("metrics.metrics_config")
    one = configs.DefaultTaskInfo
    return [
        [one.name, one.label_name, one.prediction_name, one.weight_name, one.session_metric_def],
        one == configs.RecTaskInfo(),
        len({one, configs.RecTaskInfo()}),
        sorted(str(kind) for kind in configs.RecMetricEnum),
        [mode.value for mode in configs.RecComputeMode],
        attempt(lambda: configs.validate_batch_size_stages([configs.BatchSizeStage(4, 10)])),
    ]


@case("9/rec_metric.RecMetric")
def metrics_alone(rec: Package) -> Any:
    found = []
    of = tasks(rec)
    for path, name in (("ne", "NEMetric"), ("auc", "AUCMetric"), ("calibration_with_recalibration", None)):
        kind = getattr(rec(f"metrics.{path}"), name or "RecalibratedCalibrationMetric")
        metric = kind(world_size=1, my_rank=0, batch_size=BATCH, tasks=of, window_size=WINDOW)
        for batch in outputs(5):
            metric.update(
                predictions={"DefaultTask": batch["prediction"], "Second": batch["prediction2"]},
                labels={"DefaultTask": batch["label"], "Second": batch["label2"]},
                weights=None,
            )
        found.append(metric.compute())
    return found


@case("9/throughput.ThroughputMetric")
def throughput_keys(rec: Package) -> Any:
    metric = rec("metrics.throughput").ThroughputMetric(batch_size=4, world_size=2, window_seconds=10, warmup_steps=2)
    found = []
    for step in range(5):
        metric.update()
        if step in (0, 4):
            computed = metric.compute()
            found.append([sorted(computed), computed["throughput-throughput|total_examples"]])
    wrong = attempt(lambda: rec("metrics.throughput").ThroughputMetric(batch_size=4, world_size=2, window_seconds=0))
    return [found, sorted(metric.state_dict()), wrong]


@case("9/throughput.ThroughputMetric")
def task_rates(rec: Package) -> Any:
    measured = module(rec, {"TOWER_QPS": {"warmup_steps": 2}})
    for batch in outputs(4):
        measured.update(batch)
    found = measured.compute()
    return [sorted(found), found["qps-Second|total_examples"], bool(found["qps-Second|lifetime_qps"] > 0)]
