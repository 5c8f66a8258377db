"""Whatever the problem: a plan is exact, fits, obeys, round-trips, and depends on nothing but the problem."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import ShardingPlan
from rayrec.distributed.planner import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    PlanResult,
    Topology,
    check_plan,
    plan_tables,
)
from tests.planner.problems import SHARDER, collection, constraints, cut, table, tables, topologies

CAREFUL = settings(max_examples=20, suppress_health_check=list(HealthCheck))


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
    if result is None:  # refused: then not even all memory together, or one rank with the smallest piece, is enough
        assert_nothing_fits(listed, topology, told)
        return
    estimate = check_plan(result.plan, result.tables, topology)  # covers exactly once, ranks and kernels exist, fits
    np.testing.assert_allclose(estimate.seconds_R, result.estimate.seconds_R)
    assert list(result.plan.plan[""]) == [t.name for t in listed]
    for name, constraint in told.items():
        if constraint.sharding_types is not None:
            assert result.plan.plan[""][name].sharding_type in constraint.sharding_types
    assert result.bound_s <= result.estimate.worst_s * (1 + 1e-9)
    assert ShardingPlan.from_json(result.plan.to_json()) == result.plan


def assert_nothing_fits(listed, topology: Topology, told) -> None:
    """With much more memory there is a plan, and it takes more than ranks have: it was refused for that."""
    memory = "ddr_cap" if topology.compute_device == "cpu" else "hbm_cap"
    sizes = [host.num_ranks for host in topology.hosts]
    roomy = Topology(sum(sizes), topology.compute_device, hosts=sizes, **{memory: 1 << 45, "ddr_cap": 1 << 45})
    result = solve(listed, roomy, told)
    assert result is not None
    with pytest.raises(NoPlanError):
        check_plan(result.plan, result.tables, topology)


def every_plan(listed) -> Iterator[ShardingPlan]:
    """On two ranks: whole tables, halves by columns and by rows, and copies."""
    both = [("column_wise", ranks) for ranks in itertools.product((0, 1), repeat=2)]
    ways = [("table_wise", (0,)), ("table_wise", (1,)), *both, ("row_wise", (0, 1)), ("data_parallel", (0, 1))]
    for picked in itertools.product(ways, repeat=len(listed)):
        shardings = {
            t.name: cut(kind, ranks, t.num_embeddings, t.embedding_dim, t.name, device="cpu")
            for t, (kind, ranks) in zip(listed, picked, strict=True)
        }
        yield ShardingPlan({"": shardings})


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_below_the_bound_and_few_are_better_than_the_one_found(seed: int):
    """All 512 plans of three tables on two ranks; for two problems of three, memory decides as well."""
    rng = np.random.default_rng(seed)
    listed = [table(f"t{n}", int(10 ** rng.uniform(1, 6)), 8 * int(rng.integers(1, 9))) for n in range(3)]
    told = {
        t.name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise", "row_wise", "data_parallel"],
            pooling_factors=[float(30 ** rng.uniform())],
            min_partition=t.embedding_dim // 2,
        )
        for t in listed
    }
    weights = sum(t.num_embeddings * (t.embedding_dim * 4 + 4) for t in listed)
    memory = int((weights / 2 * (1.05, 1.3, 4)[seed % 3] + 12e6) / 0.9)
    topology = Topology(2, "cpu", ddr_cap=memory)
    result = plan_tables(listed, topology, told, batch_size=256, sharder=SHARDER)
    best = float("inf")
    for plan in every_plan(listed):
        with suppress(NoPlanError):
            best = min(best, check_plan(plan, result.tables, topology).worst_s)
    assert result.bound_s <= best <= result.estimate.worst_s * (1 + 1e-12)
    assert result.estimate.worst_s <= 1.07 * best


def test_the_bound_holds_where_a_host_with_one_rank_spares_partial_sums() -> None:
    """A table cut by rows in a host has one block on the host with one rank: no rank adds partial sums of it there."""
    topology = Topology(3, "cpu", hosts=[1, 2], ddr_cap=[1 << 29, 1 << 29])
    told = {
        "t0": ParameterConstraints(sharding_types=["table_row_wise"]),
        "t1": ParameterConstraints(pooling_factors=[6.0]),
    }
    result = plan_tables([table("t0", 130, 4), table("t1", 105, 8)], topology, told, batch_size=64, sharder=SHARDER)
    assert result.bound_s <= result.estimate.worst_s


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


@settings(max_examples=10)
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


@pytest.mark.parametrize(("count", "world"), [(60, "2x4")])
def test_drawn_problems_are_near_the_bound(count: int, world: str):
    rng = np.random.default_rng(0)
    listed = [table(f"t{n}", int(10 ** rng.uniform(2, 7.5)), int(4 * rng.integers(4, 33))) for n in range(count)]
    told = {t.name: ParameterConstraints(pooling_factors=[float(30 ** rng.uniform())]) for t in listed}
    result = plan_tables(listed, Topology.from_world(world, "h100"), told, sharder=SHARDER)
    assert result.gap <= 0.05
    assert result.estimate.lookup_ratio <= 1.10
