"""Every row exactly once, whatever the windows, ranks and stops: the pure part of it."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.data import Cursor, DataError, Manifest
from rayrec.data.order import epoch_planner
from rayrec.data.order.cursor import Progress
from rayrec.data.order.deal import deal, deal_steps
from rayrec.data.order.epoch import EpochOrder, dealt, row_order, steps_of
from rayrec.data.order.intervals import Interval, Spans, between, count, cut, inside, spans, union
from rayrec.data.stream.reading import window_shares
from tests.data.reference import mix64, seed_of
from tests.data.sets import SCHEMA, write

EpochPlanner, Ordering, RankShare = epoch_planner.EpochPlanner, epoch_planner.Ordering, epoch_planner.RankShare

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=8)
windows = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def positions(spans: list[Interval] | tuple[Interval, ...] | Spans) -> list[int]:
    return [i for start, stop in spans for i in range(start, stop)]


def place(order: EpochOrder, position: int) -> tuple[int, int]:
    """The block of a position, and the block's group."""
    block = int(np.searchsorted(order.starts, position, side="right")) - 1
    return block, int(np.searchsorted(order.groups, block, side="right")) - 1


@settings(max_examples=100)
@given(intervals, intervals, st.lists(st.integers(0, 60), min_size=2), st.integers(0, 70))
def test_intervals_are_sets_of_positions(
    some: list[Interval], others: list[Interval], edges: list[int], number: int
) -> None:
    merged = union(some)
    assert positions(merged) == sorted(set(positions(some)))
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    left = between(sorted(edges), merged)
    assert positions(left) == [i for i in range(min(edges), max(edges)) if i not in set(positions(some))]
    assert all(not any(start < edge < stop for edge in edges) for start, stop in left)
    sequence = spans(others)
    assert positions(cut(sequence, number)[0]) == positions(others)[:number]
    assert positions(cut(sequence, number)[1]) == positions(others)[number:]
    everything = positions(others)
    wanted = [i for i in positions(merged) if i < len(everything)]
    assert positions(inside(sequence, spans(merged))) == [everything[i] for i in wanted]


@settings(max_examples=80)
@given(windows, intervals, st.integers(1, 9))
def test_deal_gives_all_that_is_left_evenly(sizes: list[int], done: list[Interval], world_size: int) -> None:
    order = EpochOrder.of(sizes, seed=3, epoch=0, shuffle=True)
    before = union((min(a, order.rows), min(b, order.rows)) for a, b in done)
    parts = deal(order, before, world_size)
    everything = [i for part in parts for i in positions(part)] + positions(before)
    assert sorted(everything) == list(range(order.rows))
    assert max(map(count, parts)) - min(map(count, parts)) <= 1
    for start, stop in (piece for part in parts for piece in part):
        assert place(order, start) == place(order, stop - 1), "a piece lies in one window"


@settings(max_examples=150)
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
    groups: dict[int, list[list[int]]] = {}
    for start, stop, first, last in zip(
        order.starts[:-1], order.starts[1:], order.blocks[:-1], order.blocks[1:], strict=True
    ):
        own = order.windows[first:last].tolist()
        assert stop - start == sum(sizes[window % len(sizes)] for window in own)
        groups.setdefault(place(order, start)[1], []).append([run_of[window % len(sizes)] for window in own])
    for blocks in groups.values():
        assert len(blocks[0]) <= interleave and all(set(block) <= set(blocks[0]) for block in blocks)
    for run, length in enumerate(lengths):
        mine = [window for window in order.windows.tolist() if run_of[window % len(sizes)] == run]
        assert len(mine) == passes * length
        for number in range(passes):
            part = mine[number * length : (number + 1) * length]
            assert part == sorted(part)
    parts = deal(order, (), world_size)
    assert sorted(i for part in parts for i in positions(part)) == list(range(order.rows))
    assert max(map(count, parts)) - min(map(count, parts)) <= 1


