"""What all tests share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ranks import close_pools


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Of tests that run side by side (pytest-xdist), a slow one waits until it is alone: it keeps all processors busy
    itself, and its deadlines are those of an otherwise idle machine."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    kind = fcntl.LOCK_EX if item.get_closest_marker("slow") else fcntl.LOCK_SH
    # Whoever waits for the room stands in the door, so that those who come later do not keep it from its turn.
    with _locked(__file__, kind) as door, _locked(os.fspath(Path(__file__).with_name("__init__.py")), kind):
        fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


@contextmanager
def _locked(path: str, kind: int) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, kind)
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a child process has a copy
        os.close(file)


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pools()
