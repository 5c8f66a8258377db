"""Every row exactly once, whatever the windows, ranks and stops: the pure part of it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.errors import DataError
from rayrec.data.order.cursor import Cursor, RankCursor, open_rank
from rayrec.data.order.epoch import EpochOrder, Interval, count, deal, deal_steps, row_order, steps_of, subtract, union
from rayrec.data.order.epoch import dealt as dealt_rows

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=8)
windows = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def positions(spans: list[Interval] | tuple[Interval, ...]) -> list[int]:
    return [i for start, stop in spans for i in range(start, stop)]


@settings(max_examples=200, deadline=None)
@given(intervals, intervals)
def test_union_and_subtract_are_set_operations(some: list[Interval], others: list[Interval]) -> None:
    merged = union(some)
    assert positions(merged) == sorted(set(positions(some)))
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    rest = subtract(others, merged)
    assert positions(rest) == [i for i in positions(others) if i not in set(positions(some))]


@settings(max_examples=150, deadline=None)
@given(windows, intervals, st.integers(1, 9))
def test_deal_gives_all_that_is_left_evenly(sizes: list[int], done: list[Interval], world_size: int) -> None:
    order = EpochOrder.of(sizes, seed=3, epoch=0, shuffle=True)
    before = union((min(a, order.rows), min(b, order.rows)) for a, b in done)
    dealt = deal(order, before, world_size)
    everything = [i for part in dealt for i in positions(part)] + positions(before)
    assert sorted(everything) == list(range(order.rows))
    assert max(map(count, dealt)) - min(map(count, dealt)) <= 1
    for start, stop in (piece for part in dealt for piece in part):
        assert order.place(start) == order.place(stop - 1), "a piece lies in one window"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_an_epoch_has_every_window_once_and_runs_in_their_order(
    runs: list[tuple[int, int]], interleave: int, passes: int, world_size: int
) -> None:
    """Runs (of windows in one row group) are read by one rank, from their start; of several the rows are mixed."""
    sizes = [rows for length, rows in runs for _ in range(length)]
    lengths = [length for length, _ in runs]
    how = {"seed": 1, "epoch": 2, "shuffle": True, "passes": passes, "interleave": interleave}
    order = EpochOrder.of(sizes, runs=lengths, **how)
    assert sorted(order.windows.tolist()) == list(range(passes * len(sizes)))
    assert order.rows == passes * sum(sizes)
    run_of = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = [order.place(int(start)) for start in order.starts[:-1]]
    assert [window for place in places for window in place.windows] == order.windows.tolist()
    groups: dict[int, list[list[int]]] = {}
    for place in places:
        assert place.stop - place.start == sum(sizes[window % len(sizes)] for window in place.windows)
        groups.setdefault(place.group, []).append([run_of[window % len(sizes)] for window in place.windows])
    for blocks in groups.values():
        assert len(blocks[0]) <= interleave and all(set(block) <= set(blocks[0]) for block in blocks)
    for run, length in enumerate(lengths):
        mine = [window for window in order.windows.tolist() if run_of[window % len(sizes)] == run]
        assert len(mine) == passes * length
        for number in range(passes):
            part = mine[number * length : (number + 1) * length]
            assert part == sorted(part)
    dealt = deal(order, (), world_size)
    assert sorted(i for part in dealt for i in positions(part)) == list(range(order.rows))
    assert max(map(count, dealt)) - min(map(count, dealt)) <= 1


@settings(max_examples=100, deadline=None)
@given(windows, intervals, st.integers(1, 5), st.integers(1, 40))
def test_steps_go_along_the_sequence(sizes: list[int], done: list[Interval], world_size: int, batch_rows: int) -> None:
    order = EpochOrder.of(sizes, seed=0, epoch=0, shuffle=False)
    before = union((min(a, order.rows), min(b, order.rows)) for a, b in done)
    left = [i for i in range(order.rows) if i not in set(positions(before))]
    ranks = [positions(deal_steps(order, before, rank, world_size, batch_rows)) for rank in range(world_size)]
    for first, size in steps_of(len(left), batch_rows):
        step = []
        for rank, mine in enumerate(ranks):
            rows = dealt_rows(size, rank, world_size)
            step += mine[:rows]
            del mine[:rows]
        assert step == left[first : first + size]
    assert not any(ranks)


def test_deal_cuts_only_the_windows_that_fit_nowhere() -> None:
    order = EpochOrder.of([100] * 50, seed=0, epoch=0, shuffle=True)
    pieces = [piece for part in deal(order, (), 4) for piece in part]
    assert sum(stop - start == 100 for start, stop in pieces) == 48
    assert [len(part) for part in deal(EpochOrder.of([1000], seed=0, epoch=0, shuffle=True), (), 8)] == [1] * 8


@settings(max_examples=150, deadline=None)
@given(windows, st.lists(st.tuples(st.integers(1, 6), st.floats(0, 1)), max_size=6), st.randoms())
def test_exactly_once_under_any_stops_and_resizes(sizes: list[int], runs: list[tuple[int, float]], random) -> None:
    order = EpochOrder.of(sizes, seed=5, epoch=2, shuffle=True)
    cursor, consumed = Cursor.start(2), []
    for world_size, part in [*runs, (3, 1.0)]:
        after = []
        for rank in range(world_size):
            start = open_rank(cursor, order, "data", rank, world_size)
            share = part if part == 1.0 else part * random.random()
            rows = round(count(start.pieces) * share)
            consumed += positions(start.pieces)[:rows]
            after.append(RankCursor(start.base, start.pieces, rows))
        cursor = Cursor.from_dict(json.loads(json.dumps(Cursor.merge(after).to_dict())))
    assert sorted(consumed) == list(range(order.rows))
    assert cursor.rows_done == order.rows


@settings(max_examples=60, deadline=None)
@given(windows, st.integers(1, 5), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_as_many_ranks_go_on_exactly_where_each_was(sizes: list[int], world_size: int, stops: list[float]) -> None:
    order = EpochOrder.of(sizes, seed=5, epoch=0, shuffle=True)
    starts = [open_rank(Cursor.start(0), order, "data", rank, world_size) for rank in range(world_size)]
    rows = [round(count(s.pieces) * part) for s, part in zip(starts, stops, strict=False)]
    cursor = Cursor.merge(RankCursor(s.base, s.pieces, n) for s, n in zip(starts, rows, strict=True))
    for rank in range(world_size):
        rest = open_rank(Cursor.from_dict(cursor.to_dict()), order, "data", rank, world_size)
        assert positions(rest.pieces) == positions(starts[rank].pieces)[rows[rank] :]


def test_orders_differ_by_epoch_and_seed_and_are_permutations() -> None:
    def windows_of(seed: int, epoch: int) -> list[int]:
        return EpochOrder.of([1] * 30, seed=seed, epoch=epoch, shuffle=True).windows.tolist()

    assert sorted(windows_of(0, 0)) == list(range(30))
    assert windows_of(0, 0) == windows_of(0, 0) != windows_of(0, 1) != windows_of(1, 0)
    rows = row_order(4, 1000, seed=0, epoch=0)
    assert sorted(rows.tolist()) == list(range(1000))
    assert rows.tolist() != row_order(5, 1000, seed=0, epoch=0).tolist()
    assert EpochOrder.of([2, 3], seed=0, epoch=0, shuffle=False).windows.tolist() == [0, 1]


def test_the_order_never_changes() -> None:
    """A checkpoint's cursor means nothing under another order: these numbers may never change."""
    assert EpochOrder.of([1] * 8, seed=7, epoch=1, shuffle=True).windows.tolist() == [0, 5, 1, 4, 7, 3, 2, 6]
    assert row_order(0, 8, seed=7, epoch=1).tolist() == [5, 7, 3, 2, 0, 6, 4, 1]


