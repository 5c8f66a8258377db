"""Garbage is left alone while large modules are imported, and only then."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec._runtime.imports import quick_imports


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


def test_a_worker_imports_what_torchs_first_optimizer_would_but_no_planner_of_loads() -> None:
    """So that the first takes none of the first step's time; a new run loads nothing."""
    code = (
        "import gc, sys; from rayrec.train.worker.start import import_worker; import_worker()\n"
        "print('torch._dynamo' in sys.modules, 'rayrec.train.worker.entry' in sys.modules, gc.isenabled(),\n"
        "      'torch.distributed.checkpoint' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "True", "False"], done.stderr


@pytest.mark.parametrize("package", ["distributed", "distributed.planner", "checkpoint", "data", "train"])
def test_a_package_hands_out_the_names_that_it_lists(package: str) -> None:
    module = importlib.import_module(f"rayrec.{package}")
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module 'rayrec.{package}' has no attribute 'nothing'"):
        getattr(module, "nothing")  # noqa: B009
    with pytest.raises(ImportError):
        exec(f"from rayrec.{package} import nothing")


@pytest.mark.parametrize("command", [["runs", "list"], ["report", "RUN"]])
def test_a_command_that_reads_files_alone_loads_no_torch(command: list[str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: one\n")
    words = [str(run) if word == "RUN" else word for word in command]
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, gc.get_freeze_count() > 0))\n"
        f"sys.argv[1:] = {words}\n"
        "from rayrec.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False True"  # nothing is collected at the exit


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_config_leaves_no_ray(workers: int, tmp_path: Path) -> None:
    """A local Ray starts while the config is read, if the run needs one."""
    (tmp_path / "c.yaml").write_text(f"name: a\ntrainer: {{num_workers: {workers}, epocs: 1}}\n")
    code = (
        "import atexit, sys\n"
        "ray = lambda: sys.modules.get('ray')\n"
        "atexit.register(lambda: print(bool(ray()), bool(ray() and ray().is_initialized())))\n"
        "sys.argv[1:] = ['train', 'c.yaml']\n"
        "from rayrec.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, f"{workers > 0} False\n"), done.stderr
    assert done.stderr.count("trainer.epocs") == 1, done.stderr
