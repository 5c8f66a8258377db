"""Small parts of the planner by themselves, each held against the plainest way to say it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import ParameterSharding, ShardingPlan, ShardingType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.planner import NoPlanError, PlanResult, Topology, diff, plan_tables
from rayrec.distributed.planner.cost.estimate import evaluate
from rayrec.distributed.planner.cost.seconds import shard_cost
from rayrec.distributed.planner.machine.calibration import CALIBRATION_VERSION, Calibration
from rayrec.distributed.planner.report.check import _check_memory, _overlap
from rayrec.distributed.planner.report.host_traffic import exchange_text
from rayrec.distributed.planner.report.text import bar, columns, human_bytes, human_seconds
from rayrec.distributed.planner.search.problem import make_problem
from rayrec.distributed.planner.search.solve import _stop_at
from rayrec.distributed.planner.sharding_groups import group_topology, grouped
from rayrec.distributed.planner.tables.table import Table
from rayrec.distributed.replicas.layout import GroupLayout
from tests.planner.problems import SHARDER, table

plain = settings(deadline=None, max_examples=40)


rectangles = st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=6)


@plain
@given(rectangles)
def test_rectangles_overlap_where_they_share_a_number(drawn: Any) -> None:
    edges = [(min(a, b), max(a, b), min(c, d), max(c, d), 0) for a, b, c, d in drawn]
    held = [{(r, c) for r in range(a, b) for c in range(x, y)} for a, b, x, y, _ in edges]
    pairs = [(i, j) for i in range(len(held)) for j in range(i + 1, len(held)) if held[i] & held[j]]
    assert _overlap(np.array(edges).reshape(-1, 5)) == (pairs[0] if pairs else None)


def test_bytes_seconds_and_bars_in_words() -> None:
    sizes = [0, 1023, 1024, 1024**2 - 1, 1024**2, 1.5 * 1024**3, 3 * 1024**4, 2048 * 1024**4, -2048]
    assert [human_bytes(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1024.0 KiB", "1.0 MiB", "1.5 GiB", "3.0 TiB", "2048.0 TiB", "-2.0 KiB"
    ]  # fmt: skip
    assert [human_seconds(s) for s in (2, 1, 0.9994, 1e-3, 9.9e-4, 0.0)] == [
        "2.00 s", "1.00 s", "999 ms", "1 ms", "990 us", "0 us"
    ]  # fmt: skip
    assert [bar(share, 4) for share in (0, 1 / 32, 0.5, 31 / 32, 1, 2, -1)] == [
        "    ", "▏   ", "██  ", "███▉", "████", "████", "    "
    ]  # fmt: skip
    assert [bar(0.5, 4, light) for light in (0.25, 0.5, 0.9)] == ["██░ ", "██░░", "██░░"]
    assert len(bar(1.0)) == 20 and bar(0.3, 4) == "█▎  "
    assert columns(("a", "bb"), [("xyz", "1"), ("", "22")], frozenset({1})) == "a    bb\n---  --\nxyz   1\n     22"


def plan_of(kind: str, rows: int, dim: int, ranks: Any, name: str = "t") -> ShardingPlan:
    shards = CUTS[ShardingType(kind)](name, rows, dim, ranks)
    return ShardingPlan({"": {name: ParameterSharding(sharding_type=kind, compute_kernel="fused", shards=shards)}})


def test_many_ranks_are_told_by_the_first_and_the_last() -> None:
    eight, nine = (plan_of("row_wise", 90, 8, list(range(2, 2 + count))) for count in (8, 9))
    text = diff(eight, nine)
    assert "[2, 3, 4, 5, 6, 7, 8, 9]" in text and "[2 .. 10] (9)" in text
    # rows [0, 12), [12, 24) … became [0, 10), [10, 20) …: rank 2 + k keeps what both have
    kept = sum(
        max(0, min(a[1], b[1]) - max(a[0], b[0]))
        for a, b in zip(pairwise([*range(0, 90, 12), 90]), pairwise(range(0, 91, 10)), strict=False)
    )
    assert f"1 of 1 tables differ; {(90 - kept) / 90:.1%} of all weights" in text
    assert diff(nine, nine) == "no difference: both plans shard 1 tables in the same way"
    gone = diff(nine, ShardingPlan({"": {}}))
    assert "1 of 0 tables differ; 0.0% of all" in gone


def test_a_calibration_is_figures_or_refused(tmp_path: Path) -> None:
    good = {"version": CALIBRATION_VERSION, "compute_device": "cpu", "measured": {"memory_bw": 1e9}}
    path = tmp_path / "c.json"

    def read(**changes: Any) -> Calibration:
        path.write_text(json.dumps({**good, **changes}))
        return Calibration.read(path)

    found = read()
    assert (found.kind, found.speeds, found.path) == ("cpu", {"memory_bw": 1e9}, str(path))
    assert Topology(2, "cpu").with_calibration(found).device.memory_bw == 1e9
    for changes, message in [
        ({"version": 1}, f"calibration version 1; this rayrec reads {CALIBRATION_VERSION}"),
        ({"measured": {"speed": 1.0}}, r"unknown figures \['speed'\]"),
        ({"measured": {"kind": 1.0}}, r"unknown figures \['kind'\]"),
        ({"measured": {"memory_bytes": 1.0, "host_bytes": 2}}, r"unknown figures \['host_bytes', 'memory_bytes'\]"),
        ({"measured": {"memory_bw": 0}}, "memory_bw=0 must be positive"),
        ({"measured": {"memory_bw": True}}, "memory_bw=True must be positive"),
        ({"measured": {"memory_bw": "1"}}, "memory_bw=1 must be positive"),
        ({"measured": None}, "not a calibration file"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(**changes)
    with pytest.raises(ValueError, match="measured on cpu, but the ranks have cuda"):
        Topology(2, "cuda").with_calibration(found)


def facts(rows: int = 1000, dim: int = 16, ids: float = 64.0, world: int = 4, **changes: Any) -> Table:
    """A table as the planner knows it, found through a plan of it."""
    result = plan_tables([table("t", rows, dim)], Topology(world, "cpu"), batch_size=int(ids) // world, sharder=SHARDER)
    return replace(result.tables[0], **changes)


def test_a_plan_fits_into_exactly_its_bytes() -> None:
    estimate = evaluate(plan_of("table_wise", 1000, 16, [1]), [facts()], Topology(4, "cpu"))
    need = int(estimate.device_bytes_R.max())
    assert need == estimate.device_bytes_R[1] > 0
    _check_memory(estimate, Topology(4, "cpu", ddr_cap=need))
    with pytest.raises(NoPlanError, match=r"rank 1 needs .* under this plan and has .*; move 1 B of its shards"):
        _check_memory(estimate, Topology(4, "cpu", ddr_cap=need - 1))
    for rank in (4, -1):
        with pytest.raises(ValueError, match=r"the topology has ranks 0 \.\. 3"):
            evaluate(plan_of("table_wise", 1000, 16, [rank]), [facts()], Topology(4, "cpu"))


def test_how_vectors_cross_hosts_is_said() -> None:
    two = Topology(4, "cpu", local_world_size=2)
    plan = plan_of("row_wise", 1000, 16, [0, 1, 2, 3])
    for topology, words in [
        (Topology(4, "cpu"), "they share a host"),
        (Topology(4, "cpu", local_world_size=1), "each host has one"),
        (Topology(4, "cpu", hosts=[1, 3]), r"unequal numbers of them (1, 3), so none"),
    ]:
        assert words in exchange_text(plan, topology)
    assert exchange_text(plan, two).endswith("where that saves enough: t")
    none = "no host holds several row blocks"
    assert none in exchange_text(plan_of("table_wise", 1000, 16, [0]), two)
    assert none in exchange_text(plan_of("row_wise", 1000, 16, [0, 2]), two)
    assert none in exchange_text(plan_of("data_parallel", 1000, 16, [0, 1, 2, 3]), two)
    assert none in exchange_text(plan_of("row_wise", 1, 16, [0, 1, 2, 3]), two)  # the other blocks are empty
    many = {name: plan_of("row_wise", 1000, 16, [0, 1], name).plan[""][name] for name in "abcd"}
    assert exchange_text(ShardingPlan({"": many}), two).endswith("enough: a, b, c and 1 more")
    three = {name: many[name] for name in "abc"}
    assert exchange_text(ShardingPlan({"": three}), two).endswith("enough: a, b, c")


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("hosts", [[4], [2, 2]])
def test_seconds_of_synchronisation_by_hand(every: int, hosts: list[int]) -> None:
    """Two groups of two ranks; figures of the device that tell each term by its size."""
    topology = Topology(4, "cpu", hosts=hosts)
    speeds = {"inter_host_bw": 10.0, "intra_host_bw": 100.0, "sort_s": 7.0, "replica_bw": 3.0, "memory_bw": 5.0}
    topology = topology.with_device(replace(topology.device, collective_s=1000.0, begin_s=500.0, **speeds))
    layout = GroupLayout(4, 2)
    own = group_topology(topology, layout)
    result = plan_tables([table("t", 1000, 16)], own, batch_size=16, sharder=SHARDER)
    result = replace(result, plan=plan_of("row_wise", 1000, 16, [0, 1]))
    one = result.tables[0]
    found = grouped(result, layout, topology, every)

    def touched(ids: float) -> float:
        return 500 * (1 - math.exp(-ids / 500))

    n, link = touched(every * one.ids / 2), 100.0 if len(hosts) == 1 else 10.0
    if every == 1:
        moved, work = n * (8 + 64), 2 * n * (7.0 + 64 / 3.0)
    else:
        numbers = touched(2 * every * one.ids / 2) * (64 + one.state_row_bytes + 16 * one.state_element_bytes)
        moved, work = n * 8 + numbers, 2 * n * 7.0 + 2 * numbers / 5.0
    assert found.sync_bytes == pytest.approx(moved / every)
    assert found.sync_s == pytest.approx((moved / link + work) / every + 3000 / every)
    assert found.step_s == result.estimate.worst_s + found.sync_s
    replicated = grouped(replace(result, plan=plan_of("data_parallel", 1000, 16, [0, 1])), layout, topology, every)
    rows = 1000 * (1 - math.exp(-one.ids / 1000))
    assert replicated.sync_bytes == pytest.approx(rows * (8 + 64))


def test_more_care_is_taken_up_to_two_hundred_tables() -> None:
    topology = Topology(4, "cuda")
    problem = make_problem([facts()], topology, np.zeros(4), off_device=True)
    found = [_stop_at(replace(problem, tables=problem.tables * count), 1.0) for count in (200, 201)]
    assert found == [(1.0005, 1.002), (1.005, 1.02)]


def test_tables_off_the_device_are_looked_at_where_memory_costs_much() -> None:
    """The bound that is told holds for them too."""
    listed = [table(f"t{n}", 400_000, 64) for n in range(4)]

    def planned(memory: int) -> tuple[set[str], PlanResult]:
        topology = Topology(2, "cuda", hbm_cap=memory, ddr_cap=8 << 30)
        result = plan_tables(listed, topology, batch_size=512, sharder=SHARDER)
        return {of.compute_kernel for module in result.plan.plan.values() for of in module.values()}, result

    (kernels, ample), (kernels_short, short) = planned(32 << 30), planned(1 << 27)
    assert kernels == {"fused"} and 0 < ample.bound_s <= ample.estimate.worst_s
    assert kernels_short != {"fused"} and ample.bound_s <= short.bound_s <= short.estimate.worst_s


def test_a_dense_replica_updates_what_all_ranks_touched() -> None:
    """Rows meet and are added up as for a fused one; then the gradient is as large as the table."""
    topology = Topology(4, "cpu", hosts=[2, 2])
    one, device = facts(), topology.device
    fused, dense = (shard_cost(one, "data_parallel", kernel, (1000, 16), 2, topology) for kernel in ("fused", "dense"))
    met = 4 * 1000 * (1 - math.exp(-one.ids / 4 / 1000))
    added = met * device.id_s + 1000 * 16 * one.element_bytes * 8 / device.memory_bw
    assert dense.backward == pytest.approx(fused.backward + added)
    assert (dense.lookup, dense.gradient_inter, dense.host) == (fused.lookup, fused.gradient_inter, fused.host)
