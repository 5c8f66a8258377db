"""Plans that were loaded, edited or compared: checked, explained, drawn, told apart."""

from __future__ import annotations

import dataclasses
import itertools
import re
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.distributed import EmbeddingCollectionSharder, ParameterSharding, Shard, ShardingPlan, Span
from rayrec.distributed.planner import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    Topology,
    check_plan,
    diff,
    explain,
    plan_tables,
    write_html,
)
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from tests.planner.problems import SHARDER, collection, cut, plan_of, table

TABLES = [table("big", 2_000_000), table("wide", 5_000, 128), table("tiny", 100, 16)]
TOPOLOGY = Topology(4, "cpu", local_world_size=2)


def result_of(told=None, topology=TOPOLOGY):
    return plan_tables(TABLES, topology, told, sharder=SHARDER)


def edited(plan: ShardingPlan, **changes: ParameterSharding | None) -> ShardingPlan:
    tables = {**plan.plan[""], **changes}
    return ShardingPlan({"": {name: p for name, p in tables.items() if p is not None}})


def sharding(kind: str, ranks: list[int], rows: int = 2_000_000, dim: int = 64, **more: Any) -> ParameterSharding:
    return cut(kind, ranks, rows, dim, **{"name": "big", **more})


GOOD = sharding("row_wise", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "plan lacks table 'big'"),
        (sharding("table_wise", [4]), "4 is not a rank of 0 .. 3"),
        (sharding("table_wise", [0], rows=1_000), "leave 127936000 of 128000000 numbers on no rank"),
        (sharding("table_wise", [0], rows=3_000_000), "is outside its 2000000 x 64"),
        (sharding("data_parallel", [0, 1]), "needs one whole copy on each of the 4 ranks"),
        (
            sharding("table_wise", [0], compute_kernel="fused_uvm"),
            "compute kernel 'fused_uvm' cannot run with table_wise on cpu",
        ),
        (dataclasses.replace(GOOD, shards=GOOD.shards + GOOD.shards[:1]), "two shards overlap"),
        (
            dataclasses.replace(GOOD, shards=(dataclasses.replace(GOOD.shards[0], cols=Span(0, 30)), *GOOD.shards[1:])),
            "leave 17000000 of 128000000 numbers on no rank",
        ),
    ],
)
def test_unsound_plans_are_refused(change, message: str):
    result = result_of()
    with pytest.raises(ValueError, match=message):
        check_plan(edited(result.plan, big=change), result.tables, TOPOLOGY)


def test_edited_plans_are_accepted_and_scored():
    result = result_of()
    estimate = check_plan(edited(result.plan, big=sharding("table_wise", [0])), result.tables, TOPOLOGY)
    assert estimate.worst_s >= result.bound_s


def test_plans_that_do_not_fit_are_refused():
    small = Topology(4, "cpu", ddr_cap=400 << 20)
    with pytest.raises(NoPlanError, match=r"rank 0 needs .* and has 400.0 MiB; move"):
        result = result_of()
        check_plan(edited(result.plan, big=sharding("table_wise", [0])), result.tables, small)


def test_explanation_names_what_binds_and_what_helps():
    told = {"wide": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[200])}
    text = explain(result_of(told))
    assert "3 tables on 4 ranks (2 x 2, cpu): worst rank" in text
    assert re.search(r"time: rank \d .*heaviest there: '", text)
    assert re.search(r"memory: tables use \d+% of the memory for tables on rank \d \(", text)
    assert "reserved: the dense part" in text
    assert re.search(r"for 'wide', which its constraints forbid, lowers the worst rank by \d+%", text)


def test_diff_shows_changed_tables_and_moved_weights():
    plan = result_of({"big": ParameterConstraints(sharding_types=["row_wise"])}).plan
    assert diff(plan, plan) == "no difference: both plans shard 3 tables in the same way"
    text = diff(plan, edited(plan, big=sharding("table_wise", [1])))
    assert re.search(r"^-  big +row_wise +fused +4  \[0, 1, 2, 3\]$", text, re.M)
    assert re.search(r"^\+  big +table_wise +fused +1  \[1\]$", text, re.M)
    assert "1 of 3 tables differ; 74.6% of all weights change their rank" in text


