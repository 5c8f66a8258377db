"""What callers of the library pass by name alone, and what they may leave out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rayrec.train import Interrupted, Result, RunInfo, Trainer, evaluate_run, export_run
from rayrec.train.tune import Search, Trial


@pytest.mark.parametrize("made", [Result, RunInfo, Search, Trial])
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
        (Result, {"recoveries": 0, "ended": None, "limit": None, "warnings": (), "best": None, "test": None}),
        (Interrupted, {"signal": 2}),
        (evaluate_run, {**NONE, "num_workers": 0, "allow_code": False, "checkpoint": "newest"}),
        (export_run, {"wanted": None, "data": None, "factory": None, "allow_code": False, "checkpoint": "newest"}),
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
