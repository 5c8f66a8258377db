"""Checks whether the workers and readers of a run fit on Ray's resources. Makes no calls to Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayrec.train.config.trainer import ResourcesConfig, TrainerConfig
from rayrec.train.driver.placement import fits_labels, room_for
from rayrec.train.errors import ResourceError

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig

MIN_WORKER_CPUS = 0.25
MIN_READER_CPUS = 0.25
ACCELERATOR = "accelerator_type:"  # prefix of the resource with which Ray marks nodes that have an accelerator
MARK = 0.001  # of that resource, by which a worker selects such nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """CPUs and GPUs of Ray: all of them, or the free ones."""

    cpus: float
    gpus: float

    def covers(self, need: Demand) -> bool:
        tolerance = 1e-6
        return self.cpus + tolerance >= need.cpus and self.gpus + tolerance >= need.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster.

    Args:
        resources: its Ray resources.
        free: the resources that no task or actor has reserved.
        labels: its Ray labels.
        address: its IP address.
    """

    id: str
    resources: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Resources that a run reserves; for an elastic run, with its minimum number of workers.

    Args:
        selection: which nodes may run the workers, and how workers are placed on them.
    """

    num_workers: int
    cpus_per_worker: float
    use_gpu: bool
    reader_cpus: float
    selection: ResourcesConfig = field(default_factory=ResourcesConfig)

    @property
    def per_worker(self) -> dict[str, float]:
        """Ray resources of one worker."""
        memory, accelerator = self.selection.memory, self.selection.accelerator_type
        return {
            "CPU": self.cpus_per_worker,
            **({"GPU": 1.0} if self.use_gpu else {}),
            **({"memory": float(memory)} if memory is not None else {}),
            **({f"{ACCELERATOR}{accelerator}": MARK} if accelerator is not None else {}),
        }

    @property
    def worker(self) -> str:
        """What one worker needs, as text."""
        return ", ".join(
            [
                "1 GPU" if self.use_gpu else f"{self.cpus_per_worker:g} CPU",
                *([f"{self.selection.memory / 1e9:g} GB of memory"] if self.selection.memory is not None else []),
                *([f"accelerator {self.selection.accelerator_type}"] if self.selection.accelerator_type else []),
                *(f"label {key}={value}" for key, value in self.selection.label_selector.items()),
            ]
        )

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


def capacity(need: Demand, nodes: Sequence[Node], limit: int | None = None) -> int:
    """Number of workers that fit on suitable nodes if nothing else runs there, at most `limit` (default: all)."""
    limit = need.num_workers if limit is None else limit
    suitable = [node.resources for node in nodes if fits_labels(need.selection.label_selector, node.labels)]
    return room_for(need.per_worker, suitable, limit, need.selection.placement_strategy)


def missing_resources(need: Demand, nodes: Sequence[Node], *, readers: bool = False) -> str | None:
    """The resources that a cluster lacks for the workers, as text; None if they fit.

    Args:
        readers: count the CPUs for reading too.
    """
    request = f"{need.num_workers} workers need {need.worker} each"
    fits = capacity(need, nodes)
    if fits < need.num_workers:
        return f"{request}; the cluster has {len(nodes)} node{'' if len(nodes) == 1 else 's'} with room for {fits}"
    suitable = [node.free for node in nodes if fits_labels(need.selection.label_selector, node.labels)]
    free = room_for(need.per_worker, suitable, need.num_workers, need.selection.placement_strategy)
    cpus, gpus = (sum(node.free.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
    if free < need.num_workers or (readers and cpus + 1e-6 < need.cpus):
        reading = f", and reading {need.reader_cpus:g} CPUs" if readers and need.reader_cpus else ""
        return f"{request}{reading}; {cpus:g} CPUs and {gpus:g} GPUs of the cluster are free, with room for {free}"
    return None


def demand_of(config: TrainConfig, total: Supply) -> Demand:
    """The resources that a run reserves on a cluster with `total` resources, including CPUs for Ray tasks that read."""
    trainer, read = config.trainer, config.data.read
    workers, reads_on_ray = trainer.least_workers, read.reader != "local" and not trainer.elastic
    return Demand(
        num_workers=workers,
        cpus_per_worker=_worker_cpus(trainer, total),
        use_gpu=trainer.use_gpu if isinstance(trainer.use_gpu, bool) else workers > 0 and total.gpus >= 1,
        reader_cpus=max(MIN_READER_CPUS, read.cpus_per_read) if reads_on_ray else 0.0,
        selection=trainer.resources,
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