def test_picture_stands_alone(tmp_path):
    page = write_html(result_of(), tmp_path / "plan.html", title="a <plan>").read_text()
    assert "a &lt;plan&gt;" in page
    assert "big on rank" in page
    assert not re.search(r"(src|href)=|https?://|@import", page)
    with pytest.raises(ValueError, match="cannot be written"):
        write_html(result_of(), tmp_path / "nowhere" / "plan.html")


def test_given_plans_are_judged_against_the_bound():
    module = collection(TABLES)
    planner = EmbeddingShardingPlanner(topology=TOPOLOGY)
    own = planner.result(module, [SHARDER])
    given = edited(own.plan, big=sharding("table_wise", [0]), wide=sharding("table_wise", [0], 5_000, 128, name="wide"))
    judged = planner.judge(given, module, [SHARDER])
    assert judged.plan == given
    assert judged.bound_s == own.bound_s
    assert judged.gap > own.gap
    assert "planning again lowers the worst rank by" in explain(judged)


def test_sequences_are_planned_as_well():
    sequences = EmbeddingCollection(
        tables=[EmbeddingConfig(name="clicks", num_embeddings=1000, embedding_dim=32, feature_names=["clicks_id"])],
        device="meta",
    )
    module = nn.ModuleDict({"seq": sequences, "bag": collection(TABLES)})
    planner = EmbeddingShardingPlanner(topology=TOPOLOGY)
    result = planner.result(module, [EmbeddingCollectionSharder(), SHARDER])
    assert {t.label: t.pooled for t in result.tables}["seq.clicks"] is False
    check_plan(result.plan, result.tables, TOPOLOGY)


ranges = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


@settings(max_examples=40)
@given(st.lists(st.tuples(ranges, ranges), min_size=1, max_size=5))
def test_shards_overlap_where_they_share_a_number(rectangles: list[tuple[list[int], list[int]]]) -> None:
    drawn = [Shard(table="t", rows=Span(*rows), cols=Span(*cols), rank=0) for rows, cols in rectangles]
    numbers = [
        (r, c) for s in drawn for r in range(s.rows.start, s.rows.stop) for c in range(s.cols.start, s.cols.stop)
    ]
    result = plan_tables([table("t", 100, 8)], TOPOLOGY, sharder=SHARDER)
    plan = edited(result.plan, t=ParameterSharding(sharding_type="column_wise", compute_kernel="fused", shards=drawn))
    with pytest.raises(ValueError, match="two shards overlap" if len(set(numbers)) < len(numbers) else "leave"):
        check_plan(plan, result.tables, TOPOLOGY)


def test_a_plan_fits_into_exactly_its_bytes() -> None:
    result = plan_tables([table("t", 1000, 16)], TOPOLOGY, sharder=SHARDER)
    plan = plan_of("table_wise", [1])

    def topology(memory: int) -> Topology:
        return Topology(4, "cpu", local_world_size=2, ddr_cap=memory)

    def fits(memory: int) -> bool:
        try:
            check_plan(plan, result.tables, topology(memory))
        except NoPlanError:
            return False
        return True

    least = bisect_left(range(1 << 30), True, key=fits)
    need_R = check_plan(plan, result.tables, topology(least)).device_bytes_R
    assert least - 1 < need_R[1] <= least and need_R[1] > need_R[0]
    with pytest.raises(NoPlanError, match=r"rank 1 needs .* under this plan and has .*; move \d B of its shards"):
        check_plan(plan, result.tables, topology(least - 1))


def test_many_ranks_are_told_by_the_first_and_the_last() -> None:
    eight, nine = (plan_of("row_wise", range(2, 2 + count), rows=90, dim=8) for count in (8, 9))
    text = diff(eight, nine)
    assert "[2, 3, 4, 5, 6, 7, 8, 9]" in text and "[2 .. 10] (9)" in text
    # rows [0, 12), [12, 24) … became [0, 10), [10, 20) …: rank 2 + k keeps what both have
    kept = sum(
        max(0, min(a[1], b[1]) - max(a[0], b[0]))
        for a, b in zip(itertools.pairwise([*range(0, 90, 12), 90]), itertools.pairwise(range(0, 91, 10)), strict=False)
    )
    assert f"1 of 1 tables differ; {(90 - kept) / 90:.1%} of all weights" in text
    assert diff(nine, nine) == "no difference: both plans shard 1 tables in the same way"
    gone = diff(nine, ShardingPlan({"": {}}))
    assert "1 of 0 tables differ; 0.0% of all" in gone
