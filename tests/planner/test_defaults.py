"""What users get by default: every public default of the planner, and that it works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.machine.devices import device
from rayrec.distributed.planner.planner import solve
from rayrec.distributed.planner.report.check import check_plan
from tests.planner.problems import SHARDER, table

PLANNED = plan_tables([table("t")], Topology(1, "cpu"), sharder=SHARDER)


@pytest.mark.parametrize(
    ("kind", "make", "defaults"),
    [
        (Topology, lambda: Topology(2), {"compute_device": "cuda"}),
        (EmbeddingShardingPlanner, EmbeddingShardingPlanner, {}),
        (
            plan_tables,
            lambda: plan_tables([table("t")], Topology(1, "cpu"), sharder=SHARDER),
            {"batch_size": 512, "dense_bytes": 0, "weighted": False, "path": ""},
        ),
        (solve, lambda: solve(PLANNED.tables, PLANNED.topology), {"dense_bytes": 0}),
        (check_plan, lambda: check_plan(PLANNED.plan, PLANNED.tables, PLANNED.topology), {"dense_bytes": 0}),
        (ParameterConstraints, ParameterConstraints, {}),
        (Cost, lambda: Cost().total, dict.fromkeys(Cost._fields, 0.0)),
        (ShardBytes, lambda: ShardBytes().device, dict.fromkeys(ShardBytes._fields, 0.0)),
    ],
)
def test_defaults_of(kind: Any, make: Callable[[], Any], defaults: dict[str, Any]) -> None:
    """Those that are not None."""
    make()
    given = inspect.signature(kind).parameters.values()
    told = {p.name: p.default for p in given if p.default not in (None, p.empty) and p.name != "additional_params"}
    assert told == defaults


def test_a_gpu_is_an_a100_if_nothing_is_said() -> None:
    assert Topology(2).device == device("a100_40") and Topology(2).local_world_size == 2
    assert [(h.memory_bytes, h.host_bytes) for h in Topology(2).hosts] == [(40 << 30, 192 << 30)]
    assert EmbeddingShardingPlanner()._batch_size == 512