@settings(max_examples=100)
@given(windows, intervals, st.integers(1, 5), st.integers(1, 40))
def test_steps_go_along_the_sequence(sizes: list[int], done: list[Interval], world_size: int, batch_rows: int) -> None:
    order = EpochOrder.of(sizes, seed=0, epoch=0, shuffle=False)
    before = union((min(a, order.rows), min(b, order.rows)) for a, b in done)
    left = [i for i in range(order.rows) if i not in set(positions(before))]
    ranks = [positions(deal_steps(order, before, rank, world_size, batch_rows)) for rank in range(world_size)]
    for first, size in steps_of(len(left), batch_rows):
        step = []
        for rank, mine in enumerate(ranks):
            rows = dealt(size, rank, world_size)
            step += mine[:rows]
            del mine[:rows]
        assert step == left[first : first + size]
    assert not any(ranks)


def test_deal_cuts_only_the_windows_that_fit_nowhere() -> None:
    order = EpochOrder.of([100] * 50, seed=0, epoch=0, shuffle=True)
    pieces = [piece for part in deal(order, (), 4) for piece in part]
    assert sum(stop - start == 100 for start, stop in pieces) == 48
    assert [len(part) for part in deal(EpochOrder.of([1000], seed=0, epoch=0, shuffle=True), (), 8)] == [1] * 8


