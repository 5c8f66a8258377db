"""What all tests share."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

if os.environ.get("RAYREC_PRETEND_GPUS"):
    import tests.dryrun.guard  # noqa: F401  (before torch)

import torch

from tests.device import ON_GPU, PRETENDED, use_gpu
from tests.ranks import close_pools

gc.disable()  # until all is imported, of which nothing is garbage
TESTS = Path(__file__).parent
GATE, ROOM = TESTS / "ranks.py", Path(__file__)  # any two files that all workers see: only their locks matter
INSIDE = "RAYREC_INSIDE_A_TEST"
WITHIN = INSIDE in os.environ  # a test has started this pytest, and has passed the gate for it

with suppress(ImportError):  # of what tests need, a machine lent for its GPU may have torch and pytest only
    from hypothesis import settings

    settings.register_profile("any speed", settings(), deadline=None)
    settings.load_profile("any speed")


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no collection of garbage need look at them again."""
    gc.freeze()
    gc.enable()


@contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    with open(path) as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process may have the file open, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that say how many minutes they take begin first, then those with slow tests; those with a test that must be
    alone come last. No worker waits for either at the end."""
    turns: dict[Path, tuple[float, bool]] = {}
    for item in items:  # a file stays together: a worker runs the whole of it
        turns[item.path] = min(_turn(item), turns.get(item.path, (0.0, True)))
    alone = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: (item.path in alone, turns[item.path]))


def _turn(item: pytest.Item) -> tuple[float, bool]:
    long = item.get_closest_marker("long")
    minutes = float(long.kwargs.get("minutes", 0) if long else 0)
    return -minutes, item.get_closest_marker("slow") is None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Nothing runs beside a test marked `alone`: it has the gate until it is over, others only as they enter.

    Waiting is not counted as the test's time, for which it may have a limit.
    """
    if WITHIN:
        return (yield)
    os.environ[INSIDE] = "1"
    if item.get_closest_marker("alone"):
        with locked(GATE, fcntl.LOCK_EX), locked(ROOM, fcntl.LOCK_EX):
            return (yield)
    with locked(GATE, fcntl.LOCK_EX):
        pass
    with locked(ROOM, fcntl.LOCK_SH):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    torch.set_num_threads(1)
    if PRETENDED:
        from tests.dryrun.ranks import pretend

        pretend()
    if ON_GPU:
        use_gpu()
    yield
    close_pools()
