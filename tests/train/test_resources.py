"""Whether workers and readers fit on a Ray; and that a run on too small a Ray is refused, not left waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.train import ResourceError, parse_config
from rayrec.train.driver.resources import Demand, Supply, demand_of, one_worker_per_gpu, refuse_if_short
from rayrec.train.setup.build import rows_of
from tests.train.small import raw_config


def need_of(supply: Supply, reads_on_ray: bool = True, **trainer: object) -> Demand:
    read = {"reader": "ray" if reads_on_ray else "local", "cpus_per_read": 0.25}
    changes = {"trainer__batch_size": 64} | {f"trainer__{name}": value for name, value in trainer.items()}
    return demand_of(parse_config(raw_config(Path("/nowhere"), data__read=read, **changes)), supply)


@pytest.mark.parametrize(
    ("cpus", "workers", "share"), [(2, 1, 1.0), (2, 2, 0.5), (2, 4, 0.25), (4, 2, 1.0), (64, 2, 1.0), (2, 8, 0.25)]
)
def test_workers_leave_half_of_the_cpus_for_reading(cpus: float, workers: int, share: float) -> None:
    assert need_of(Supply(cpus=cpus, gpus=0), num_workers=workers).cpus_per_worker == share


def test_gpus_are_used_where_there_are_any() -> None:
    assert need_of(Supply(cpus=8, gpus=2), num_workers=2).use_gpu
    few = Supply(cpus=8, gpus=1)
    with pytest.raises(ResourceError, match=r"needs 2 GPUs .* lower trainer\.num_workers to 1, or"):
        refuse_if_short(need_of(few, num_workers=2), few, "the cluster has")
    assert not need_of(Supply(cpus=8, gpus=2), num_workers=2, use_gpu=False).use_gpu
    assert not need_of(Supply(cpus=8, gpus=0), num_workers=2).use_gpu
    assert not need_of(Supply(cpus=8, gpus=2), num_workers=0).use_gpu


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "times"), [(96, 8, 8, 1), (96, 8, 2, 4), (2.5, 8, 1, 2), (96, 0, 4, 22), (1, 0, 2, 1)]
)
def test_concurrent_trials_are_limited_by_cpus_and_gpus(cpus: float, gpus: float, workers: int, times: int) -> None:
    supply = Supply(cpus=cpus, gpus=gpus)
    assert need_of(supply, num_workers=workers).times_in(supply) == times


def test_a_cluster_without_gpus_is_not_an_advice_to_train_without_workers() -> None:
    none = Supply(cpus=8, gpus=0)
    with pytest.raises(ResourceError, match=r"but the cluster has 0; set trainer\.use_gpu=false"):
        refuse_if_short(need_of(none, num_workers=2, use_gpu=True), none, "the cluster has")


@pytest.mark.parametrize(
    ("changes", "gpus", "workers"),
    [
        ({}, 1, 1),
        ({}, 0, 4),
        ({}, 4, 4),
        ({}, 8, 4),
        ({"sharding": {"replicas": "auto"}}, 2, 2),
        ({"trainer__use_gpu": False}, 1, 4),
        ({"trainer__use_gpu": True}, 1, 4),
        ({"sharding": {"replicas": 2}}, 1, 4),
        ({"sharding": {"plan": "plan.json"}}, 1, 4),
        ({"trainer__num_workers": [4, 8]}, 1, [4, 8]),
    ],
)
def test_a_machine_with_few_gpus_trains_on_them(changes: dict[str, Any], gpus: int, workers: int | list[int]) -> None:
    config = parse_config(raw_config(Path("/nowhere"), **{"trainer__num_workers": 4, **changes}))
    assert one_worker_per_gpu(config, Supply(cpus=8, gpus=gpus)).trainer.num_workers == workers


def test_too_many_cpus_are_refused_with_what_would_fit() -> None:
    supply = Supply(cpus=2, gpus=0)
    need = need_of(supply, num_workers=2, cpus_per_worker=64.0)
    with pytest.raises(ResourceError) as caught:
        refuse_if_short(need, supply, "this machine has")
    text = str(caught.value)
    assert "the run needs 128.25 CPUs (2 workers × 64 and 0.25 for reading), but this machine has 2" in text
    assert "trainer.cpus_per_worker to at most 0.88" in text


def test_reading_needs_a_share_too() -> None:
    supply = Supply(cpus=2, gpus=0)
    with pytest.raises(ResourceError, match=r"lower trainer\.num_workers to 1"):
        refuse_if_short(need_of(supply, num_workers=2, cpus_per_worker=1.0), supply, "x has")
    refuse_if_short(need_of(supply, reads_on_ray=False, num_workers=2, cpus_per_worker=1.0), supply, "x has")


def test_missing_gpus_are_refused() -> None:
    supply = Supply(cpus=8, gpus=1)
    with pytest.raises(
        ResourceError, match=r"needs 2 GPUs \(one per worker\), but x has 1; lower trainer\.num_workers to 1"
    ):
        refuse_if_short(need_of(supply, num_workers=2, use_gpu=True), supply, "x has")


@settings(max_examples=50, deadline=None)
@given(cpus=st.integers(1, 64), workers=st.integers(1, 64))
def test_what_auto_asks_for_fits_or_is_refused_by_name(cpus: int, workers: int) -> None:
    supply = Supply(cpus=cpus, gpus=0)
    need = need_of(supply, num_workers=workers)
    assert 0.25 <= need.cpus_per_worker <= 1.0
    if workers * 0.25 + 0.25 <= cpus:
        refuse_if_short(need, supply, "x has")
    else:
        with pytest.raises(ResourceError, match=r"trainer\.num_workers"):
            refuse_if_short(need, supply, "x has")


def test_ids_of_a_feature_map_to_the_rows_of_the_smallest_table_that_reads_it() -> None:
    raw = raw_config(Path("/nowhere"))
    raw["tables"].append({"name": "user2", "rows": 30, "dim": 8, "features": ["user", "item"]})
    assert rows_of(parse_config(raw)) == {"user": 30, "item": 30, "tags": 7}
