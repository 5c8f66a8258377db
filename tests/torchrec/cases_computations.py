"""Cases of metrics of one's own, and of what they are made of."""

from __future__ import annotations

from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_metrics import BATCH, WINDOW, outputs, tasks
from tests.torchrec.package import Package, attempt

CASES = case = Cases()
OWN, ORDERS, MODULE = "9/rec_metric.RecMetric", "9/ranking: AUC", "9/metric_module.RecMetricModule"


def mean_of_predictions(rec: Package) -> Any:
    """The class of a metric: the weighted mean of predictions, and their greatest."""
    home, names = rec("metrics.rec_metric"), rec("metrics.metrics_namespace")

    class Computation(home.RecMetricComputation):
        def __init__(self, *args: Any, power: float = 1.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.power = power
            for name in ("total", "weight"):
                zeros = torch.zeros(self._n_tasks, dtype=torch.double)
                self._add_state(name, zeros, add_window_state=True, dist_reduce_fx="sum", persistent=True)
            self._add_state(
                "most", torch.zeros(self._n_tasks, dtype=torch.double), add_window_state=False, dist_reduce_fx="max"
            )

        def update(self, *, predictions: Any, labels: Any, weights: Any, **kwargs: Any) -> None:
            scores = predictions.double() ** self.power
            for name, value in (("total", (scores * weights).sum(-1)), ("weight", weights.double().sum(-1))):
                getattr(self, name).add_(value)
                self._aggregate_window_state(name, value, predictions.shape[-1])
            self.most.copy_(torch.maximum(self.most, scores.amax(-1)))

        def _compute(self) -> list[Any]:
            of_window = self.get_window_state("total") / self.get_window_state("weight")
            report, prefix, name = home.MetricComputationReport, names.MetricPrefix, names.MetricName.AUC
            return [
                report(name=name, metric_prefix=prefix.LIFETIME, value=self.total / self.weight),
                report(name=name, metric_prefix=prefix.WINDOW, value=of_window, description="-mean"),
                report(names.MetricName.DEFAULT, prefix.DEFAULT, self.most, "most"),
            ]

    class Metric(home.RecMetric):
        _namespace = names.MetricNamespace.AVERAGE
        _computation_class = Computation

    return Metric


def by_task(rec: Package, batch: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    of = tasks(rec)
    return {
        "predictions": {task.name: batch[task.prediction_name] for task in of},
        "labels": {task.name: batch[task.label_name] for task in of},
        "weights": {task.name: batch[task.weight_name] for task in of},
    }


@case(OWN)
def a_metric_of_ones_own(rec: Package) -> Any:
    found = []
    for mode in ("UNFUSED_TASKS_COMPUTATION", "FUSED_TASKS_COMPUTATION"):
        kind = rec("metrics.metrics_config").RecComputeMode[mode]
        metric = mean_of_predictions(rec)(
            world_size=1,
            my_rank=0,
            batch_size=BATCH,
            tasks=tasks(rec),
            window_size=WINDOW,
            compute_mode=kind,
            power=2.0,
        )
        for batch in outputs(6):
            metric.update(**by_task(rec, batch))
        found += [dict(metric.compute()), dict(metric.local_compute()), sorted(metric.state_dict())]
        metric.reset()
        metric.update(**by_task(rec, next(iter(outputs(1, seed=5)))))
        found.append(dict(metric.compute()))
    return found


@case(OWN)
def in_a_module(rec: Package) -> Any:
    metrics = [
        kind(world_size=1, my_rank=0, batch_size=BATCH, tasks=tasks(rec), window_size=WINDOW)
        for kind in (mean_of_predictions(rec), rec("metrics.ne").NEMetric)
    ]
    module = rec("metrics.metric_module").RecMetricModule(
        batch_size=BATCH,
        world_size=1,
        rec_tasks=tasks(rec),
        rec_metrics=rec("metrics.rec_metric").RecMetricList(metrics),
    )
    for batch in outputs(4):
        module.update(batch)
    return dict(module.compute())


@case(OWN)
def a_metric_that_derives_from_another(rec: Package) -> Any:
    home = rec("metrics.ne")

    class Double(home.NEMetricComputation):
        def _compute(self) -> list[Any]:
            make = rec("metrics.rec_metric").MetricComputationReport
            return [
                make(name=one.name, metric_prefix=one.metric_prefix, value=one.value * 2) for one in super()._compute()
            ]

    class Metric(rec("metrics.rec_metric").RecMetric):  # type: ignore[misc]
        _namespace = rec("metrics.metrics_namespace").MetricNamespace.NE
        _computation_class = Double

    metric = Metric(world_size=1, my_rank=0, batch_size=BATCH, tasks=tasks(rec), window_size=WINDOW)
    for batch in outputs(4):
        metric.update(**by_task(rec, batch))
    return [dict(metric.compute()), metric.state_dict()]


@case(OWN)
def windows(rec: Package) -> Any:
    found = []
    for most, count in ((10, 100), (3, 100), (100, 2)):
        buffer, window = rec("metrics.rec_metric").WindowBuffer(most, count), torch.zeros(2)
        for step in range(5):
            buffer.aggregate_state(window, torch.full((2,), float(step + 1)), 4)
            found.append([window.clone(), list(buffer.buffers or ())])
    return found


def gauc(rec: Package, rounded: bool) -> Any:
    home, found = rec("metrics.gauc"), []
    metric = home.GAUCMetric(world_size=1, my_rank=0, batch_size=BATCH, tasks=tasks(rec), window_size=WINDOW)
    for batch in outputs(5):
        parts = by_task(rec, batch)
        if rounded:
            parts["predictions"] = {name: (value * 3).floor() for name, value in parts["predictions"].items()}
        metric.update(**parts, num_candidates=torch.tensor([3, 1, 7, 5]))
        found.append({key: value.clone() for key, value in metric.compute().items()})
    return found


@case(ORDERS)
def areas_over_sessions(rec: Package) -> Any:
    empty = rec("metrics.gauc").GAUCMetric(1, 0, BATCH, tasks(rec), window_size=WINDOW)
    return [gauc(rec, rounded=False), dict(empty.compute())]


@case(ORDERS, "equal predictions count half each way; TorchRec counts them in sorted order, which is arbitrary")
def areas_over_sessions_with_equal_predictions(rec: Package) -> Any:
    return gauc(rec, rounded=True)


@case(ORDERS, "sessions whose length differs from the batch are refused")
def sessions_of_another_length(rec: Package) -> Any:
    metric = rec("metrics.gauc").GAUCMetric(1, 0, BATCH, tasks(rec), window_size=WINDOW)
    parts = by_task(rec, next(iter(outputs(1))))
    return attempt(lambda: metric.update(**parts, num_candidates=torch.tensor([3, 1])))


@case(MODULE)
def outputs_of_tasks(rec: Package) -> Any:
    home = rec("metrics.model_utils")
    out = {"label": torch.ones(3, 1), "prediction": torch.rand(3, 1) * 0 + 0.5, "weight": torch.ones(3)}
    out |= {"label2": torch.zeros(3), "prediction2": torch.ones(3), "weight2": torch.ones(3), "x": torch.arange(3)}
    lacking = {name: value for name, value in out.items() if name != "weight2"}
    return [
        home.parse_task_model_outputs(tasks(rec), out, ["x"]),
        home.parse_model_outputs("label", "prediction", "weight", out),
        home.parse_model_outputs("label", "", "", out),
        home.parse_required_inputs(out, ["x"]),
        attempt(lambda: home.parse_task_model_outputs(tasks(rec), lacking)),
        attempt(lambda: home.parse_required_inputs(out, ["nothing"])),
        [home.is_empty_signals(*[torch.ones(size)] * 3) for size in (0, 2)],
        home.session_ids_to_tensor(["1", "1", "2", "2", "1"]),
    ]


@case(OWN)
def names_of_figures(rec: Package) -> Any:
    home = rec("metrics.metrics_namespace")
    kinds = (home.MetricName, home.MetricNamespace, home.MetricPrefix)
    bases = [issubclass(home.MetricName, home.MetricNameBase), issubclass(kinds[1], home.MetricNamespaceBase)]
    return [[{one.name: str(one) for one in kind} for kind in kinds], bases]