def test_cursor_of_other_data_is_refused() -> None:
    order = EpochOrder.of([5], seed=0, epoch=0, shuffle=True)
    cursor = open_rank(Cursor.start(0), order, "one", 0, 1).cursor()
    with pytest.raises(DataError, match="does not fit"):
        open_rank(cursor, order, "two", 0, 1)
    with pytest.raises(ValueError, match="differ in epoch"):
        Cursor.merge([Cursor.start(0), Cursor.start(1)])
    with pytest.raises(ValueError, match="at least one"):
        Cursor.merge([])
    with pytest.raises(ValueError, match="version 7"):
        Cursor.from_dict({"version": 7})
    with pytest.raises(ValueError, match="malformed"):
        Cursor.from_dict({"version": 1, "epoch": 1})


@pytest.mark.parametrize(("rows", "passes", "world"), [([3, 4], 2, 2), ([3, 3], 2, 4), ([5, 5, 1], 5, 3), ([2], 7, 4)])
def test_ranks_share_the_rows_of_all_passes_evenly(rows: list[int], passes: int, world: int) -> None:
    """Rows that ranks do not divide: over the passes it is not always the same rank that has one more."""
    order = EpochOrder.of(rows, seed=0, epoch=0, shuffle=True, passes=passes)
    for done in ((), ((0, 1),)):
        totals = [count(pieces) for pieces in deal(order, done, world)]
        assert sum(totals) == passes * sum(rows) - count(done) and max(totals) - min(totals) <= 1
