"""Starts a local Ray and the workers of a run while the command still loads the config and the trainer and checks data.

Ray's start and the workers' imports take longer than all of that. The workers wait for their job in a file, which
`run_job.py` writes. Few modules are imported here, so that Ray starts soon.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rayrec._runtime.imports import quick_imports
from rayrec._runtime.threads import run_in_thread
from rayrec.storage.folder import open_folder
from rayrec.storage.parallel import actor_here
from rayrec.train.driver.cluster import Cluster, connected, default_env, health_env
from rayrec.train.driver.resources import MIN_READER_CPUS, Demand, demand_of, one_worker_per_gpu
from rayrec.train.run.log import Mailbox

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig

JOB = "job"  # file in which the workers find it

_early: EarlyWorkers | None = None


class EarlyWorkers:
    """Workers on a local Ray that wait for the job of a run.

    Args:
        config: config of the run, as its file gives it.
        need: resources of its workers.
    """

    def __init__(self, config: TrainConfig, need: Demand) -> None:
        self._config, self.need = config, need
        self.folder = Path(tempfile.mkdtemp(prefix="rayrec-workers-"))
        self.mailbox = actor_here(Mailbox)
        self._end: Future[Any] = run_in_thread(self._fit, "rayrec-early-workers")

    def _fit(self) -> None:
        from rayrec.train.driver.ray_trainer import ray_trainer

        ray_trainer(self._config, self.mailbox, self.need, self.folder, self.folder / JOB, local=True).fit()

    def fit(self, job: bytes) -> None:
        """Give the workers their job, and wait for its end.

        Args:
            job: pickled `Job`; empty: the workers end.
        """
        open_folder(str(self.folder)).write(JOB, job)
        self._end.result()


@contextmanager
def started_for(
    load: Callable[[], TrainConfig], prepare: Callable[[], object], *, at_once: bool = False
) -> Iterator[TrainConfig]:
    """Start a local Ray and the workers if the run needs them, while a thread loads what the run needs.

    Args:
        load: returns the config of the run.
        prepare: called after it, for example to import the trainer.
        at_once: the config certainly needs workers, so that Ray may start before it is loaded.

    Returns:
        A context manager with the config.
    """
    global _early
    elastic = False
    if not at_once or not _starts_ray():
        config = load()
        if not config.trainer.num_workers or not _starts_ray():
            yield config
            return
        load, elastic = partial(_same, config), config.trainer.elastic
    loaded: Future[TrainConfig] = Future()

    def load_all() -> None:
        # In one thread: a module that two threads import at the same time may be seen half-made.
        with quick_imports():
            try:
                config = load()
                import rayrec.train.driver.ray_trainer  # noqa: F401
            except BaseException as error:
                loaded.set_exception(error)
                raise
            loaded.set_result(config)
            prepare()

    prepared = run_in_thread(load_all, "rayrec-imports")
    with connected(elastic) as cluster:
        config = loaded.result()
        with default_env(health_env(config.trainer)):
            early = _early = _early_workers(config, cluster)
            try:
                prepared.result()
                yield config
            finally:
                _early = None
                if early is not None:
                    shutil.rmtree(early.folder, ignore_errors=True)


def _early_workers(config: TrainConfig, cluster: Cluster) -> EarlyWorkers | None:
    """The workers of a run; None if it has none or they do not fit, or for an elastic run.

    Also None if they would take all CPUs: the driver may read the files of the run in Ray tasks before it has a job for
    them.
    """
    total = cluster.total()
    config = one_worker_per_gpu(config, total)
    need = demand_of(config, total)
    with_reads = replace(need, reader_cpus=max(need.reader_cpus, MIN_READER_CPUS))
    if not need.num_workers or config.trainer.elastic or not total.covers(with_reads):
        return None
    return EarlyWorkers(config, need)


def _same(config: TrainConfig) -> TrainConfig:
    return config


def _starts_ray() -> bool:
    """Whether a run with workers starts a local Ray."""
    return not os.environ.get("RAY_ADDRESS") and not ray.is_initialized()


def needs_workers(config: Path, overrides: Sequence[str]) -> bool:
    """Whether a config file asks for workers, by a look at the file alone, which needs no imports; False if that is
    not certain."""
    import yaml

    try:
        raw = yaml.safe_load(config.read_text(encoding="utf-8"))
        workers = raw.get("trainer", {}).get("num_workers", 2)
    except Exception:  # reported when the config is loaded
        return False
    names = {name.strip() for override in overrides for name in override.partition("=")[:1]}
    return type(workers) is int and workers > 0 and not names & {"trainer", "trainer.num_workers"}


def take_early(need: Demand) -> EarlyWorkers | None:
    """The workers that `started_for` has started, if they have these resources; else None."""
    global _early
    early, _early = _early, None
    if early is not None and early.need != need:
        early.fit(b"")
        return None
    return early
