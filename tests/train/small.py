"""A small data set with a planted signal, and a config for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from rich.console import Console

from rayrec.checkpoint.tools import verify
from rayrec.data import Manifest, manifest_of
from rayrec.train import Display, RunFolder, TrainConfig, parse_config
from rayrec.train.config.file import apply_override
from rayrec.train.driver.recorder import Recorder
from rayrec.train.run.log import Mailbox, Record, Waiting
from rayrec.train.worker.learner import Learner, make_learner
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.loop import fit, score_checkpoint
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.session import session_of as session_on
from tests.device import DEVICE, ON_GPU

USERS, ITEMS, TAGS = 40, 60, 7


def table(rows: int, seed: int = 0) -> pa.Table:
    """Users who like some items, with lists of tags (often empty) and one number."""
    random = np.random.default_rng(seed)
    user, item = random.integers(0, USERS, rows), random.integers(0, ITEMS, rows)
    tags = [random.integers(0, TAGS, random.integers(0, 4)).tolist() for _ in range(rows)]
    age = random.normal(size=rows).astype(np.float32)
    taste = np.sin(user * 1.7) + np.cos(item * 2.3) + 0.3 * age
    label = (taste + random.normal(scale=0.5, size=rows) > 0).astype(np.int64)
    columns = {"user": user, "item": item, "tags": tags, "age": age, "label": label, "row": np.arange(rows)}
    liked = label * (random.random(rows) < 0.6)
    asked = random.random(rows) < 0.8  # who was not asked has no answer
    columns |= {"like": pa.array(liked, mask=~asked), "weight": random.integers(0, 4, rows) / 2}
    columns |= {"at": 1_700_000_000 + random.integers(0, 3 * 86_400, rows), "city": [f"city {i % 9}" for i in user]}
    return pa.table(columns)


def write(folder: Path, rows: int, files: int = 2, seed: int = 0, row_group: int = 64) -> Path:
    """The data set as Parquet files of several row groups; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = table(rows, seed)
    edges = [rows * i // files for i in range(files + 1)]
    for i, (start, stop) in enumerate(pairwise(edges)):
        pq.write_table(whole.slice(start, stop - start), folder / f"part-{i}.parquet", row_group_size=row_group)
    return folder


def flat(metrics: dict[str, Any]) -> dict[str, Any]:
    """An evaluation with the points of its reliability diagrams by name, for `pytest.approx`."""
    points = {
        f"reliability {number} {name}": value
        for number, band in enumerate(metrics["reliability"])
        for name, value in band.items()
        if value is not None  # the label of a run with one label
    }
    return {name: value for name, value in metrics.items() if name != "reliability"} | points


RAW: dict[str, Any] = {
    "name": "small",
    "data": {"train": "train", "eval": "eval", "read": {"reader": "local"}},
    "schema": {
        "label": {"column": "label"},
        "dense": [{"name": "age"}],
        "sparse": [
            {"name": "user", "mapping": {"kind": "identity"}},
            {"name": "item", "mapping": {"kind": "hash", "seed": 0}},
            {"name": "tags", "kind": "id_list", "mapping": {"kind": "identity"}},
        ],
    },
    "tables": [
        {"name": "user", "rows": USERS, "dim": 8, "features": ["user"]},
        {"name": "item", "rows": 80, "dim": 8, "features": ["item"]},
        {"name": "tag", "rows": TAGS, "dim": 8, "pooling": "mean", "features": ["tags"]},
    ],
    "model": {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 1]}},
    "optimizers": {"dense": {"kind": "adam", "lr": 0.01}, "sparse": {"kind": "rowwise_adagrad", "lr": 0.1}},
    "trainer": {
        "num_workers": 0,
        "batch_size": 64,
        "epochs": 2,
        "log_every": 4,
        "checkpoint_every": 6,
        "threads_per_worker": 1,
    },
    "storage": {"path": "runs"},
}


def raw_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """The config of a data set that `write_all` wrote; `trainer__epochs=3` changes `trainer.epochs`."""
    raw = copy.deepcopy(RAW)
    for part in ("train", "eval"):
        raw["data"][part] = str(folder / part)
    raw["storage"]["path"] = str(folder / "runs")
    return _change(raw, changes)


