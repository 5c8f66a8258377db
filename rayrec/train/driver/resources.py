"""Checks whether the workers and readers of a run fit on Ray's resources. Makes no calls to Ray."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import TrainerConfig
from rayrec.train.errors import ResourceError

MIN_WORKER_CPUS = 0.25
MIN_READER_CPUS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """CPUs and GPUs of Ray: all of them, or the free ones."""

    cpus: float
    gpus: float

    def covers(self, need: Demand) -> bool:
        tolerance = 1e-6
        return self.cpus + tolerance >= need.cpus and self.gpus + tolerance >= need.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Resources that a run reserves; for an elastic run, with its minimum number of workers."""

    num_workers: int
    cpus_per_worker: float
    use_gpu: bool
    reader_cpus: float

    @property
    def per_worker(self) -> dict[str, float]:
        """Ray resources of one worker."""
        return {"CPU": self.cpus_per_worker, **({"GPU": 1.0} if self.use_gpu else {})}

    @property
    def cpus(self) -> float:
        return self.num_workers * self.cpus_per_worker + self.reader_cpus

    @property
    def gpus(self) -> int:
        return self.num_workers if self.use_gpu else 0

    def times_in(self, supply: Supply) -> int:
        """How many such runs fit on `supply` at a time; at least 1."""
        counts = [supply.cpus / self.cpus] if self.cpus else []
        counts += [supply.gpus / self.gpus] if self.gpus else []
        return max(1, int(min(counts, default=1.0) + 1e-6))


def demand_of(config: TrainConfig, total: Supply) -> Demand:
    """The resources that a run reserves on a cluster with `total` resources, including CPUs for Ray tasks that read."""
    trainer, read = config.trainer, config.data.read
    workers, reads_on_ray = trainer.least_workers, read.reader != "local" and not trainer.elastic
    return Demand(
        num_workers=workers,
        cpus_per_worker=_worker_cpus(trainer, total),
        use_gpu=trainer.use_gpu if isinstance(trainer.use_gpu, bool) else workers > 0 and total.gpus >= 1,
        reader_cpus=max(MIN_READER_CPUS, read.cpus_per_read) if reads_on_ray else 0.0,
    )


def one_worker_per_gpu(config: TrainConfig, total: Supply) -> TrainConfig:
    """The config with one worker per GPU of this machine, if it requests more workers. Unchanged if a plan or sharding
    groups depend on the number of workers."""
    trainer, sharding, gpus = config.trainer, config.sharding, int(total.gpus)
    is_fixed = trainer.elastic or sharding.plan is not None or sharding.replicas not in (1, "auto")
    if trainer.use_gpu != "auto" or is_fixed or not 0 < gpus < trainer.least_workers:
        return config
    return config.model_copy(update={"trainer": trainer.model_copy(update={"num_workers": gpus})})


def _worker_cpus(trainer: TrainerConfig, total: Supply) -> float:
    if not isinstance(trainer.cpus_per_worker, str):
        return trainer.cpus_per_worker
    share = total.cpus / 2 / max(1, trainer.least_workers)
    quarters = int(share / MIN_WORKER_CPUS) * MIN_WORKER_CPUS
    return max(MIN_WORKER_CPUS, min(1.0, quarters))


def refuse_if_short(need: Demand, supply: Supply, subject: str) -> None:
    """Check that a run fits on the available resources; Ray itself would wait without a limit.

    Args:
        subject: subject and verb of the sentence about the supply: "the Ray cluster has".

    Raises:
        ResourceError: names the CPUs or GPUs requested and available, and the settings that change it.
    """
    if supply.covers(need):
        return
    if need.gpus > supply.gpus:
        fewer = f"lower trainer.num_workers to {int(supply.gpus)}, or " if supply.gpus >= 1 else ""
        raise ResourceError(
            f"trainer.num_workers={need.num_workers} with use_gpu needs {need.gpus} GPUs (one per worker), but "
            f"{subject} {supply.gpus:g}; {fewer}set trainer.use_gpu=false"
        )
    fits = int((supply.cpus - need.reader_cpus) / need.cpus_per_worker)
    fewer = f"lower trainer.num_workers to {fits}, or " if fits >= 1 else ""
    share = max(0.0, (supply.cpus - need.reader_cpus) / need.num_workers)
    smaller = f"lower trainer.cpus_per_worker to at most {share:.2g}, or " if share >= 0.01 else ""
    readers = f" and {need.reader_cpus:g} for reading" if need.reader_cpus else ""
    raise ResourceError(
        f"the run needs {need.cpus:g} CPUs ({need.num_workers} workers × {need.cpus_per_worker:g}{readers}), but "
        f"{subject} {supply.cpus:g}; {fewer}{smaller}use a larger cluster"
    )