def test_windows_after_one_that_fits_nowhere_go_whole_to_the_rank_with_the_fewest_rows() -> None:
    order = EpochOrder.of([30, 5, 5, 5, 5], seed=0, epoch=0, shuffle=False)
    sizes = [sorted(stop - start for start, stop in part) for part in deal(order, (), 2)]
    assert sizes == [[5, 5, 15], [5, 5, 15]]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_passes_come_whole_one_after_another_and_do_not_depend_on_how_many(
    sizes: list[int], passes: int, world: int
) -> None:
    order = EpochOrder.of(sizes, seed=1, epoch=2, shuffle=True, passes=passes)
    longer = EpochOrder.of(sizes, seed=1, epoch=2, shuffle=True, passes=passes + 1)
    assert longer.windows[: len(order.windows)].tolist() == order.windows.tolist()
    rows, n = sum(sizes), len(sizes)
    ranks, more = deal(order, (), world), deal(longer, (), world)
    for rank, pieces in enumerate(ranks):
        assert more[rank][: len(pieces)].tolist() == pieces.tolist()
        by_pass = [a // rows for a, b in pieces]
        assert by_pass == sorted(by_pass)
        held = Counter(a // rows for a, b in pieces for _ in range(b - a))
        assert all(abs(held[number] - rows / world) < 1 for number in range(passes))
    found = sorted(i for pieces in ranks for a, b in pieces for i in range(a, b))
    assert found == list(range(passes * rows))
    assert sorted(order.windows.tolist()) == list(range(passes * n))


@pytest.fixture(scope="module")
def planners(tmp_path_factory: pytest.TempPathFactory) -> list[EpochPlanner]:
    """Of data sets whose windows are cut, whole, and joined row groups."""
    drawn = [
        ([7, 30, 0, 12], 9, {"window_rows": 5}),
        ([40, 3], 40, {"window_bytes": 700}),
        ([8] * 9, 4, {"window_rows": 20}),
    ]
    sets = [(write(tmp_path_factory.mktemp("set"), sizes, groups), limits) for sizes, groups, limits in drawn]
    return [EpochPlanner(Manifest.read(str(folder), SCHEMA, **limits)) for folder, limits in sets]


def rows_of(planner: EpochPlanner, part: RankShare) -> list[tuple[str, int, int]]:
    """Every row of a rank's part, in order: its file, row group, and its place in the file."""
    found: dict[int, tuple[str, int, int]] = {}
    for piece in window_shares(planner, part):
        rows = [(s.uri, s.row_group, s.first_row + row) for s in piece.slices for row in range(s.start, s.stop)]
        found |= {end: rows[at] for end, at in zip(piece.ends.tolist(), piece.positions.tolist(), strict=True)}
    assert sorted(found) == list(range(1, part.rows + 1))
    return [found[end] for end in sorted(found)]


orderings = st.builds(
    Ordering,
    seed=st.just(5),
    shuffle=st.booleans(),
    interleave=st.integers(1, 3),
    passes=st.integers(1, 2),
    step_rows=st.none(),
) | st.builds(Ordering, seed=st.just(5), shuffle=st.just(False), step_rows=st.integers(1, 30))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 2),
    st.lists(st.tuples(orderings, st.integers(1, 6), st.floats(0, 1)), min_size=1, max_size=4),
    st.integers(1, 7),
    st.randoms(),
)
def test_exactly_once_under_any_stops_and_resizes(
    planners: list[EpochPlanner],
    number: int,
    runs: list[tuple[Ordering, int, float]],
    at_once: int,
    random: Random,
) -> None:
    planner, cursor = planners[number], Cursor.start(2)
    like = runs[0][0]  # a run keeps its order; its steps may change in size
    consumed: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch_planner, "RANGES_AT_ONCE", at_once)
        for given, world_size, part in [*runs, (like, 3, 1.0)]:
            step_rows = None if like.step_rows is None else given.step_rows or like.step_rows
            ordering, after = replace(like, step_rows=step_rows), []
            for rank in range(world_size):
                mine = planner.open(cursor, ordering, rank, world_size)
                steps = len([*steps_of(mine.rows_of_all, step_rows or 1)])
                rows = round(mine.rows * (part if part == 1.0 else part * random.random()))
                if step_rows is not None:  # all ranks are equally far
                    done = [size for _, size in steps_of(mine.rows_of_all, step_rows)][: round(part * steps)]
                    rows = sum(dealt(size, rank, world_size) for size in done)
                consumed += rows_of(planner, mine)[:rows]
                after.append(mine.cursor(rows))
            cursor = Cursor.from_dict(json.loads(json.dumps(Cursor.merge(after).to_dict())))
    everything = Counter(consumed)
    assert set(everything.values()) == {like.passes} and len(everything) == planner.manifest.rows
    assert cursor.rows_done == len(consumed)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2), st.integers(1, 5), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_as_many_ranks_go_on_exactly_where_each_was(
    planners: list[EpochPlanner], number: int, world_size: int, stops: list[float]
) -> None:
    planner, ordering = planners[number], Ordering(seed=5)
    starts = [planner.open(Cursor.start(0), ordering, rank, world_size) for rank in range(world_size)]
    rows = [round(part.rows * stop) for part, stop in zip(starts, stops, strict=False)]
    cursor = Cursor.merge(part.cursor(n) for part, n in zip(starts, rows, strict=True))
    for rank in range(world_size):
        rest = planner.open(Cursor.from_dict(cursor.to_dict()), ordering, rank, world_size)
        assert rows_of(planner, rest) == rows_of(planner, starts[rank])[rows[rank] :]


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


def test_rows_and_windows_come_by_32_bits_of_their_hashes() -> None:
    def plain(size: int, seed: int) -> list[int]:
        return sorted(range(size), key=lambda i: mix64(i + seed) >> 32)

    assert row_order(4, 5000, seed=2, epoch=3).tolist() == plain(5000, seed_of(2, 3, 2, 4))
    order = EpochOrder.of([1] * 300, seed=2, epoch=3, shuffle=True, passes=2)
    first, second = plain(300, seed_of(2, 3, 1)), plain(300, seed_of(2, 3, 1, 1))
    assert order.windows.tolist() == first + [300 + window for window in second]


@pytest.mark.parametrize(
    ("windows_", "interleave", "wanted"),
    [
        (7, 4, [4, 3]),  # too few groups follow
        (8, 4, [1, 2, 4, 1]),  # the first ones are smaller, so that rows come sooner
        (20, 8, [2, 4, 8, 6]),
        (12, 3, [3, 3, 3, 3]),  # a small one is not cut
        (3, 1, [1, 1, 1]),
    ],
)
def test_the_first_groups_are_smaller_where_many_follow(windows_: int, interleave: int, wanted: list[int]) -> None:
    order = EpochOrder.of([1] * windows_, seed=0, epoch=0, shuffle=True, interleave=interleave)
    assert np.diff(order.blocks[order.groups]).tolist() == wanted
    plain = EpochOrder.of([1] * windows_, seed=0, epoch=0, shuffle=False, interleave=interleave)
    assert np.diff(plain.blocks[plain.groups]).tolist() == [1] * windows_


