"""Rectangles and columns as pure facts: cuts cover a table once, and what senders have lands where it belongs."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed import CacheParams, ParameterSharding, Shard, ShardingType, Span
from rayrec.distributed.ids.routes import PlannedTable, Routes, make_routes
from rayrec.distributed.plan.cuts import CUTS, even_widths
from rayrec.distributed.vectors.columns import ColumnMap, Run, across_hosts, columns_of, inside_host, union
from rayrec.distributed.vectors.pooled_exchange import ColumnOrder
from rayrec.modules import EmbeddingBagConfig

CPU = torch.device("cpu")
QUICK = settings(max_examples=40)
T = ShardingType


@QUICK
@given(st.integers(1, 300), st.integers(1, 9))
def test_columns_are_cut_evenly_at_wide_units(dim: int, parts: int) -> None:
    if math.ceil(dim / 4) < parts:
        with pytest.raises(ValueError, match=f"embedding_dim={dim} cannot be cut into {parts} columns of 4 or more"):
            even_widths(dim, parts)
        return
    spans = even_widths(dim, parts)
    assert [col for span in spans for col in range(span.start, span.stop)] == list(range(dim))
    sizes = [span.size for span in spans]
    assert len(spans) == parts and min(sizes) > 0
    assert max(sizes) - min(sizes) <= 7 or max(sizes) * parts <= 1.125 * dim
    assert all(span.start % 4 == 0 for span in spans)


@pytest.mark.parametrize(
    "dim, sizes",
    [
        (128, [32, 48, 48]),
        (64, [32, 32]),
        (64, [16, 24, 24]),
        (80, [20] * 4),
        (32, [8] * 4),
        (256, [80, 80, 96]),
        (10, [4, 6]),
    ],
)
def test_cuts_share_wide_units(dim: int, sizes: list[int]) -> None:
    """The engine moves vectors in the widest unit that all cuts share, with one index for each."""
    assert [span.size for span in even_widths(dim, len(sizes))] == sizes


def test_every_sharding_type_cuts_as_it_says() -> None:
    def cut(kind: ShardingType, ranks: Any, rows: int = 5, dim: int = 8) -> list[tuple[Any, ...]]:
        shards = CUTS[kind]("t", rows, dim, ranks)
        assert {shard.table for shard in shards} == {"t"}
        return [(s.rank, s.rows.start, s.rows.stop, s.cols.start, s.cols.stop) for s in shards]

    assert cut(T.TABLE_WISE, [3]) == [(3, 0, 5, 0, 8)]
    for kind in (T.ROW_WISE, T.TABLE_ROW_WISE):
        assert cut(kind, [2, 0]) == [(2, 0, 3, 0, 8), (0, 3, 5, 0, 8)]
        assert cut(kind, [2, 0], rows=1) == [(2, 0, 1, 0, 8)]
    for kind in (T.COLUMN_WISE, T.TABLE_COLUMN_WISE):
        assert cut(kind, [1, 1]) == [(1, 0, 5, 0, 4), (1, 0, 5, 4, 8)]
    assert cut(T.DATA_PARALLEL, [0, 1]) == [(0, 0, 5, 0, 8), (1, 0, 5, 0, 8)]
    assert cut(T.GRID_SHARD, [[0, 1], [2, 3]]) == [(0, 0, 3, 0, 4), (1, 3, 5, 0, 4), (2, 0, 3, 4, 8), (3, 3, 5, 4, 8)]


def test_spans_overlap_where_both_are() -> None:
    span = Span(2, 6)
    others = [Span(0, 2), Span(0, 3), Span(3, 4), Span(5, 9), Span(6, 9), Span(0, 9)]
    assert [span.overlap(other) for other in others] == [
        Span(2, 2), Span(2, 3), Span(3, 4), Span(5, 6), Span(6, 6), Span(2, 6)
    ]  # fmt: skip
    assert (span.size, str(span)) == (4, "[2, 6)")


@QUICK
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=6))
def test_a_union_has_the_same_columns_without_seams(pairs: list[tuple[int, int]]) -> None:
    spans = [Span(start, start + size) for start, size in pairs]
    found = union(spans)
    assert {c for s in found for c in range(s.start, s.stop)} == {c for s in spans for c in range(s.start, s.stop)}
    assert all(a.stop < b.start for a, b in pairwise(found))


@st.composite
def column_maps(draw: st.DrawFn) -> ColumnMap:
    """Blocks of units; each is held by one sender or by several, in runs of any order."""
    unit = draw(st.sampled_from([1, 3, 4]))
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    senders = draw(st.integers(1, 4))
    edges = [0, *accumulate(unit * width for width in widths)]
    held: list[list[tuple[int, int]]] = [[] for _ in range(senders)]
    for start, stop in pairwise(edges):
        for sender in draw(st.lists(st.integers(0, senders - 1), min_size=1, max_size=3, unique=True)):
            held[sender].append((start, stop))
    runs = []
    for spans in held:
        order = draw(st.permutations(spans))
        firsts = [0, *accumulate(stop - start for start, stop in order)]
        pairs = zip(firsts, order, strict=False)
        runs.append(tuple(Run(first, start, stop - start) for first, (start, stop) in pairs))
    return ColumnMap(tuple(b - a for a, b in pairwise(edges)), tuple(runs))


def assembled(columns: ColumnMap, sent: list[torch.Tensor]) -> torch.Tensor:
    """By hand, column after column."""
    out = torch.zeros(len(sent[0]), sum(columns.blocks), dtype=sent[0].dtype)
    for rows, runs in zip(sent, columns.runs, strict=True):
        for run in runs:
            out[:, run.dst_col : run.dst_col + run.width] += rows[:, run.src_col : run.src_col + run.width]
    return out


def order_of(columns: ColumnMap) -> ColumnOrder:
    return ColumnOrder(columns, CPU)


def drawn(columns: ColumnMap, batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    widths = [sum(run.width for run in runs) for runs in columns.runs]
    return [torch.randint(0, 50, (batch, width), generator=generator).float() for width in widths]


@QUICK
@given(column_maps(), st.integers(0, 3))
def test_columns_come_to_their_places_and_gradients_go_back(columns: ColumnMap, batch: int) -> None:
    order, width = order_of(columns), sum(columns.blocks)
    assert columns.width == width and columns.widths == [sum(run.width for run in runs) for runs in columns.runs]
    sent = drawn(columns, batch)
    factors = torch.arange(1.0, batch * len(columns.blocks) + 1).view(batch, len(columns.blocks))
    by_column = factors.repeat_interleave(torch.tensor(columns.blocks), dim=1)
    expected = assembled(columns, sent)
    for _ in range(2):  # the second time with what was remembered of this batch size
        flat = torch.cat([rows.reshape(-1) for rows in sent])
        assert torch.equal(order.assemble(flat, batch, None), expected)
        assert torch.equal(order.assemble(flat, batch, factors), expected * by_column)
    grad = torch.arange(float(batch * width)).view(batch, width)
    back = [
        torch.cat([grad[:, run.dst_col : run.dst_col + run.width] for run in runs] or [grad[:, :0]], 1).reshape(-1)
        for runs in columns.runs
    ]
    assert torch.equal(order.take_apart(grad), torch.cat(back))
    assert torch.equal(order.scaled(grad, factors), grad * by_column)


@QUICK
@given(column_maps(), st.integers(1, 3))
def test_sums_by_way_of_hosts_are_the_same(columns: ColumnMap, size: int) -> None:
    ranks = list(range(len(columns.runs)))
    hosts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    sent = drawn(columns, 2)
    of_hosts = []
    for host in hosts:
        inside = inside_host(columns, host)
        of_hosts.append(assembled(inside, [sent[rank] for rank in host]))
        held = {col for r in host for run in columns.runs[r] for col in range(run.dst_col, run.dst_col + run.width)}
        assert inside.blocks == (len(held),), "each column leaves a host once"
    across = across_hosts(columns, hosts)
    assert across.blocks == columns.blocks and across.widths == [len(rows[0]) for rows in of_hosts]
    assert torch.equal(assembled(across, of_hosts), assembled(columns, sent))


def test_columns_are_the_same_for_all_if_each_sender_has_all_in_order() -> None:
    whole, part, moved = (Run(0, 0, 8),), (Run(0, 0, 4),), (Run(0, 4, 4), Run(4, 0, 4))
    same = {(whole, whole): True, (whole, part): False, (whole, moved): False, (whole,): True}
    assert {runs: ColumnMap((8,), runs).same_for_all for runs in same} == same


def table(name: str, rows: int, dim: int, *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))


def shards(name: str, *rectangles: tuple[int, int, int, int, int]) -> tuple[Shard, ...]:
    return tuple(Shard(table=name, rows=Span(a, b), cols=Span(c, d), rank=rank) for rank, a, b, c, d in rectangles)


def routes_of(*given: tuple[EmbeddingBagConfig, tuple[Shard, ...]], world: int = 2, **settings_: Any) -> Routes:
    settings_ = {"sharding_type": "column_wise", "compute_kernel": "fused", **settings_}
    tables = [PlannedTable(config, ParameterSharding(shards=held, **settings_), None) for config, held in given]
    return make_routes(tables, world, lambda local: local.config.data_type)


def held_on(routes: Routes, rank: int) -> list[tuple[Span, Span]]:
    return [(local.rows, local.cols) for held in routes.ranks[rank].tables.values() for local in held]


def test_neighbours_on_one_rank_are_one_rectangle() -> None:
    config = table("t", 6, 12, "f")
    by_columns = routes_of((config, shards("t", (0, 0, 6, 0, 4), (0, 0, 6, 4, 8), (1, 0, 6, 8, 12))))
    assert held_on(by_columns, 0) == [(Span(0, 6), Span(0, 8))] and held_on(by_columns, 1) == [
        (Span(0, 6), Span(8, 12))
    ]
    by_rows = routes_of((config, shards("t", (1, 0, 2, 0, 12), (1, 2, 4, 0, 12), (0, 4, 6, 0, 12))))
    assert held_on(by_rows, 1) == [(Span(0, 4), Span(0, 12))] and held_on(by_rows, 0) == [(Span(4, 6), Span(0, 12))]
    square = ((0, 0, 3, 0, 4), (0, 0, 3, 4, 12), (0, 3, 6, 0, 4), (0, 3, 6, 4, 12))
    whole = routes_of((config, shards("t", *square)))
    assert held_on(whole, 0) == [(Span(0, 6), Span(0, 12))] and held_on(whole, 1) == []
    assert [variant.edges for variant in whole.variants] == [None]
    apart = routes_of((config, shards("t", (0, 0, 6, 0, 4), (1, 0, 6, 4, 8), (0, 0, 6, 8, 12))))
    assert held_on(apart, 0) == [(Span(0, 6), Span(0, 4)), (Span(0, 6), Span(8, 12))]


@pytest.mark.parametrize(
    "rectangles",
    [
        [],
        [(0, 0, 4, 0, 8)],
        [(0, 1, 6, 0, 8)],
        [(0, 0, 6, 0, 4)],
        [(0, 0, 6, 4, 8)],
        [(0, 0, 3, 0, 8), (1, 4, 6, 0, 8)],
        [(0, 0, 4, 0, 8), (1, 3, 6, 0, 8)],
        [(0, 0, 6, 0, 4), (1, 0, 6, 3, 8)],
        [(0, 0, 6, 0, 4), (1, 0, 5, 4, 8)],
        [(0, 0, 7, 0, 8)],
    ],
)
def test_rectangles_that_do_not_cover_a_table_are_refused(rectangles: Any) -> None:
    with pytest.raises(ValueError, match="table 't': its shards do not cover 6 rows × 8 columns exactly once"):
        routes_of((table("t", 6, 8, "f"), shards("t", *rectangles)))


@pytest.mark.parametrize(("rank", "fits"), [(-1, False), (0, True), (1, True), (2, False)])
def test_ranks_outside_the_world_are_refused(rank: int, fits: bool) -> None:
    config = table("t", 6, 8, "f")
    if fits:
        assert held_on(routes_of((config, shards("t", (rank, 0, 6, 0, 8)))), rank)
        return
    with pytest.raises(ValueError, match=f"the plan uses rank {rank}, but there are 2 ranks"):
        routes_of((config, shards("t", (rank, 0, 6, 0, 8))))


def test_lookups_in_one_rectangle_are_side_by_side() -> None:
    """Rank 0 has both halves of t's columns around u; the two features of a half follow each other."""
    given = [
        (table("t", 6, 12, "f", "g"), shards("t", (0, 0, 6, 0, 4), (1, 0, 6, 4, 8), (0, 0, 6, 8, 12))),
        (table("u", 5, 8, "f"), shards("u", (0, 0, 2, 0, 8), (0, 3, 5, 0, 8), (1, 2, 3, 0, 8))),
    ]
    routes = routes_of(*given)
    assert [(output.feature, output.table, output.col, output.dim) for output in routes.outputs] == [
        ("f", "t", 0, 12), ("g", "t", 12, 12), ("f", "u", 24, 8)
    ]  # fmt: skip
    assert [(variant.feature, variant.edges) for variant in routes.variants] == [
        ("f", None), ("g", None), ("f", (0, 2, 3, 5))
    ]  # fmt: skip
    route = routes.ranks[0]
    assert [(lookup.output, lookup.table, lookup.cols.start) for lookup in route.lookups] == [
        (0, 0, 0), (1, 0, 12), (0, 1, 8), (1, 1, 20), (2, 2, 24), (2, 3, 24)
    ]  # fmt: skip
    assert [(stream.variant, stream.bucket) for stream in route.streams] == [(0, 0), (1, 0), (2, 0), (2, 2)]
    assert [lookup.stream for lookup in route.lookups] == [0, 1, 0, 1, 2, 3]
    assert [(stream.variant, stream.bucket) for stream in routes.ranks[1].streams] == [(0, 0), (1, 0), (2, 1)]
    assert (routes.features, routes.num_groups) == (("f", "g"), 1)
    runs = columns_of(routes).runs
    assert runs[0] == (Run(0, 0, 4), Run(4, 12, 4), Run(8, 8, 4), Run(12, 20, 12), Run(24, 24, 8))
    assert runs[1] == (Run(0, 4, 4), Run(4, 16, 4), Run(8, 24, 8))


def test_columns_that_follow_each_other_are_one_run() -> None:
    routes = routes_of(
        (table("t", 6, 8, "f", "g"), shards("t", (0, 0, 6, 0, 8))),
        (table("u", 5, 4, "h"), shards("u", (0, 0, 5, 0, 4))),
    )
    assert columns_of(routes).runs == ((Run(0, 0, 20),), ())


def test_a_device_cache_has_the_share_that_the_plan_says() -> None:
    def shares(kernel: str, params: CacheParams | None) -> list[float | None]:
        given = (table("t", 6, 8, "f"), shards("t", (0, 0, 6, 0, 8)))
        routes = routes_of(given, compute_kernel=kernel, cache_params=params)
        return [local.load_factor for local in routes.ranks[0].tables[0]]

    assert shares("fused_uvm_caching", CacheParams(load_factor=0.5)) == [0.5]
    assert shares("fused_uvm_caching", CacheParams()) == shares("fused_uvm_caching", None) == [0.2]
    assert shares("fused", CacheParams(load_factor=0.5)) == [None]
    for wrong in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            CacheParams(load_factor=wrong)
    assert CacheParams(load_factor=1.0).load_factor == 1.0
