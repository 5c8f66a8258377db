"""Compares cluster sizes for a config without a cluster: memory fit, embedding time per step, bottleneck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from rayrec.distributed.planner import NoPlanError, Topology
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.driver.console import Display
from rayrec.train.planning.plan_only import make_groups
from rayrec.train.setup import build
from rayrec.train.terminal import plain, table

# Printed phase → terms of the planner's cost.
PARTS = {
    "lookup": ("lookup",),
    "inside hosts": ("input_intra", "output_intra", "gradient_intra"),
    "between hosts": ("input_inter", "output_inter", "gradient_inter"),
    "update": ("backward", "host"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The planner's prediction for one cluster.

    Args:
        world: `HOSTSxRANKS`.
        batch_size: rows per step, over all ranks.
        replicas: number of sharding groups, see `sharding.replicas`.
        problem: why no plan fits, with the missing bytes; None if one fits.
        step_s: predicted seconds of the embedding part of a step on the slowest rank, without the dense part.
        parts_s: seconds of that rank by phase.
        binds: the longest phase.
        memory_bytes: bytes used on the fullest rank, including reserved memory.
        memory_there: bytes of memory that this rank has.
    """

    world: str
    ranks: int
    batch_size: int
    replicas: int = 1
    problem: str | None = None
    step_s: float | None = None
    parts_s: dict[str, float] | None = None
    binds: str | None = None
    memory_bytes: float | None = None
    memory_there: int | None = None

    @property
    def samples_per_s(self) -> float | None:
        return None if self.step_s is None else self.batch_size / self.step_s

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"samples_per_s": self.samples_per_s}


def compare(
    config: TrainConfig, worlds: Sequence[str], gpu: str, scaling: Literal["strong", "weak"] = "strong"
) -> list[Shape]:
    """Predict memory and time of a config on each cluster.

    Args:
        worlds: `HOSTSxRANKS` each.
        gpu: device preset of the planner.
        scaling: "strong" keeps the global batch size; "weak" keeps the batch size per worker.

    Raises:
        ValueError: a malformed world, an unknown device, or a model that cannot be built.
    """
    calibration = build.calibration(config)
    per_worker = config.trainer.batch_size / max(1, config.trainer.most_workers)
    shapes = []
    for world in worlds:
        topology = Topology.from_world(world, gpu=gpu)
        if calibration is not None and calibration.kind == topology.compute_device:
            topology = topology.with_calibration(calibration)
        batch = config.trainer.batch_size if scaling == "strong" else round(per_worker * topology.world_size)
        shapes.append(_shape(config, world, topology, max(batch, topology.world_size)))
    return shapes


def _shape(config: TrainConfig, world: str, topology: Topology, batch: int) -> Shape:
    trainer = config.trainer.model_copy(update={"batch_size": batch})
    try:
        groups = make_groups(config.model_copy(update={"trainer": trainer}), topology)
    except NoPlanError as error:
        return Shape(world=world, ranks=topology.world_size, batch_size=batch, problem=str(error))
    result, estimate = groups.result, groups.result.estimate
    slowest, fullest = int(estimate.seconds_R.argmax()), int(estimate.device_bytes_R.argmax())
    cost = Cost(*estimate.cost_RT[slowest].tolist())
    seconds = {phase: sum(getattr(cost, term) for term in terms) for phase, terms in PARTS.items()}
    seconds["routing and starting"] = estimate.fixed_s
    if groups.layout.replicas > 1:
        seconds["between groups"] = groups.sync_s
    return Shape(
        world=world,
        ranks=groups.layout.world_size,
        replicas=groups.layout.replicas,
        batch_size=batch,
        step_s=groups.step_s,
        parts_s=seconds,
        binds=max(seconds, key=lambda phase: seconds[phase]),
        memory_bytes=float(estimate.device_bytes_R[fullest]),
        memory_there=result.topology.host_of(fullest).memory_bytes,
    )


def shapes_table(shapes: Sequence[Shape], gpu: str) -> Table:
    """One row per cluster."""
    title = f"the embedding part of a step, {gpu}, as planned"
    listing = table("world", "rows a step>", "step>", "rows/s>", "fullest rank>", "binds", title=title)
    for shape in shapes:
        if shape.step_s is None or shape.memory_bytes is None or shape.memory_there is None:
            reason = (shape.problem or "").splitlines()[0]
            listing.add_row(shape.world, f"{shape.batch_size:,}", "–", "–", "–", plain(f"does not fit: {reason}"))
            continue
        memory = f"{human_bytes(shape.memory_bytes)} of {human_bytes(shape.memory_there)}"
        speed = f"{shape.batch_size / shape.step_s:,.0f}"
        listing.add_row(
            shape.world, f"{shape.batch_size:,}", f"{shape.step_s * 1e3:.2f} ms", speed, memory, str(shape.binds)
        )
    return listing


def show_shapes(config: TrainConfig, worlds: Sequence[str], gpu: str) -> list[Shape]:
    """Compare clusters and print a table; prints the details if no plan fits. Raises as `compare` does."""
    display = Display()
    shapes = compare(config, worlds, gpu)
    display.console.print(shapes_table(shapes, gpu))
    for shape in shapes:
        if shape.problem is not None:
            display.say(f"{shape.world}: {shape.problem}")
    return shapes