def test_what_is_left_is_told_when_a_part_is_opened(planners: list[EpochPlanner]) -> None:
    planner = planners[0]
    total = planner.manifest.rows
    parts = [planner.open(Cursor.start(0), Ordering(seed=5), rank, 2) for rank in range(2)]
    assert [(part.rows_done, part.rows_of_all, part.total) for part in parts] == [(0, total, total)] * 2
    assert sum(part.rows for part in parts) == total
    cursor = Cursor.merge([parts[0].cursor(9, 2), parts[1].cursor(4, 1)])
    assert (cursor.rows_done, cursor.skipped, cursor.parts[0].rows) == (13, 3, ((0, 9), (1, 4)))
    again = [planner.open(cursor, Ordering(seed=5), rank, 2) for rank in range(2)]
    assert [(part.rows_done, part.rows_of_all, part.total) for part in again] == [
        (9, total - 13, total),
        (4, total - 13, total),
    ]
    assert [part.rows for part in again] == [parts[0].rows - 9, parts[1].rows - 4]
    assert again[1].cursor(3).parts[0].rows == ((1, 7),)
    three = [planner.open(cursor, Ordering(seed=5), rank, 3) for rank in range(3)]
    assert [(part.rows_done, part.rows_of_all) for part in three] == [(0, total - 13)] * 3
    done = Cursor.merge([part.cursor(part.rows) for part in again])
    assert done.parts[0].over and not cursor.parts[0].over
    over = planner.open(done, Ordering(seed=6), 0, 1)  # of data that may have changed since
    assert (over.rows, over.rows_of_all, over.total, over.before) == (0, 0, total, ((0, total),))


def test_cursors_of_several_data_sets_and_ranks() -> None:
    one, other = (Progress(data=name, world_size=2, total=20, rows=((0, 3),)) for name in ("x", "y"))
    both = Cursor(epoch=4, parts=(one, other), given=7, skipped=1)
    assert (both.rows_done, one.rows_of(0), one.rows_of(1)) == (6, 3, 0)
    assert both.split(2) == [Cursor(epoch=4, parts=(one,)), Cursor(epoch=4, parts=(other,))]
    assert Cursor.start(4).split(3) == [Cursor.start(4)] * 3
    with pytest.raises(DataError, match="the number of data sets changed"):
        both.split(1)
    joined = Cursor.join([replace(each, skipped=2) for each in both.split(2)], given=9)
    assert joined == Cursor(epoch=4, parts=(one, other), given=9, skipped=4)
    later = replace(one, rows=((0, 2), (1, 8)))
    merged = Cursor.merge([both, Cursor.start(4), replace(both, parts=(later, other), given=8, skipped=5)])
    assert merged == Cursor(epoch=4, parts=(replace(one, rows=((0, 3), (1, 8))), other), given=8, skipped=6)
    assert Cursor.merge([Cursor.start(4), Cursor.start(4)]) == Cursor.start(4)
    assert Cursor.from_dict(both.to_dict()) == replace(both, skipped=0)
    for change in ({"data": "z"}, {"world_size": 3}, {"total": 21}, {"before": ((0, 1),)}, {"step_rows": 4}):
        with pytest.raises(ValueError, match=f"cursors differ in {next(iter(change))}"):
            Cursor.merge([Cursor(epoch=0, parts=(one,)), Cursor(epoch=0, parts=(replace(one, **change),))])


