"""What is given by name alone, and what need not be given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rayrec.train import Interrupted, Result, Trainer, evaluate_run, export_run
from rayrec.train.after.export import exported_run
from rayrec.train.driver.resources import Demand, Supply
from rayrec.train.planning.shapes import Shape, compare
from rayrec.train.report.run import RunRecord
from rayrec.train.report.svg import Chart, Mark
from rayrec.train.setup.groups import Decision
from rayrec.train.setup.init_from import WarmStart
from rayrec.train.terminal import plan_table
from rayrec.train.tune import Search, Trial
from rayrec.train.worker.guards import Best
from rayrec.train.worker.machine import Machine
from rayrec.train.worker.position import Position
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.watch import Watch


@pytest.mark.parametrize(
    "made",
    [Best, Chart, Decision, Demand, Job, Machine, Mark, Position, Result, RunRecord, Search, Session, Shape,
     Supply, Trial, WarmStart],
)  # fmt: skip
def test_fields_that_could_be_taken_for_each_other_are_given_by_name(made: type) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(made).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


NONE: dict[str, Any] = dict.fromkeys(("factory", "display", "data"))


@pytest.mark.parametrize(
    ("called", "wanted"),
    [
        (
            Trainer,
            {**dict.fromkeys(("factory", "root", "display")), "fresh": False, "allow_code": False, "callbacks": ()},
        ),
        (Result, {"recoveries": 0, "ended": None, "warnings": (), "best": None, "test": None}),
        (Interrupted, {"signal": 2}),
        (evaluate_run, {**NONE, "num_workers": 0, "allow_code": False, "checkpoint": "newest"}),
        (export_run, {"wanted": None, "data": None, "factory": None, "allow_code": False, "checkpoint": "newest"}),
        (exported_run, {"allow_code": False, "checkpoint": "newest", "tell": None}),
        (compare, {"scaling": "strong"}),
        (plan_table, {"limit": 60}),
        (
            Search,
            {**dict.fromkeys(("concurrent", "grace", "track")), "trials": 10, "metric": "auc", "seed": 0}
            | {"algorithm": "random", "lower": False},
        ),
        (Trial, {"error": None}),
    ],
)
def test_what_need_not_be_given(called: Callable[..., Any], wanted: dict[str, Any]) -> None:
    given = inspect.signature(called).parameters.values()
    assert {one.name: one.default for one in given if one.default is not inspect.Parameter.empty} == wanted


def test_ranks_compare_where_they_wait_after_five_seconds() -> None:
    assert inspect.signature(Watch).parameters["suspicious_s"].default == 5.0
