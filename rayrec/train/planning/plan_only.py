"""A plan without a cluster: what `rayrec plan` shows."""

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
from rayrec.train.driver.terminal import plan_table
from rayrec.train.errors import StorageError
from rayrec.train.planning.groups import plan_groups
from rayrec.train.run.folder import write_json
from rayrec.train.setup import build


def make_groups(config: TrainConfig, topology: Topology, given: ShardingPlan | None = None) -> Grouped:
    """The plan for a config on machines that need not be there: how many sharding groups there are, the plan of each
    with its estimate, and what synchronising them costs.

    Args:
        given: a plan to judge; by default one is searched for.

    Raises:
        ValueError: the model cannot be built, nothing fits (`NoPlanError`), or the given plan is not for this model.
    """
    return plan_groups(config, topology, build.model(config, "meta"), build.sharders(config), given)


def group_words(groups: Grouped, sync_every: int) -> str:
    """How many groups there are, and what keeping them alike costs."""
    often = "every step" if sync_every == 1 else f"every {sync_every} steps"
    return (
        f"{groups.layout.replicas} groups of {groups.layout.group_size} workers, alike after {often}: "
        f"{groups.sync_s * 1e3:.2f} ms and {human_bytes(groups.sync_bytes)} a step and worker, as predicted; "
        "the plan of each:"
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
    """Plan, show tables, each rank's load, what binds and what would help; write the plan or a picture of it.

    Args:
        world: workers, or `HOSTSxWORKERS`; default `trainer.num_workers`.
        gpu: a device that the planner knows; "cpu" for workers without one.
        load: a plan to judge instead of searching for one.
        against: an earlier plan, whose differences are shown.
        save: takes the plan, for `sharding.plan`; html: takes a picture of it with its explanation.

    Raises:
        ValueError: as `make_groups`; an unknown device; a file that is no plan, or cannot be written (`StorageError`).
    """
    display = Display()
    topology = Topology.from_world(world or str(max(1, config.trainer.most_workers)), gpu=gpu)
    given = _read_plan("--load", load)
    if given is not None and given.min_world_size > topology.world_size:
        raise ValueError(
            f"--load {load}: the plan uses {given.min_world_size} ranks, but the world has "
            f"{topology.world_size}; give --world {given.min_world_size}, or a plan for {topology.world_size}"
        )
    groups = make_groups(config, topology, given)
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
