"""Which test runs which line: one run of the fast tests under coverage, with the test as context.

The plugin below runs inside pytest, in the process that runs the tests; ranks of `tests.ranks` take part, other
processes (Ray's workers, commands) do not.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

FAST = "not slow and not long and not gpu"
CONFIG, DURATIONS = "coverage.ini", "durations.json"


@dataclass(frozen=True)
class Reach:
    """What a coverage run found.

    Args:
        tests: by file and line, the tests that run it.
        seconds: by test that passed.
    """

    tests: Mapping[str, Mapping[int, Sequence[str]]]
    seconds: Mapping[str, float]

    def of(self, root: Path, path: str, line: int, most_s: float) -> list[str]:
        """Tests that run a line, quick ones first, as many as fit into `most_s` seconds.

        For a line that runs at import (a default value, a field, a constant): those that run the function that it
        belongs to, else any of the file.
        """
        by_line = self.tests.get(path, {})
        spans = [range(line, line + 1), *_functions_around(root / path, line), range(1, sys.maxsize)]
        for span in spans:
            found = {test for number, tests in by_line.items() if number in span for test in tests}
            if found := found & set(self.seconds):
                break
        chosen, left = [], most_s
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def _functions_around(path: Path, line: int) -> list[range]:
    """Lines of the functions and classes that hold a line, the innermost first."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in nodes]
    return sorted((span for span in spans if line in span), key=len)


def measure(root: Path, folder: Path, tests: Sequence[str]) -> Reach:
    """Runs the fast tests under `tests`, unless `folder` holds such a run of the same sources."""
    folder = folder / _fingerprint(root, tests)
    if not (folder / DURATIONS).exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / CONFIG
        config.write_text(f"[run]\nsource = {root / 'rayrec'}\ndata_file = {folder / 'lines'}\nparallel = true\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach", "-m", FAST, *tests]
        print(f"which test runs which line: {' '.join(command[1:])}", flush=True)
        done = subprocess.run(command, cwd=root, env={**os.environ, "RAYREC_REACH": str(config)})
        if done.returncode not in (0, 1):  # tests that fail do not count
            raise RuntimeError(f"pytest ended with {done.returncode}")
    data = coverage.CoverageData(basename=str(folder / "all"), no_disk=True)
    for part in folder.glob("lines.*"):
        one = coverage.CoverageData(basename=str(part))
        one.read()
        data.update(one)
    tests_of = {str(Path(path).relative_to(root)): data.contexts_by_lineno(path) for path in data.measured_files()}
    return Reach(tests_of, json.loads((folder / DURATIONS).read_text()))


def _fingerprint(root: Path, tests: Sequence[str]) -> str:
    digest = hashlib.sha256(repr(sorted(tests)).encode())
    for path in sorted([*(root / "rayrec").rglob("*.py"), *(root / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# Inside pytest


class _Plugin:
    def __init__(self, config: str) -> None:
        self._folder = Path(config).parent
        self._coverage = coverage.Coverage(config_file=config)
        self._coverage.start()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {test: seconds for test, seconds in self._seconds.items() if test not in self._failed}
        (self._folder / DURATIONS).write_text(json.dumps(passed))


def pytest_configure(config: pytest.Config) -> None:
    if "RAYREC_REACH" in os.environ:
        config.pluginmanager.register(_Plugin(os.environ["RAYREC_REACH"]))


def coverage_of_rank() -> Any:
    """What a rank of `tests.ranks` starts before its first function: None where nothing is measured."""
    if "RAYREC_REACH" not in os.environ:
        return None
    measuring = coverage.Coverage(config_file=os.environ["RAYREC_REACH"])
    measuring.start()
    return measuring
