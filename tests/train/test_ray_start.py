"""When a local Ray is started beside a command's imports: only where the config is certain to want one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayrec._runtime.local_ray import HELPERS, without_helpers
from rayrec.train.driver.ray_start import _local_workers


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("name: a\n", [], 2),
        ("trainer: {num_workers: 2}\n", [], 2),
        ("trainer: {num_workers: 2}\n", ["trainer.num_workers=0"], 0),
        ("trainer: {num_workers: 0}\n", ["trainer.num_workers=3", "trainer.epochs=2"], 3),
        ("trainer: {num_workers: 0}\n", [], 0),
        ("trainer: {num_workers: [1, 2]}\n", [], 0),
        ("trainer: {num_workers: 2}\n", ["trainer={num_workers: 0}"], 0),
        ("trainer: 7\n", [], 0),
        ("- a list\n", [], 0),
        ("{not: yaml", [], 0),
    ],
)
def test_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, overrides: list[str], wanted: int
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert _local_workers(path, overrides) == wanted
    assert not _local_workers(tmp_path / "none.yaml", overrides)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not _local_workers(path, overrides)


def test_it_begins_before_torch_and_ray_are_imported() -> None:
    code = "import rayrec.train.driver.ray_start, sys; print(sorted({'torch', 'ray', 'fbgemm_gpu'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_rays_helpers_are_not_started_within_and_are_afterwards() -> None:
    from ray._private.node import Node

    before = {name: getattr(Node, name) for name in HELPERS}  # all are there: else a start takes longer
    with without_helpers():
        assert [getattr(Node, name)(None, include_dashboard=False) for name in HELPERS] == [None] * len(HELPERS)
    assert {name: getattr(Node, name) for name in HELPERS} == before


def test_ray_train_has_what_a_controller_in_this_process_overrides() -> None:
    """Of names that Ray does not promise: a Ray without them needs another `local_group.py`."""
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def takes(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert inspect.iscoroutinefunction(TrainController._run_control_loop_iteration)
    assert TrainController.worker_group_cls is WorkerGroup
    assert {"scaling_policy", "train_run_context"} <= takes(TrainController)
    assert "controller_init_kwargs" in takes(DataParallelTrainer._initialize_and_run_controller)
    assert takes(FixedScalingPolicy._maybe_send_resource_request) == {"self"}
    assert takes(FixedScalingPolicy.after_controller_start) == {"self", "train_run_context"}
    assert {"num_workers", "placement_group", "resources_per_worker"} <= takes(WorkerGroup._create_workers)
    assert takes(WorkerGroup._init_train_context_on_workers) == {"self", "workers", "sync_actor", "train_context_args"}
    assert takes(WorkerGroup._get_worker_runtime_env) == {"custom_runtime_env"}
    assert {"actor", "metadata", "resources", "placement_group_bundle_index"} <= takes(Worker)
    told = {"train_run_context", "distributed_context", "synchronization_actor", "storage_context", "worker_callbacks"}
    assert told | {"controller_actor"} <= takes(RayTrainWorker.init_train_context)
