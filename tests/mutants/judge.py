"""Runs tests against one fault after another, in a copy of the sources."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.mutants import Mutant

GRACE_S = 60  # beyond three times what the tests took without the fault
KILLED, SURVIVED, HUNG, UNREACHED = "killed", "survived", "killed: no end", "in reach of no fast test"
WARM = [  # imports that are slow and not ours
    "torch",
    "fbgemm_gpu",
    "ray.data",
    "ray.train",
    "pandas",
    "pyarrow.dataset",
    "torchmetrics",
    "hypothesis",
    "pydantic",
]


class Judge:
    """A copy of the sources, and tests that run in it.

    Args:
        root: of the checkout.
        copy: a folder that does not exist yet.
    """

    def __init__(self, root: Path, copy: Path) -> None:
        self._copy = copy
        self._failed = copy.with_name("failed")  # the first test that failed, by name
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        for prepared in root.glob("data/*/parquet"):  # not in git; read by a few tests
            (copy / prepared.relative_to(root)).symlink_to(prepared)
        for name in WARM:
            __import__(name)

    def verdict(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[str, str]:
        """Whether one of `tests`, which took `seconds` without the fault, fails with it, and the one that does.

        A failure counts where it is the fault's doing: what failed passes without the fault.
        """
        path = self._copy / mutant.path
        original = path.read_text(encoding="utf-8")
        limit_s = 3 * seconds + GRACE_S
        left = list(tests)
        while left:
            try:
                self._write(path, mutant.source(original))
                verdict, some, failed = self._first_failure(left, limit_s)
            finally:
                self._write(path, original)
            if verdict == SURVIVED:
                break
            suspects = [failed] if failed in left else some
            if self._run(suspects, limit_s) == 0:
                return verdict, failed
            left = [test for test in left if test not in suspects]
        return SURVIVED, ""

    def _first_failure(self, tests: Sequence[str], limit_s: float) -> tuple[str, list[str], str]:
        """The verdict, the tests that ran together, and the one of them that failed, as far as it is known."""
        for some in _in_two(tests):
            code = self._run(some, limit_s)
            if code != 0:
                failed = self._failed.read_text() if self._failed.exists() else ""
                return (HUNG if code is None else KILLED), some, failed
        return SURVIVED, [], ""

    def _write(self, path: Path, text: str) -> None:
        """Python takes a compiled file for the source's if time and size agree: so no compiled file stays."""
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _run(self, tests: Sequence[str], limit_s: float) -> int | None:
        """pytest's exit status, from a fork of this process, which has the slow imports; None for no end in time."""
        sys.stdout.flush()
        self._failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                code = _pytest_in(self._copy, tests, self._failed)
            finally:
                os._exit(code)
        end = time.monotonic() + limit_s
        status = None
        while status is None and time.monotonic() < end:
            pid, raw = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(raw) if pid else None
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests left behind
        if status is None:
            os.waitpid(child, 0)
        return status


class _FirstFailure:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid)


def _in_two(tests: Sequence[str]) -> list[list[str]]:
    """Those of the first one's file, which find most faults, and the others: to collect many files takes its time."""
    own = [test for test in tests if test.split("::")[0] == tests[0].split("::")[0]]
    others = [test for test in tests if test not in own]
    return [own, others] if others else [own]


def _pytest_in(folder: Path, tests: Sequence[str], failed: Path) -> int:
    import pytest

    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "rayrec")]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry not in ("", os.environ.get("PWD", "")))]
    os.environ["PYTHONPATH"] = str(folder)
    return int(
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout=120", *tests], plugins=[_FirstFailure(failed)])
    )
