"""Ray Train's trainer of a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig

from rayrec._runtime.debug import debugging
from rayrec._runtime.ray_internals import torch_trainer
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.driver.early_ray import WORKER_ENV
from rayrec.train.driver.elastic import NEVER_S
from rayrec.train.driver.failures import RestartLimit, failure_reporter
from rayrec.train.driver.placement import FailedNodes
from rayrec.train.driver.resources import Demand
from rayrec.train.worker.start import start_worker


def ray_trainer(
    config: TrainConfig, mailbox: Any, need: Demand, folder: Path, job: bytes, abandoned: threading.Event | None
) -> Any:
    """A `TorchTrainer` that starts the workers of a run, and restarts them after failures.

    Args:
        config: of the run.
        mailbox: actor handle of its mailbox.
        need: resources of its workers.
        folder: for Ray Train's state.
        job: pickled `Job`.
        abandoned: see `torch_trainer`.
    """
    trainer = config.trainer
    # Ray's stubs type these as the classes of Ray Train v1.
    failure_config: Any = ray.train.FailureConfig
    scaling_config: Any = ray.train.ScalingConfig
    run_config: Any = ray.train.RunConfig
    placement = FailedNodes(
        mailbox, need.per_worker, need.selection.label_selector, need.selection.placement_strategy, need.num_workers
    )
    return torch_trainer(
        RestartLimit(mailbox),
        abandoned=abandoned,
        selector=placement.selector,
        skipped=placement.skipped if trainer.elastic else None,
        train_loop_per_worker=start_worker,
        train_loop_config={"job": job, "log": mailbox},
        torch_config=TorchConfig(backend="nccl" if need.use_gpu else "gloo", timeout_s=trainer.collective_timeout_s),
        scaling_config=scaling_config(
            num_workers=(trainer.least_workers, trainer.most_workers) if trainer.elastic else trainer.least_workers,
            use_gpu=need.use_gpu,
            resources_per_worker=need.per_worker,
            accelerator_type=need.selection.accelerator_type,
            label_selector=dict(need.selection.label_selector) or None,
            placement_strategy=need.selection.placement_strategy,
            # Ray resizes in the middle of a step; `elastic.py` does it at a checkpoint.
            elastic_resize_monitor_interval_s=NEVER_S,
        ),
        run_config=run_config(
            name=config.name,
            storage_path=str(folder),
            worker_runtime_env={"env_vars": WORKER_ENV},
            logging_config=ray.train.LoggingConfig("CRITICAL" if abandoned is not None and not debugging() else "INFO"),
            # Ray counts failures over the whole run, including waits for resources. Instead, `failure_reporter` counts
            # failures without progress, `RestartLimit` counts failed starts, and `room.py` limits waits.
            failure_config=failure_config(max_failures=-1, controller_failure_limit=-1),
            callbacks=[failure_reporter(mailbox, trainer.max_failures)],
        ),
    )
