"""The job of a worker, and its session: rank, device, process groups, and the sink of records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from rayrec._runtime.cgroup_limits import cpus
from rayrec.checkpoint.ownership import Launch
from rayrec.data import Cursor, Manifest, Mix
from rayrec.data.order.periods import Periods
from rayrec.data.source.partitions import Value
from rayrec.data.stream.shared_manifest import SharedManifest
from rayrec.distributed.comm import Group
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.planner.machine.calibration import Calibration
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.log import Mailbox, Record
from rayrec.train.setup.build import Factory
from rayrec.train.setup.init_from import WarmStart
from rayrec.train.setup.init_vectors import TableVectors
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.machine import Machine, ranks_by_host

TEST = " test"  # cannot be the name of a set in a config


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of every worker, which the driver sends.

    Args:
        config: config of the run.
        train: files and rows of an epoch.
        eval: files and rows of the evaluation; None: no evaluation.
        folder: run folder, the same path on every node.
        checkpoints: path or URI of the folder of checkpoints.
        launch: launch that owns the checkpoints, for a job that saves checkpoints.
        factory: builds the model, if the user passed it in Python instead of in the config.
        evaluated_steps: steps with an evaluation of all rows that an earlier launch has recorded.
        mapping: rule that maps ids to rows, by feature; checkpoints of another mapping are refused.
        warm_start: initial weights of a run without a checkpoint.
        vectors: initial rows of tables of a run without a checkpoint.
        popular: for a `Retriever`, compare evaluations with a ranking by the popularity of items in `train`.
        task: train to the end, or only score a checkpoint on the evaluation rows.
        checkpoint: name of the checkpoint to load; None: the newest undamaged one.
        calibration: measured speeds for the planner.
        sets: data sets of `data.eval_sets` by name, and `data.test` as `TEST`.
        periods: each epoch trains on one period and is evaluated on the next, before training on it.
        period_rows: rows of each period, before filters.
    """

    config: TrainConfig
    train: Manifest | SharedManifest | Mix
    eval: Manifest | SharedManifest | None
    folder: Path
    checkpoints: str
    launch: Launch | None = None
    factory: Factory | None = None
    evaluated_steps: frozenset[int] = frozenset()
    mapping: dict[str, dict[str, Any]] = field(default_factory=dict)
    warm_start: WarmStart | None = None
    vectors: tuple[TableVectors, ...] = ()
    task: Literal["fit", "evaluate"] = "fit"
    checkpoint: str | None = None
    popular: bool = False
    calibration: Calibration | None = None
    periods: Periods | None = None
    sets: dict[str, Manifest] = field(default_factory=dict)
    period_rows: dict[Value, int] = field(default_factory=dict)

    def epoch_rows(self, cursor: Cursor) -> int:
        """Rows of the cursor's epoch, before filters."""
        return self.train.rows if cursor.only is None else self.period_rows[cursor.only[1]]

    def window(self, cursor: Cursor) -> dict[str, str]:
        """The period of a cursor for records; empty without periods."""
        return {} if self.periods is None or cursor.only is None else {"window": self.periods.shown(cursor.only[1])}

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank of a running worker group.

    Args:
        device: device of the model.
        group: process group of the model's collectives (NCCL on GPUs); None for a single rank.
        control: small exchanges on the CPU.
        sink: sends records to the driver.
        machines: host of every rank.
        evaluated: outcomes of background evaluations that rank 0 has received.
    """

    device: torch.device
    group: Group
    control: Control
    sink: Mailbox
    machines: tuple[Machine, ...]
    evaluated: deque[Record] = field(default_factory=deque)

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def world_size(self) -> int:
        return self.control.world_size

    @property
    def neighbours(self) -> list[int]:
        """The ranks on this rank's host, including this rank."""
        (host_ranks,) = (ranks for ranks in ranks_by_host(self.machines) if self.rank in ranks)
        return host_ranks

    @property
    def env(self) -> ShardingEnv:
        """The sharding environment. `local_world_size` counts the ranks on this rank's host; it may differ by rank."""
        return ShardingEnv(self.world_size, self.rank, self.group, local_world_size=len(self.neighbours))


def session_of(
    device: torch.device, group: Group, control: Control, sink: Mailbox, machine: Machine | None = None
) -> Session:
    """The session of a rank. A collective of the control group.

    Args:
        machine: host of the rank; default: the host of this process.
    """
    machines = control.gather(machine or Machine.here(device))
    return Session(device=device, group=group, control=control, sink=sink, machines=tuple(machines))


def session_alone(sink: Mailbox, stop_requested: Callable[[], bool] = lambda: False) -> Session:
    """A session with a single rank, on the CPU of this process."""
    control = Control(0, 1, None, stop_requested=stop_requested)
    return session_of(torch.device("cpu"), None, control, sink)


def session_on_ray(
    sink: Mailbox, timeout_s: float, stop_requested: Callable[[], bool], evaluated: deque[Record]
) -> Session:
    """The session of a Ray Train worker. Uses Ray's process group for the model; control exchanges fail after
    `timeout_s`."""
    import ray
    import ray.train.torch

    device = ray.train.torch.get_device()
    group = dist.group.WORLD
    assert group is not None
    # A separate group: a control exchange must never wait for a GPU, nor match a collective of the model.
    control_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    control = Control(group.rank(), group.size(), control_group, stop_requested, lambda: bool(evaluated))
    machine = Machine.here(device, ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
    return replace(session_of(device, group, control, sink, machine), evaluated=evaluated)


def set_threads(config: TrainConfig, workers_here: int) -> None:
    """Set torch's threads: each worker on the machine gets an equal share of the CPUs in the container's quota."""
    threads = config.trainer.threads_per_worker
    torch.set_num_threads(threads if not isinstance(threads, str) else max(1, int(cpus()) // max(1, workers_here)))
