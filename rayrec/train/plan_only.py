"""A plan without a cluster: what `rayrec plan` shows."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from rayrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from rayrec.distributed.planner import EmbeddingShardingPlanner, PlanResult, Topology
from rayrec.train import build
from rayrec.train.config import TrainConfig
from rayrec.train.console import Display, bytes_text, plan_table
from rayrec.train.control import dealt
from rayrec.train.errors import StorageError
from rayrec.train.run_folder import write_json


def make_plan(config: TrainConfig, topology: Topology, factory: build.Factory | None = None) -> PlanResult:
    """The plan for a config on machines that need not be there.

    Raises:
        ValueError: the model cannot be built, or nothing fits (`NoPlanError`).
    """
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=build.constraints(config),
        batch_size=dealt(config.trainer.batch_size, 0, topology.world_size),
    )
    sharder = EmbeddingBagCollectionSharder(fused_params=build.fused_params(config))
    return planner.result(build.model(config, "meta", factory), [sharder])


def show_plan(
    config: TrainConfig, world: str | None, gpu: str, save: Path | None = None, display: Display | None = None
) -> PlanResult:
    """Plan, show tables and the load of each rank, and write the plan to a file that `sharding.plan` takes.

    Args:
        world: workers, or `HOSTSxWORKERS`; default `trainer.num_workers`.
        gpu: a device that the planner knows; "cpu" for workers without one.

    Raises:
        ValueError: as `make_plan`; an unknown device; a file that cannot be written (`StorageError`).
    """
    display = display or Display()
    topology = Topology.from_world(world or str(max(1, config.trainer.num_workers)), gpu=gpu)
    result = make_plan(config, topology)
    display.console.print(plan_table(result.plan.to_dict()))
    display.console.print(_load_table(result))
    worst = result.estimate.worst_rank
    display.say(f"slowest: rank {worst}; at most {max(0.0, result.gap):.1%} above the lower bound of any plan")
    if save is not None:
        try:
            write_json(save, result.plan.to_dict())
        except OSError as error:
            raise StorageError(f"--save {save}: cannot be written ({error.strerror})") from None
        display.say(f"plan written to {save}; use it with --set sharding.plan={save}")
    return result


def _load_table(result: PlanResult) -> Table:
    estimate = result.estimate
    table = Table(title="estimated load of a step", title_justify="left")
    for head in ("rank", "time", "device memory", "of", "host memory"):
        table.add_column(head, justify="right")
    room = [host.memory_bytes for host in result.topology.hosts for _ in host.ranks]
    for rank in range(result.topology.world_size):
        table.add_row(
            str(rank),
            f"{estimate.seconds_R[rank] * 1e3:.2f} ms",
            bytes_text(float(estimate.device_bytes_R[rank])),
            bytes_text(float(room[rank])),
            bytes_text(float(estimate.host_bytes_R[rank])),
        )
    return table
