"""Where units are placed and how placements are made better, on problems small enough to solve by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayrec.distributed import Span
from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.search.bound import Choices
from rayrec.distributed.planner.search.choose import choose
from rayrec.distributed.planner.search.options import Option, Scope, Unit
from rayrec.distributed.planner.search.pack import Packing, Stuck, pack
from rayrec.distributed.planner.search.problem import Problem
from rayrec.distributed.planner.search.refine import refine
from rayrec.distributed.planner.search.solve import _lookup_ratio, _pack
from rayrec.distributed.planner.tables.table import Table
from tests.planner.test_by_hand import TABLE

Numbers = float | Sequence[float]


def unit(seconds: float, held: float = 0, beside: float = 0, lookup: float = 0, scope: Scope = Scope.RANK) -> Unit:
    """One that costs the same on hosts of every size."""
    return Unit(
        scope=scope,
        cols=Span(0, 16),
        seconds=(seconds,),
        lookup=(lookup,),
        work=seconds,
        device_bytes=(held,),
        host_bytes=(beside,),
        total_device_bytes=held,
        total_host_bytes=beside,
    )


def option(number: int, *units: Unit, kind: str = "table_wise") -> Option:
    return Option(
        table=number,
        sharding_type=kind,
        kernel="fused",
        cache_load_factor=1.0,
        units=units,
        best_units=units,
        shared_s=0.0,
        least_shared_s=0.0,
    )


def facts(number: int, world: int, rows: int = 1000) -> Table:
    name, ranks = f"t{number}", tuple(range(world))
    return replace(TABLE, name=name, rows=rows, dim=16, ids=64.0, bags=64.0, kernels={}, ranks=ranks, min_partition=16)


def problem(tables: int, hosts: list[int], room: Numbers = 100, beside: Numbers = 100, **more: Any) -> Problem:
    world, rows = sum(hosts), more.pop("rows", 1000)
    return Problem(
        tables=tuple(facts(number, world, rows) for number in range(tables)),
        topology=Topology(world, "cpu", hosts=hosts),
        options=((),) * tables,
        class_R=np.zeros(world, dtype=np.int64),
        host_R=np.repeat(np.arange(len(hosts)), hosts),
        room_R=np.broadcast_to(np.asarray(room, dtype=np.float64), (world,)),
        host_room_R=np.broadcast_to(np.asarray(beside, dtype=np.float64), (world,)),
        reserve_R=np.zeros(world),
        allowed_TR=more.pop("allowed", None),
    )


def packed(of: Problem, *chosen: Option, weight: float = 0.0, extra_s: float = 0.0) -> Packing:
    answer = pack(of, chosen, extra_s, weight)
    assert isinstance(answer, Packing), answer
    return answer


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize(("held", "beside"), [(100, 0), (0, 100), (100, 100)])
def test_a_unit_may_fill_its_place_to_the_last_byte(scope: Scope, held: int, beside: int) -> None:
    of, last = problem(2, [2]), option(1, unit(1, held, beside, scope=scope))
    before = option(0, unit(2, scope=Scope.WORLD))
    full = packed(of, before, last)
    assert full.device_R.max() == held and full.host_bytes_R.max() == beside
    for more in ((101, beside), (held, 101)):
        assert pack(of, [before, option(1, unit(1, *more, scope=scope))]) == Stuck(table=1)


def test_the_longest_are_placed_first_and_of_equal_ones_the_largest() -> None:
    found = packed(problem(3, [2]), option(0, unit(2)), option(1, unit(2)), option(2, unit(3)))
    assert found.place_U.tolist() == [1, 1, 0] and found.seconds_R.tolist() == [3, 4] and found.worst_s == 4
    found = packed(problem(3, [3]), option(0, unit(1, 5)), option(1, unit(1, 7)), option(2, unit(1, 6)))
    assert found.place_U.tolist() == [2, 0, 1] and found.device_R.tolist() == [7, 6, 5]
    found = packed(problem(2, [4]), option(0, unit(1), unit(1)), option(1, unit(1), unit(1)))
    assert found.table_U.tolist() == [0, 0, 1, 1] and found.place_U.tolist() == [0, 1, 2, 3]


def test_a_choice_may_cost_every_rank_besides() -> None:
    found = packed(problem(1, [2]), option(0, unit(1, 2, 3, 0.5)), extra_s=4.0)
    assert found.seconds_R.tolist() == [5, 4] and found.lookup_R.tolist() == [0.5, 0]
    assert found.device_R.tolist() == [2, 0] and found.host_bytes_R.tolist() == [3, 0]


def test_a_weight_on_memory_puts_full_ranks_last() -> None:
    chosen = [option(0, unit(2, 10)), option(1, unit(1, 90)), option(2, unit(1, 10))]
    assert packed(problem(3, [2]), *chosen).place_U.tolist() == [0, 1, 1]
    # sizes are 2 + 1, 1 + 9 and 1 + 1; the last one finds 1 + 1 + 10 against 2 + 1 + 2
    assert packed(problem(3, [2]), *chosen, weight=10.0).place_U.tolist() == [1, 0, 1]
    unlike = problem(2, [2], room=[100, 1000])
    pair = [option(0, unit(2, 50)), option(1, unit(1, 50))]
    assert packed(unlike, *pair).place_U.tolist() == [0, 1]
    # 2 + 8 * 50 / 100 against 2 + 8 * 50 / 1000; then 1 + 4 against 2 + 1 + 8 * 100 / 1000
    assert packed(unlike, *pair, weight=8.0).place_U.tolist() == [1, 1]


def test_two_columns_share_a_rank_only_where_no_other_has_room() -> None:
    busy = option(0, unit(9))
    columns = option(1, unit(1, 10), unit(1, 10), kind="column_wise")
    assert packed(problem(2, [2]), busy, columns).place_U.tolist() == [0, 1, 0]
    assert packed(problem(2, [2], room=[5, 100]), busy, columns).place_U.tolist() == [0, 1, 1]
    found = packed(problem(2, [3]), busy, columns)
    assert found.place_U.tolist() == [0, 1, 2] and found.held_TR.tolist() == [[True, False, False], [False, True, True]]


def test_a_table_lies_only_where_it_may() -> None:
    allowed = np.array([[False, True], [True, True]])
    found = packed(problem(2, [2], allowed=allowed), option(0, unit(5)), option(1, unit(1)))
    assert found.place_U.tolist() == [1, 0]
    of = problem(2, [2], room=[100, 10], allowed=allowed)
    assert pack(of, [option(0, unit(5, 11)), option(1, unit(1))]) == Stuck(table=0)


def test_columns_inside_a_host_go_to_the_one_with_least_to_do_on_as_many_ranks() -> None:
    columns = option(1, unit(1), unit(1), kind="table_column_wise")
    loads = [option(0, unit(4), unit(9), unit(5), unit(6))]  # ranks 2, 0, 1 and then 3: in falling order
    of = problem(2, [2, 2])
    found = packed(of, *loads, columns)
    assert found.seconds_R.tolist() == [9, 6, 6, 5] and found.pinned_U.tolist() == [-1] * 4 + [1, 1]
    idle = option(0, unit(0, scope=Scope.WORLD))
    assert packed(of, idle, columns).place_U.tolist() == [0, 1], "of equal hosts the first"
    assert packed(problem(2, [1, 2]), idle, columns).place_U.tolist() == [1, 2], "one rank is too few"
    # loads of 0, 9, 9 on one host and 5, 5, 5 on the other: two ranks end at 1 + 10 or 6 + 6, three at 21 or 18
    busy = option(0, unit(9), unit(9), unit(5), unit(5), unit(5), kind="column_wise")
    of = problem(2, [3, 3], allowed=np.array([[False, True, True, True, True, True], [True] * 6]))
    assert packed(of, busy, columns).place_U.tolist() == [1, 2, 3, 4, 5, 0, 1]
    three = option(1, unit(1), unit(1), unit(1), kind="table_column_wise")
    assert packed(of, busy, three).place_U.tolist() == [1, 2, 3, 4, 5, 3, 4, 5]


def test_units_on_hosts_take_the_least_loaded_one_each_another() -> None:
    pair = option(0, unit(1, scope=Scope.HOST), unit(3, scope=Scope.HOST), kind="grid_shard")
    other = option(1, unit(2, scope=Scope.HOST), kind="table_row_wise")
    found = packed(problem(2, [2, 1, 2]), pair, other)
    # 3, then 2, then 1
    assert found.hosts_of == {0: [2, 0], 1: [1]} and found.seconds_R.tolist() == [3, 3, 2, 1, 1]
    found = packed(problem(2, [2, 1]), pair, other)
    assert found.hosts_of == {0: [1, 0], 1: [1]} and found.seconds_R.tolist() == [3, 3, 3]
    assert pack(problem(1, [2]), [pair]) == Stuck(table=0)
    one = option(0, unit(1, 50, scope=Scope.HOST), kind="table_row_wise")
    unlike = problem(1, [1, 2], room=[100, 1000, 1000])
    assert packed(unlike, one).hosts_of == {0: [0]}
    assert packed(unlike, one, weight=0.1).hosts_of == {0: [1]}  # 1 + 0.1 * 50 / 100 against 50 / 1000
    assert packed(problem(1, [2, 2], room=[100, 49, 50, 50]), one).hosts_of == {0: [1]}


def test_rows_fewer_than_ranks_leave_the_last_ranks_empty() -> None:
    everywhere = unit(1, 60, scope=Scope.WORLD)
    of = problem(1, [4], room=[60, 60, 60, 0], rows=5)  # blocks of 2, 2 and 1
    assert packed(of, option(0, everywhere, kind="row_wise")).seconds_R.tolist() == [1, 1, 1, 0]
    assert pack(of, [option(0, everywhere, kind="data_parallel")]) == Stuck(table=0)


def test_memory_is_weighed_by_the_bound_where_load_alone_does_not_fit() -> None:
    """Without a weight the third table finds both ranks too full."""
    of = problem(3, [2])
    chosen = [option(0, unit(3, 50)), option(1, unit(2, 50)), option(2, unit(1, 100))]
    assert pack(of, chosen) == Stuck(table=2)
    assert pack(of, chosen, memory_weight=0.5) == Stuck(table=2)
    for bound_s in (0.5, 8.0):  # ten times the half, and once the eight
        found = _pack(of, chosen, 1.5, bound_s)
        assert isinstance(found, Packing) and found.place_U.tolist() == [1, 1, 0]
        assert found.seconds_R.tolist() == [2.5, 6.5]
    assert _pack(of, chosen, 0.0, 0.1) == Stuck(table=2)
    assert _pack(of, chosen, 0.0, 0.0) == Stuck(table=2)


def laid(of: Problem, places: list[int], *chosen: Option) -> Packing:
    """Units on the given ranks, whatever there is room for."""
    found = packed(problem(len(of.tables), [len(of.room_R)], np.inf, np.inf), *chosen)
    found.place_U[:] = places
    for name in ("seconds", "lookup", "device", "host_bytes"):
        sizes = getattr(found, f"{name}_UC")[:, 0]
        setattr(found, f"{name}_R", np.bincount(places, sizes, len(of.room_R)))
    found.held_TR[:] = False
    found.held_TR[found.table_U, places] = True
    return found


def crowded(of: Problem, *chosen: Option) -> Packing:
    return laid(of, [0] * sum(len(each.units) for each in chosen), *chosen)


def singles(*units: Unit) -> list[Option]:
    return [option(number, each) for number, each in enumerate(units)]


def refined(of: Problem, state: Packing, target_s: float = 0.1, limit: int = 9, **more: float) -> list[int]:
    refine(of, state, target_s, more.get("enough_s", 0.0), more.get("target_lookup", 99.0), limit)
    return state.place_U.tolist()


def test_the_worst_rank_hands_on_what_leaves_both_lowest() -> None:
    of, units = problem(3, [2]), singles(unit(5, 3, 2, 1), unit(3), unit(1))
    state = crowded(of, *units)
    assert refined(of, state) == [1, 0, 0]  # 5 | 4 in one exchange
    assert state.seconds_R.tolist() == [4, 5] and state.lookup_R.tolist() == [0, 1]
    assert state.device_R.tolist() == [0, 3] and state.host_bytes_R.tolist() == [0, 2]
    assert state.held_TR.tolist() == [[False, True], [True, False], [True, False]]
    for given in ({"target_s": 9.0}, {"target_s": 0.0}, {"limit": 0}):
        assert refined(of, crowded(of, *units), **given) == [0, 0, 0], given
    assert refined(of, crowded(of, *units), target_s=8.9) == [1, 0, 0]
    assert refined(problem(1, [1]), crowded(problem(1, [1]), option(0, unit(5)))) == [0]


def test_a_unit_goes_only_where_there_is_room_and_something_is_gained() -> None:
    for room, moved in (([9, 10], True), ([9, 9], False)):
        for of, one in ((problem(2, [2], room), unit(5, 10)), (problem(2, [2], beside=room), unit(5, 0, 10))):
            assert refined(of, crowded(of, *singles(one, unit(5, 99, 99)))) == [int(moved), 0]
    of = problem(2, [2])
    for gain, moved in ((1.5e-6, True), (0.9e-6, False)):
        assert refined(of, crowded(of, *singles(unit(1), unit(gain)))) == [int(moved), 0]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("room", "swapped"), [([6, 4], True), ([5, 4], False), ([6, 2], False), ([6, 3], True)])
def test_two_units_change_places_where_a_move_does_not_help(room: list[int], swapped: bool, beside: bool) -> None:
    """13 | 11 seconds and 5 | 4 bytes; 8 against 7 makes 12 | 12 and 6 | 3."""
    of = problem(3, [2], 100 if beside else room, room if beside else 100)
    sizes = [(8, 3), (5, 2), (7, 4)]
    units = singles(*(unit(seconds, *((0, held) if beside else (held, 0))) for seconds, held in sizes))
    state = laid(of, [0, 0, 1], *units)
    state.seconds_R[1] += 4
    assert refined(of, state) == ([1, 0, 0] if swapped else [0, 0, 1])
    assert state.seconds_R.tolist() == ([12, 12] if swapped else [13, 11])


def test_lookups_are_balanced_up_to_what_the_worst_rank_may_take() -> None:
    of = problem(3, [2])
    units = singles(unit(4, lookup=3), unit(3, lookup=2), unit(7, lookup=0))

    def start() -> Packing:
        return laid(of, [0, 0, 1], *units)

    assert refined(of, start(), 0.0, target_lookup=1.5, enough_s=9.9) == [0, 0, 1]
    assert refined(of, start(), 0.0, target_lookup=1.5, enough_s=10.0) == [0, 1, 1]
    assert refined(of, start(), 0.0, target_lookup=2.0, enough_s=10.0) == [0, 0, 1], "good enough as it is"
    assert refined(of, start(), 0.0, limit=0, target_lookup=1.5, enough_s=10.0) == [0, 0, 1]


def test_units_stay_on_their_host_and_apart_from_their_siblings() -> None:
    of = problem(2, [2, 2])
    columns = option(0, unit(3), unit(3), kind="table_column_wise")
    state = packed(of, columns)
    assert state.place_U.tolist() == [0, 1] and refined(of, state) == [0, 1]
    state = packed(problem(1, [2]), option(0, unit(3), unit(1), kind="column_wise"))
    assert refined(problem(1, [2]), state) == [0, 1]
    allowed = np.array([[True, False], [True, True]])
    of = problem(2, [2], allowed=allowed)
    assert refined(of, crowded(of, *singles(unit(5), unit(2)))) == [0, 1]


def test_ranks_beyond_the_sixty_four_least_loaded_are_tried_last() -> None:
    room = [100.0] + [0.0] * 64 + [100.0] * 2
    of = problem(2, [67], room)
    state = crowded(of, *singles(unit(5, 10), unit(5, 10)))
    state.seconds_R[65:] = 1.0
    assert refined(of, state, limit=1) == [65, 0]


def test_the_sixty_fourth_least_loaded_rank_is_tried_before_the_next() -> None:
    """A move to it leaves 18 s; to change places with the unit of the next, which has no room beside it, 17.5."""
    of = problem(2, [67], [100.0] + [0.0] * 63 + [100.0, 10.0, 0.0])
    state = laid(of, [0, 65], *singles(unit(10, 10), unit(1, 10)))
    state.seconds_R[[0, 64, 65, 66]] = 20.0, 8.0, 8.5, 9.0
    assert refined(of, state, limit=1) == [64, 65]


def test_lookups_are_even_where_there_are_none() -> None:
    state = packed(problem(1, [2]), option(0, unit(1)))
    assert _lookup_ratio(state) == 1.0
    assert _lookup_ratio(packed(problem(1, [2]), option(0, unit(1, lookup=3)))) == 2.0


def test_a_unit_goes_to_the_host_whose_size_suits_it() -> None:
    of = replace(problem(1, [1, 2]), class_R=np.array([0, 1, 1]))
    twice = dict.fromkeys(("lookup", "device_bytes", "host_bytes"), (0.0, 0.0))
    for seconds, rank in (((5.0, 1.0), 1), ((1.0, 5.0), 0)):
        one = replace(unit(0), seconds=seconds, **twice)
        found = packed(of, option(0, one))
        assert found.place_U.tolist() == [rank] and found.worst_s == 1


CHOICES = Choices(
    table_O=np.array([0, 0]),
    first_T=np.array([0]),
    work_O=np.array([1.0, 2.0]),
    unit_O=np.array([1.0, 0.5]),
    least_work_O=np.array([1.0, 2.0]),
    least_unit_O=np.array([1.0, 0.5]),
    unit_lookup_O=np.array([1.0, 0.5]),
    bytes_O=np.array([100.0, 10.0]),
    unit_bytes_O=np.array([60.0, 20.0]),
    extra_O=np.zeros(2),
    shared_s=0.0,
    executor_O=np.array(["sharded", "sharded"]),
)


def options_chosen(room: float = 100.0, usable: tuple[bool, bool] = (True, True), **limits: Any) -> list[int]:
    given = {"bound_s": 1.0, "unit_limit": 1.0, "byte_limit": 2.0, "with_lookups": False} | limits
    found = choose(problem(1, [2], room), CHOICES, np.array(usable), **given)
    return [int(picked[0]) for picked in found]


@pytest.mark.parametrize(
    ("room", "chosen"),
    [
        (49.5, [1, 1, 1]),
        (50, [0, 1, 1, 1]),
        (52, [0, 1, 1]),
        (55, [0, 1, 1]),
        (56, [0, 1]),
        (66, [0, 1]),
        (200 / 3, [0]),
    ],
)
def test_the_fuller_memory_would_be_the_more_often_less_is_chosen(room: float, chosen: list[int]) -> None:
    """Two ranks for 100 bytes, of which 98 %, 90 % and 75 % may be filled."""
    assert options_chosen(room) == chosen


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        ({}, 0),
        ({"usable": (False, True)}, 1),
        ({"unit_limit": 0.5}, 1),
        ({"unit_limit": 0.5, "bound_s": 2.0}, 0),
        ({"bound_s": 0.5}, 1),
        ({"bound_s": 0.9985}, 1),  # 0.0015 too much weigh 1000 * 2 * 0.0015 = 3 s
        ({"bound_s": 0.9996}, 0),  # and 0.0004 weigh 0.8 s
        ({"byte_limit": 0.6}, 0),
        ({"byte_limit": 0.5}, 1),
        ({"with_lookups": True}, 1),  # half a second is a rank's mean lookup
        ({"with_lookups": True, "unit_limit": 2.0}, 0),
        ({"with_lookups": True, "unit_limit": 1.99, "bound_s": 9.0}, 1),
    ],
)
def test_a_piece_over_its_limit_is_chosen_only_where_it_saves_more(limits: dict[str, Any], chosen: int) -> None:
    assert options_chosen(**limits) == [chosen]
