"""Inside pytest, when `tests.mutants.reach` runs it: coverage that knows the test behind each line.

The process that runs the tests and the ranks of `tests.ranks` take part; other processes (Ray's workers, commands)
do not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

CONFIG, SPENT = "coverage.ini", "spent.json"
VARIABLE = "RAYREC_REACH"  # names coverage's config
RAY = "running_ray"  # the fixture


_now = ""


def context_now() -> str:
    """The test that runs, or the fixture of several tests that is being made."""
    return _now


@dataclass
class Spent:
    """Seconds and fixtures' names by test, which of them failed or was skipped, and which had Ray in its process."""

    seconds: dict[str, float] = field(default_factory=dict)
    fixtures: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    on_ray: list[str] = field(default_factory=list)


def fixture_context(where: str, name: str) -> str:
    """Of the fixture `name` for tests whose ids begin with `where`."""
    return f"fixture {where} {name}"


def uses(context: str, test: str, fixtures: Collection[str]) -> bool:
    """Whether what ran in a context was run for a test that has these fixtures."""
    if not context.startswith("fixture "):
        return context == test
    where, name = context.removeprefix("fixture ").rsplit(" ", 1)
    return name in fixtures and test.startswith(where)


class _Plugin:
    def __init__(self, config: str) -> None:
        import ray

        self._folder = Path(config).parent
        self._coverage = coverage.Coverage(config_file=config)
        self._coverage.start()
        self._spent = Spent()
        self._ray_is_up = ray.is_initialized
        self._ray_begun = False
        begin = ray.init

        def init(*args: Any, **kwargs: Any) -> Any:
            self._ray_begun = True
            return begin(*args, **kwargs)

        ray.init = init

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What shares one Ray comes last: it stays up, and no test beside it is a fast one."""
        items.sort(key=lambda item: RAY in getattr(item, "fixturenames", ()))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        self._spent.fixtures[item.nodeid] = list(getattr(item, "fixturenames", ()))
        self._ray_begun = False
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What several tests share is reached by all of them, not by the one that asked first."""
        before = context_now()
        if fixturedef.scope != "function":
            self._switch(fixture_context(fixturedef.baseid, fixturedef.argname))
        yield
        self._switch(before)

    def _switch(self, context: str) -> None:
        global _now
        _now = context
        self._coverage.switch_context(context)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self._spent
        spent.seconds[report.nodeid] = spent.seconds.get(report.nodeid, 0) + report.duration
        if not report.passed:
            spent.failed.append(report.nodeid)
        if self._ray_begun or (report.when == "call" and self._ray_is_up()):
            spent.on_ray.append(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        (self._folder / SPENT).write_text(json.dumps(asdict(self._spent)))


def pytest_configure(config: pytest.Config) -> None:
    if VARIABLE in os.environ:
        config.pluginmanager.register(_Plugin(os.environ[VARIABLE]))


def coverage_of_rank() -> Any:
    """What a rank of `tests.ranks` starts before its first function: None where nothing is measured."""
    if VARIABLE not in os.environ:
        return None
    measuring = coverage.Coverage(config_file=os.environ[VARIABLE])
    measuring.start()
    return measuring
