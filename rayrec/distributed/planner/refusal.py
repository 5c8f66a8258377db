"""Why there is no plan: the table or the sum that does not fit, bytes needed and there, and what would fit."""

from __future__ import annotations

from rayrec.distributed.planner.packing import Stuck
from rayrec.distributed.planner.problem import Problem
from rayrec.distributed.planner.types import NoPlanError


def refuse(problem: Problem, stuck: Stuck, dense: int) -> NoPlanError:
    """The error for a problem that the search could not solve."""
    table = problem.tables[stuck.table]
    least = min((option.piece_bytes for option in problem.options[stuck.table]), default=float("inf"))
    total = sum(min((o.device_bytes for o in each), default=float("inf")) for each in problem.options)
    return NoPlanError(
        f"no plan: table {table.label!r} needs {human_bytes(least)} on one rank, where "
        f"{human_bytes(float(problem.room_R.max()))} are there; all tables need {human_bytes(total)} of "
        f"{human_bytes(float(problem.room_R.sum()))} on {problem.world_size} ranks"
    )


def human_bytes(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps it at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
