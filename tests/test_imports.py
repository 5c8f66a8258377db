"""Garbage is left alone while large modules are imported, and only then."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rayrec._imports import quick_imports


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_within_and_what_is_there_then_never() -> None:
    gc.unfreeze()
    with quick_imports():
        assert not gc.isenabled()
        kept: list[object] = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    assert not any(found is kept for found in gc.get_objects())


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import rayrec.no_such_module  # noqa: F401
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with quick_imports():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_worker_imports_what_torchs_first_optimizer_would() -> None:
    """So that it does not take the first step's time."""
    code = (
        "import gc, sys; from rayrec.train.worker.start import load; load()\n"
        "print('torch._dynamo' in sys.modules, 'rayrec.train.worker.entry' in sys.modules, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True"] * 3, done.stderr