def test_columns_are_sent_in_as_few_bytes_as_they_need(planners: list[EpochPlanner]) -> None:
    planner = planners[0]
    part = planner.open(Cursor.start(0), Ordering(seed=0), 0, 1)
    pieces = planner.next_blocks(part, 0)
    sent = pickle.dumps(pieces)
    numbers = [pieces.group, pieces.windows, *(getattr(pieces.slices, one.name) for one in fields(pieces.slices))]
    assert len(sent) < 2000 + sum(array.nbytes for array in numbers) / 2
    found = pickle.loads(sent)
    assert found.files.all() == pieces.files.all() and found.intervals.tolist() == pieces.intervals.tolist()
    assert found.slices.first_row.tolist() == pieces.slices.first_row.tolist()


def test_cursor_of_other_data_is_refused(planners: list[EpochPlanner]) -> None:
    cursor = planners[0].open(Cursor.start(0), Ordering(seed=0), 0, 1).cursor(0)
    for other, ordering in ((1, Ordering(seed=0)), (0, Ordering(seed=1)), (0, Ordering(seed=0, interleave=2))):
        with pytest.raises(DataError, match="does not fit"):
            planners[other].open(cursor, ordering, 0, 1)
    with pytest.raises(ValueError, match="differ in epoch"):
        Cursor.merge([Cursor.start(0), Cursor.start(1)])
    with pytest.raises(ValueError, match="at least one"):
        Cursor.merge([])
    with pytest.raises(ValueError, match="version 7"):
        Cursor.from_dict({"version": 7})
    with pytest.raises(ValueError, match="malformed"):
        Cursor.from_dict({"version": 3, "epoch": 1})


@pytest.mark.parametrize(("rows", "passes", "world"), [([3, 4], 2, 2), ([3, 3], 2, 4), ([5, 5, 1], 5, 3), ([2], 7, 4)])
def test_ranks_share_the_rows_of_all_passes_evenly(rows: list[int], passes: int, world: int) -> None:
    """Rows that ranks do not divide: over the passes it is not always the same rank that has one more."""
    order = EpochOrder.of(rows, seed=0, epoch=0, shuffle=True, passes=passes)
    for done in ((), ((0, 1),)):
        totals = [count(pieces) for pieces in deal(order, done, world)]
        assert sum(totals) == passes * sum(rows) - count(done) and max(totals) - min(totals) <= 1


def test_what_was_done_is_found_once_for_all_ranks(
    planners: list[EpochPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    union = epoch_planner.union
    monkeypatch.setattr(epoch_planner, "union", lambda parts: found.append(1) or union(parts))
    for ordering in (Ordering(seed=5), Ordering(seed=5, shuffle=False, step_rows=8)):
        planner = EpochPlanner(planners[0].manifest)
        before = [planner.open(Cursor.start(0), ordering, rank, 3) for rank in range(3)]
        cursor = Cursor.merge([part.cursor(2) for part in before])
        for rank in range(20):
            planner.open(cursor, ordering, rank, 20)
        assert len(found) == 1
        found.clear()


def test_the_deal_never_changes() -> None:
    """As many ranks go on where each was: under another deal that is elsewhere."""
    order = EpochOrder.of([5, 3, 7, 2], seed=7, epoch=1, shuffle=True, passes=2)
    assert [part.tolist() for part in deal(order, ((4, 6),), 3)] == [
        [[0, 4], [10, 11], [17, 20], [22, 25]],
        [[6, 8], [11, 14], [20, 22], [25, 29]],
        [[8, 10], [14, 17], [29, 34]],
    ]


def test_pieces_of_a_run_of_windows_are_one_group(planners: list[EpochPlanner]) -> None:
    for planner in planners:
        runs = planner.manifest.windows.runs.tolist()
        run_of = [number for number, length in enumerate(runs) for _ in range(length)]
        part = planner.open(Cursor.start(0), Ordering(seed=5), 0, 1)
        found = planner.next_blocks(part, 0)
        assert found.rows == part.rows, "so few come at once"
        in_order = [run_of[window] for window in found.windows.tolist()]
        groups = list(dict.fromkeys(in_order))
        assert found.group.tolist() == [1 + groups.index(run) if runs[run] > 1 else 0 for run in in_order]
