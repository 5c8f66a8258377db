"""Where a run is, as its checkpoints keep it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import Condition, Cursor, DataError
from rayrec.data.order.cursor import Progress
from rayrec.data.order.periods import Periods
from rayrec.train.worker.position import START, Position

HERE = replace(
    START, step=7, samples=448, cursor=Cursor.start(2, ("day", "2024-01-03")), trained=("2024-01-01", "2024-01-02")
)
ROWS = 5


def test_the_next_epoch_begins_with_its_first_row() -> None:
    later = HERE.next_epoch()
    assert later.cursor == Cursor.start(3) and later.epoch == 3
    assert (later.step, later.samples) == (7, 448)


def read(position: Position, rows: int = ROWS) -> Position:
    """So many rows of the epoch were trained on, and a checkpoint keeps that."""
    progress = Progress(data="x", world_size=1, total=ROWS, rows=((0, rows),))
    after = replace(position, cursor=replace(position.cursor, parts=(progress,)))
    return Position.from_dict(json.loads(json.dumps(after.to_dict())))


def launch(position: Position, periods: Periods) -> tuple[Position, list[tuple[object, object]]]:
    """One launch to its end: where it ends, and what it trained and was evaluated on."""
    seen = []
    position = position.among(periods)
    assert position.cursor.only is not None
    left = len(periods.remaining(position.cursor.only[1]))
    while True:
        assert position.cursor.only is not None
        if not position.cursor.over:
            seen.append((position.cursor.only[1], periods.evaluated_after(position.cursor.only)[1]))
        position = read(position)
        if not left:
            return position, seen
        position, left = position.next_epoch(periods), left - 1


def test_sixty_days_of_which_thirty_are_kept_are_each_trained_on_once() -> None:
    days = [f"2024-{1 + day // 30:02}-{1 + day % 30:02}" for day in range(60)]
    position, seen = START, []
    for today in range(1, 60):
        position, now = launch(position, Periods("day", tuple(days[max(0, today - 29) : today + 1])))
        seen += now
    assert seen == list(zip(days[:59], days[1:], strict=True))
    assert position.epoch == 58 and position.trained == tuple(days[:58])


def test_a_period_of_several_columns_is_kept_by_a_checkpoint() -> None:
    periods = Periods(("year", "month"), ((2024, 12), (2025, 1), (2025, 2)))
    position, seen = launch(START, periods)
    assert seen == [((2024, 12), (2025, 1)), ((2025, 1), (2025, 2))]
    assert position.trained == ((2024, 12),) and position.cursor.only == (("year", "month"), (2025, 1))
    assert position.among(periods) == position


@given(st.data())
def test_whatever_comes_and_goes_no_day_is_trained_on_twice_and_none_is_left_out_in_silence(
    data: st.DataObject,
) -> None:
    position, trained, there = START, [], set(range(4, 8))
    for _ in range(6):
        there = data.draw(st.sets(st.integers(0, 40), max_size=8)) | data.draw(st.sets(st.sampled_from(sorted(there))))
        periods = Periods("day", tuple(sorted(there)))
        try:
            position, now = launch(position, periods)
        except DataError as error:
            assert "nothing to train on" in str(error) and position == START, "the first launch needs two"
            there = there or {1}
            continue
        there = there or {1}
        trained += [day for day, _ in now]
        assert all(after == min(day for day in periods.values if day > one) for one, after in now)
        assert position.cursor.only is not None
        late = periods.late(position.cursor.only, position.trained)
        assert set(periods.values[:-1]) <= set(trained) | set(late), "trained on, or reported"
    assert len(set(trained)) == len(trained) and trained == sorted(trained)


def test_a_day_whose_rest_filters_leave_out_is_passed() -> None:
    inside = read(START.among(Periods("day", (1, 2, 3))), 2)
    assert inside.among(Periods("day", (1, 2, 3))) == inside
    later = inside.among(Periods("day", (2, 3), (Condition("day", ">", (1,)),)))
    assert (later.cursor, later.trained) == (Cursor.start(1, ("day", 2)), (1,))
    with pytest.raises(DataError, match="day=1 was trained on in part, but its folder is missing"):
        inside.among(Periods("day", (2, 3)))


def test_earlier_checkpoints_know_a_day_by_its_number() -> None:
    older = read(replace(START, cursor=Cursor.start(1)))
    found = older.among(Periods("day", (4, 5, 6, 7)))
    assert (found.cursor.only, found.trained, found.cursor.parts) == (("day", 5), (4,), older.cursor.parts)
    with pytest.raises(DataError, match="is in epoch 1 and does not name its period; only 1 folders day=… exist"):
        older.among(Periods("day", (7,)))


def test_days_are_forgotten_by_a_run_that_is_not_progressive_any_more() -> None:
    assert HERE.among(None) == replace(HERE, cursor=Cursor.start(2))
