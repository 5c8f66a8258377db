"""Metrics of tasks over ranks: what all ranks saw, in one exchange; and what a config is refused for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.metrics.metric_module import RecMetricModule, StateMetric, generate_metric_module
from rayrec.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
)
from rayrec.metrics.rec_metric import RecMetricException, named_metric
from rayrec.metrics.streaming.samples import auc, auprc, rauc
from rayrec.metrics.throughput import ThroughputMetric
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


def test_what_is_not_offered_says_what_to_use() -> None:
    for kind in set(RecMetricEnum) - {RecMetricEnum.SEGMENTED_NE, RecMetricEnum.MULTICLASS_RECALL}:
        try:
            module(1, 0, kind)
        except RecMetricException as error:
            assert str(kind) in str(error) and "use " in str(error)
    with pytest.raises(RecMetricException, match="include_logloss"):
        module(1, 0, RecMetricEnum.LOG_LOSS)
    with pytest.raises(TypeError, match="no option"):
        named_metric("precision", "PrecisionMetric")(1, 0, 1, [RecTaskInfo()], treshold=1)


def test_the_time_between_computations_sets_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr("rayrec.metrics.metric_module.time.monotonic", lambda: next(clock))
    metrics = module(1, 0, RecMetricEnum.CTR, compute_interval_steps=10, min_compute_interval=4.0)
    metrics.compute()
    assert metrics.compute_interval_steps == 10
    metrics.compute()  # 10 steps took 2 s; at least 4 s are wanted, and a second more is taken
    assert metrics.compute_interval_steps == 25
    metrics.compute()
    assert metrics.compute_interval_steps == 25


def test_batch_sizes_by_iteration() -> None:
    stages = [BatchSizeStage(4, 2), BatchSizeStage(8, None)]
    metric = ThroughputMetric(batch_size=1, world_size=2, window_seconds=5, batch_size_stages=stages)
    for _ in range(3):
        metric.update()
    found = metric.compute()
    assert found["throughput-throughput|total_examples"] == 2 * (4 + 4 + 8)
    assert found["throughput-throughput|batch_size"] == 8
