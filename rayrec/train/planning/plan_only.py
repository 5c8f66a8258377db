"""Plans without a cluster, for `rayrec plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayrec.distributed import ShardingPlan
from rayrec.distributed.planner import PlanResult, Topology, diff, explain, write_html
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.distributed.planner.sharding_groups import Grouped
from rayrec.train.config.file import text_of
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.driver.console import Display
from rayrec.train.errors import StorageError
from rayrec.train.run.folder import write_json
from rayrec.train.setup import build
from rayrec.train.setup.groups import plan_groups
from rayrec.train.setup.init_from import with_row_laws
from rayrec.train.terminal import plan_table


def make_groups(config: TrainConfig, topology: Topology, plan: ShardingPlan | None = None) -> Grouped:
    """Plan a config for a hypothetical cluster: groups, plan, estimate, and cost of synchronization.

    Args:
        plan: a plan to estimate; default: search for one.

    Raises:
        ValueError: the model cannot be built, no plan fits (`NoPlanError`), or `plan` is for another model.
    """
    # As a new run maps the ids; the run that it may start from has no part in this.
    config = with_row_laws(config.model_copy(update={"init_from": None}))
    return plan_groups(config, topology, build.model(config, "meta"), build.sharders(config), plan)


def group_words(groups: Grouped, sync_every: int) -> str:
    """The number of groups and the cost of their synchronization, as text for the console."""
    often = "every step" if sync_every == 1 else f"every {sync_every} steps"
    return (
        f"{groups.layout.replicas} groups of {groups.layout.group_size} workers, synchronized {often}: "
        f"predicted {groups.sync_s * 1e3:.2f} ms and {human_bytes(groups.sync_bytes)} per step and worker; "
        "the plan of each group:"
    )


def show_plan(
    config: TrainConfig,
    world: str | None,
    gpu: str,
    *,
    load: Path | None = None,
    against: Path | None = None,
    save: Path | None = None,
    html: Path | None = None,
) -> PlanResult:
    """Plan, and print the tables, the load of each rank, the bottleneck and possible improvements.

    Args:
        world: workers, or `HOSTSxWORKERS`; default: `trainer.num_workers`.
        gpu: device preset of the planner; "cpu" for workers without a GPU.
        load: file of a plan to estimate instead of searching for one.
        against: file of an earlier plan; prints the differences.
        save: file to write the plan to, for `sharding.plan`.
        html: file to write a drawing of the plan with its explanation to.

    Raises:
        ValueError: see `make_groups`; an unknown device, a file that is not a plan or cannot be written
            (`StorageError`).
    """
    display = Display()
    topology = Topology.from_world(world or str(max(1, config.trainer.most_workers)), gpu=gpu)
    loaded = _read_plan("--load", load)
    if loaded is not None and loaded.min_world_size > topology.world_size:
        raise ValueError(
            f"--load {load}: the plan uses {loaded.min_world_size} ranks, but the world has "
            f"{topology.world_size}; give --world {loaded.min_world_size}, or a plan for {topology.world_size}"
        )
    groups = make_groups(config, topology, loaded)
    result = groups.result
    if groups.layout.replicas > 1:
        display.say(group_words(groups, config.sharding.sync_every))
    display.console.print(plan_table(result.plan.to_dict()))
    explanation = explain(result)
    display.console.print(explanation, highlight=False, markup=False, soft_wrap=True)
    earlier = _read_plan("--diff", against)
    if earlier is not None:
        display.console.print("\n" + diff(earlier, result.plan), highlight=False, markup=False, soft_wrap=True)
    if save is not None:
        _writing("--save", save, lambda path: write_json(path, result.plan.to_dict()))
        display.say(f"plan written to {save}; use it with --set sharding.plan={save}")
    if html is not None:
        _writing("--html", html, lambda path: write_html(result, path, f"plan of {config.name}", explanation))
        display.say(f"picture written to {html}")
    return result


def _read_plan(option: str, path: Path | None) -> ShardingPlan | None:
    if path is None:
        return None
    try:
        return ShardingPlan.from_json(text_of(path))
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{option} {path}: {error}") from None


def _writing(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise StorageError(f"{option} {path}: cannot be written ({error.strerror})") from None
