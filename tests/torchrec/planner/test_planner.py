"""TorchRec's planner: settings, proposals, errors."""

from __future__ import annotations

from typing import Any

import pytest

from rayrec.distributed import ShardingPlan
from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.torchrec.distributed.planner.bases import PerfModel, Stats
from rayrec.torchrec.distributed.planner.parts import PlannerError, PlannerErrorType, Proposal
from rayrec.torchrec.distributed.planner.proposers import GridSearchProposer, Proposer, UniformProposer
from rayrec.torchrec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from tests.planner.problems import SHARDER, collection, table
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("output_dtype", "=True is not supported: vectors are float32; cast the output of the collection"),
        ("key_value_params", "=True is not supported: tables on disk are not supported; use fused_uvm_caching"),
        ("use_virtual_table", " is not supported; use a dynamic table"),
    ],
)
def test_constraints_that_are_not_offered_are_refused_by_name(name: str, instead: str):
    with pytest.raises(ValueError, match=f"ParameterConstraints: {name}{instead}"):
        ParameterConstraints(**{name: True})


class Told(Stats):
    """What the planner said."""

    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        self.told = more


class AllAlike(PerfModel):
    def rate(self, plan: Proposal) -> float:
        return 1.0


def test_proposals_are_counted_and_of_equal_plans_the_first_one_stays():
    told = {
        "t": ParameterConstraints(sharding_types=["table_wise", "row_wise", "data_parallel"]),
        "u": ParameterConstraints(sharding_types=["table_wise"]),
    }

    def planned_by(proposer: Proposer, **memory: int) -> tuple[str, Told]:
        planner = EmbeddingShardingPlanner(
            topology=Topology(2, "cpu", **memory),
            constraints=told,
            proposer=proposer,
            performance_model=AllAlike(),
            stats=(stats := Told()),
        )
        plan = planner.plan(collection([table("t", 1 << 20), table("u")]), [SHARDER])
        return plan.plan[""]["t"].sharding_type, stats

    first, stats = planned_by(UniformProposer())
    assert first == "table_wise"  # the only kind that both may have
    assert (stats.told["num_proposals"], stats.told["num_plans"]) == (1, 1)
    first, stats = planned_by(GridSearchProposer())
    assert (stats.told["num_proposals"], stats.told["num_plans"]) == (3, 3)
    proposed = []

    class Noted(GridSearchProposer):
        def feedback(self, partitionable: bool, *more: Any, **named: Any) -> None:
            proposed.append((partitionable, [option.sharding_type for option in self.propose() or []]))
            super().feedback(partitionable, *more, **named)

    again, _ = planned_by(Noted())
    assert again == first == proposed[0][1][0]
    with pytest.raises(PlannerError, match="none of 3 proposals for 2 ranks fits"):
        planned_by(GridSearchProposer(), ddr_cap=1 << 20)


def test_no_plan_is_a_planner_error():
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=1 << 20))
    with pytest.raises(PlannerError, match=r"table 't'.* needs at least") as caught:
        planner.plan(collection([table("t", 1 << 20)]), [SHARDER])
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_reserved_memory_stays_free():
    """Two tables of 256 MiB fit on one rank; with 1 GiB reserved of 1.5 GiB only one does."""
    told = {name: ParameterConstraints(sharding_types=["table_wise"], device_group=[0]) for name in "tu"}
    model = collection([table(name, 1 << 20) for name in told])
    topology = Topology(2, "cpu", ddr_cap=3 << 29)
    assert EmbeddingShardingPlanner(topology, constraints=told).plan(model, [SHARDER]).plan[""]["u"].ranks == [0]
    with pytest.raises(PlannerError, match="no plan"):
        reserved = FixedAbsoluteStorageReservation(1 << 30)
        EmbeddingShardingPlanner(topology, constraints=told, storage_reservation=reserved).plan(model, [SHARDER])


def _collective(group, ddr_cap):
    told = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=ddr_cap), constraints=told)
    try:
        return planner.collective_plan(collection([table("t", 1 << 20)]), None, group).to_json()
    except PlannerError as error:
        return error.error_type


def test_collective_plan_is_one_plan_or_one_error_on_all_ranks():
    ranks = Ranks(2)
    try:
        good, bad = ranks.run(_collective, 1 << 32), ranks.run(_collective, 1 << 20)
    finally:
        ranks.close()
    assert good[0] == good[1] and '"row_wise"' in good[0]
    assert bad == [PlannerErrorType.INSUFFICIENT_STORAGE] * 2