def _change(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        *path, last = name.split("__")
        node = raw
        for key in path:
            node = node[key]
        node[last] = value
    return raw


def config_of(*overrides: str, **changes: Any) -> TrainConfig:
    """A config without data: `RAW` with changes as of `raw_config`, then with overrides as of `rayrec train --set`."""
    raw = _change(copy.deepcopy(RAW), changes)
    for override in overrides:
        raw = apply_override(raw, override)
    return parse_config(raw)


class Silent:
    """A sink that keeps what a worker says."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def begin(self, leader: bool) -> bool:
        return False

    def put(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def flush(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def failed_ranks(self) -> int:
        return 0

    def stop_requested(self) -> bool:
        return False

    def restart_reason(self) -> str | None:
        return None

    def report_waiting(self, rank: int, place: Waiting | None) -> None:
        pass

    def waiting_ranks(self) -> dict[int, Waiting]:
        return {}


class Heard(Mailbox):
    """A mailbox that hands each record to `hear` at once."""

    def __init__(self, hear: Callable[[Record], object]) -> None:
        super().__init__()
        self._hear = hear

    def put(self, record: Record) -> None:
        super().put(record)
        for taken in self.take():
            self._hear(taken)


def control_of(group: dist.ProcessGroup | None = None, stop_requested: Callable[[], bool] = lambda: False) -> Control:
    """The exchanges of a rank of the test pool; by default those of a rank that is alone."""
    if group is None:
        return Control(0, 1, None, stop_requested=stop_requested)
    return Control(group.rank(), group.size(), group, stop_requested=stop_requested)


def rank_session(
    group: dist.ProcessGroup | None = None, sink: Any = None, stop_requested: Callable[[], bool] = lambda: False
) -> Session:
    """The session of a rank of the test pool; by default that of a rank that is alone, whose records are dropped."""
    device = DEVICE if ON_GPU else torch.device("cpu")
    return session_on(device, group, control_of(group, stop_requested), sink or Silent())


def make_job(raw: dict[str, Any]) -> Job:
    config = parse_config(raw)
    train, evaluation = (
        manifest_of(config.data.train, config.training_schema),
        None if config.data.eval is None else Manifest.of(config.data.eval, config.data_schema),
    )
    folder = RunFolder.at(config.storage.path, config.name)
    return Job(config=config, train=train, eval=evaluation, folder=folder.path, checkpoints=folder.checkpoints)


def fit_in(session: Session, job: Job) -> dict[str, Any]:
    """The outcome of a job in a session, without Ray."""
    return fit(job, session)


def fit_job(
    job: Job,
    group: dist.ProcessGroup | None = None,
    sink: Any = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The outcome of a job on one rank, without Ray."""
    return fit_in(rank_session(group, sink, stop_requested), job)


def score_job(job: Job, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The evaluation of the job's newest checkpoint on one rank, without Ray."""
    return score_checkpoint(job, rank_session(group))


def learner_of(job: Job, session: Session | None = None) -> Learner:
    """The model of a job with its optimizers, by default of a rank that is alone."""
    return make_learner(job, session or rank_session())


def recorder_of(folder: Path, display: Display | None = None, *options: Any) -> Recorder:
    """What a driver keeps of records in the run folder, and shows."""
    return Recorder(run_folder(folder), display or Display(Console(quiet=True)), *options)


def run_folder(folder: Path) -> RunFolder:
    """The files of a run."""
    return RunFolder(folder)


def whole_checkpoints(run: str | Path) -> list[str]:
    """Places of all checkpoints of a run, of which none is damaged."""
    places = dict(verify(str(run)))
    assert not any(places.values()), places
    return list(places)


def fit_on_rank(group: dist.ProcessGroup, raw: dict[str, Any]) -> dict[str, Any]:
    """A whole run on one rank of the test pool, without Ray."""
    return fit_job(make_job(raw), group)


def write_all(folder: Path, rows: int = 1000) -> Path:
    """Training and evaluation rows below one folder."""
    write(folder / "train", rows, files=3)
    write(folder / "eval", 301, files=2, seed=1)
    return folder
