"""What is read ahead: in order, no further than asked, and not after it was closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest

from rayrec.data import DataError
from rayrec.data.stream.prefetch import Activity, Prefetcher, _plain


def counted(made: list[int], most: int = 10**9) -> Generator[int]:
    for number in range(most):
        made.append(number)
        yield number


def test_no_more_is_made_than_fits_and_none_once_it_is_closed() -> None:
    made: list[int] = []
    threads = set(threading.enumerate())
    ahead = Prefetcher(lambda: counted(made), depth=3)
    each = ahead.each(30)
    assert [next(each) for _ in range(4)] == [0, 1, 2, 3]
    time.sleep(0.05)
    assert len(made) <= 4 + 3 + 1, "three wait, and one is held"
    ahead.close()
    before = len(made)
    time.sleep(0.05)
    assert len(made) == before
    assert set(threading.enumerate()) <= threads and list(each) == []


def test_a_source_that_gives_nothing_is_told() -> None:
    go_on = threading.Event()

    def waiting() -> Generator[int]:
        go_on.wait(60)
        yield 1

    ahead = Prefetcher(waiting, depth=1)
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"no data arrived for 0\.01 s"):
        ahead.take(0.01)
    assert time.monotonic() - begun < 40, "its thread is left to itself"
    go_on.set()
    with pytest.raises(DataError, match="no data arrived"):
        ahead.take(0.01)


def test_a_source_may_take_long_for_an_item_while_it_goes_on() -> None:
    activity, waits = Activity(), threading.Event()

    def sparse() -> Generator[int]:
        for number in activity.watch(slow()):
            if number == 19:
                yield number

    def slow() -> Generator[int]:
        for number in range(21):
            waits.wait(0.03 if number < 20 else 60)
            yield number

    ahead = Prefetcher(sparse, depth=1, source=activity)
    begun = time.monotonic()
    assert ahead.take(0.5) == 19 and time.monotonic() - begun > 0.5
    with pytest.raises(DataError, match=r"no data arrived for 0\.2 s"):
        ahead.take(0.2)
    waits.set()


def test_all_comes_in_order_and_an_error_comes_last() -> None:
    def failing() -> Generator[int]:
        yield from range(5)
        raise DataError("wrong", file="x")

    found = []
    with pytest.raises(DataError, match="wrong"):
        for number in Prefetcher(failing, depth=2).each(30):
            found.append(number)
    assert found == [0, 1, 2, 3, 4]
    assert list(Prefetcher(lambda: counted([], 5), depth=1).each(30)) == [0, 1, 2, 3, 4]


def test_a_reason_is_told_in_one_line() -> None:
    ours = DataError("wrong", file="x")
    wrapped, task = RuntimeError("task failed"), RuntimeError("trace\nof a task")
    wrapped.__cause__ = ours
    assert _plain(ours) is _plain(wrapped) is ours
    task.cause = ValueError("\n  bad value  \nmore")  # type: ignore[attr-defined]
    found = _plain(task)
    assert str(found) == "reading failed: ValueError: bad value" and found.__cause__ is task
    assert str(_plain(ValueError(""))) == "reading failed: ValueError: no message"
    for last in (MemoryError(), KeyboardInterrupt(), SystemExit()):
        assert _plain(last) is last
