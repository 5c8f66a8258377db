"""Whatever the problem: a plan is exact, fits, obeys, round-trips, and depends on nothing but the problem."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed.planner import EmbeddingShardingPlanner, NoPlanError, PlanResult, check_plan, plan_tables
from rayrec.distributed.types import ShardingPlan
from tests.planner.problems import SHARDER, collection, constraints, tables, topologies

CAREFUL = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def problems(draw: st.DrawFn):
    listed = draw(tables())
    return listed, draw(topologies()), draw(constraints([t.name for t in listed]))


def solve(listed, topology, told) -> PlanResult | None:
    try:
        return plan_tables(listed, topology, told, batch_size=64, sharder=SHARDER)
    except NoPlanError:
        return None


@CAREFUL
@given(problems())
def test_every_plan_is_sound(problem):
    listed, topology, told = problem
    result = solve(listed, topology, told)
    if result is None:
        return
    estimate = check_plan(result.plan, result.tables, topology)  # covers exactly once, ranks and kernels exist, fits
    np.testing.assert_allclose(estimate.seconds_R, result.estimate.seconds_R)
    assert list(result.plan.plan[""]) == [t.name for t in listed]
    for name, constraint in told.items():
        if constraint.sharding_types is not None:
            assert result.plan.plan[""][name].sharding_type in constraint.sharding_types
    assert result.bound_s <= result.estimate.worst_s * (1 + 1e-9)
    assert ShardingPlan.from_json(result.plan.to_json()) == result.plan


@CAREFUL
@given(problems(), st.randoms(use_true_random=False))
def test_order_of_tables_does_not_matter(problem, rng: random.Random):
    listed, topology, told = problem
    shuffled = list(listed)
    rng.shuffle(shuffled)
    first, second = solve(listed, topology, told), solve(shuffled, topology, told)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert first.plan == second.plan
        assert first.bound_s == pytest.approx(second.bound_s, rel=1e-12)


@settings(max_examples=10, deadline=None)
@given(problems())
def test_planning_mutates_nothing(problem):
    listed, topology, told = problem
    module = collection(listed)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=told, batch_size=64)
    before = copy.deepcopy((listed, topology, told, [str(p.shape) for p in module.parameters()]))
    try:
        first = planner.plan(module, [SHARDER])
        assert planner.plan(module, [SHARDER]) == first
    except NoPlanError:
        pass
    assert before == (listed, topology, told, [str(p.shape) for p in module.parameters()])


@pytest.mark.parametrize(("count", "world"), [(60, "2x4"), (100, "2x8")])
def test_drawn_problems_are_near_the_bound(count: int, world: str):
    from rayrec.distributed.planner import ParameterConstraints, Topology
    from tests.planner.problems import table

    rng = np.random.default_rng(0)
    listed = [table(f"t{n}", int(10 ** rng.uniform(2, 7.5)), int(4 * rng.integers(4, 33))) for n in range(count)]
    told = {t.name: ParameterConstraints(pooling_factors=[float(30 ** rng.uniform())]) for t in listed}
    result = plan_tables(listed, Topology.from_world(world, "h100"), told, sharder=SHARDER)
    assert result.gap <= 0.05
    assert result.estimate.lookup_ratio <= 1.10
