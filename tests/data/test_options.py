"""What is meant where nothing is said, and the ends of what is allowed: they stand in users' configs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from data.synthetic.clicks import SyntheticSpec
from rayrec.data import (
    BadRows,
    BatchStream,
    Cursor,
    DataError,
    DataSet,
    DenseFeature,
    Hash,
    Layout,
    Manifest,
    Mapping,
    MixedStream,
    ReadOptions,
    Shuffle,
    SparseFeature,
    Standardize,
    Task,
    TextOptions,
    Vocabulary,
    WeightedDataSet,
)
from rayrec.data import inspect as look_at
from rayrec.data.mapping.transforms import Clip

NAMED = {"name": "x"}
DEFAULTS: list[tuple[Any, dict[str, Any]]] = [
    (BadRows(), {"policy": "error", "limit": 1000, "samples": 20, "redact": False}),
    (Shuffle(), {"windows": 1, "rows": 65_536}),
    (
        ReadOptions(),
        {
            "reader": "auto",
            "cpus_per_read": 0.25,
            "concurrent_reads": 2,
            "prefetch_batches": 4,
            "label_selector": None,
            "retries": 3,
            "patience_s": 60.0,
            "stall_timeout_s": 120.0,
            "text": TextOptions().model_dump(),
            "bad_rows": BadRows().model_dump(),
        },
    ),
    (
        SyntheticSpec(),
        {
            "rows": 1_000_000,
            "files": 8,
            "row_group_rows": 65_536,
            "single": 20,
            "multi": 6,
            "dense": 13,
            "smallest": 10,
            "largest": 1_000_000,
            "max_list": 7,
            "positives": 0.25,
            "signal": 1.0,
            "seed": 0,
        },
    ),
    (Hash(), {"kind": "hash", "seed": 0, "text_law": None}),
    (Vocabulary(path="v"), {"kind": "vocabulary", "path": "v", "oov_rows": 1, "spread_over": None}),
]


@pytest.mark.parametrize(("model", "values"), DEFAULTS, ids=lambda value: type(value).__name__)
def test_what_is_meant_where_nothing_is_said(model: BaseModel, values: dict[str, Any]) -> None:
    assert model.model_dump() == values


def test_what_calls_mean_where_nothing_is_said() -> None:
    assert (Task(**NAMED).weight, DenseFeature(**NAMED).width, WeightedDataSet(path="p").weight) == (1, 1, 1)
    assert Cursor.start(2) == Cursor(epoch=2, parts=(), given=0, skipped=0)
    assert Layout() == Layout(rows_per_file=4 << 20, row_group_rows=1 << 17)
    of_stream = {name: one.default for name, one in inspect.signature(BatchStream).parameters.items()}
    meant = {"shuffle": True, "negative_rate": 1.0, "passes": 1, "interleave": 1}
    assert {name: of_stream[name] for name in meant} == meant
    assert inspect.signature(look_at).parameters["sample_rows"].default == 500_000


BY_NAME = [BatchStream, MixedStream, Manifest.read, Mapping, Mapping.from_config, DataError]


@pytest.mark.parametrize("call", BY_NAME)
def test_options_of_calls_are_given_by_name_and_the_others_either_way(call: Any) -> None:
    kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
    assert set(kinds) == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


ENDS: list[tuple[type[BaseModel], dict[str, Any], dict[str, tuple[Any, Any]]]] = [  # of each: allowed, refused
    (BadRows, {}, {"limit": (0, -1), "samples": (0, -1)}),
    (Shuffle, {}, {"windows": (1, 0), "rows": (1, 0)}),
    (
        ReadOptions,
        {},
        {
            "cpus_per_read": (0.0, -0.001),
            "concurrent_reads": (1, 0),
            "prefetch_batches": (1, 0),
            "retries": (0, -1),
            "patience_s": (0.0, -0.001),
            "stall_timeout_s": (0.001, 0.0),
        },
    ),
    (
        SyntheticSpec,
        {},
        {
            **dict.fromkeys(("rows", "files", "row_group_rows", "smallest", "largest"), (1, 0)),
            **dict.fromkeys(("single", "multi", "dense", "max_list"), (0, -1)),
            "signal": (0.0, -0.001),
        },
    ),
    (SyntheticSpec, {}, {"positives": (0.001, 0.0)}),
    (SyntheticSpec, {}, {"positives": (0.999, 1.0)}),
    (DataSet, {"path": "p", "table": "delta"}, {"version": (0, -1)}),
    (WeightedDataSet, {"path": "p"}, {"weight": (0.001, 0.0)}),
    (Vocabulary, {"path": "v"}, {"oov_rows": (0, -1)}),
    (Task, NAMED, {"weight": (0.001, 0.0), "name": ("y", ""), "column": ("y", "")}),
    (DenseFeature, NAMED, {"width": (1, 0), "default": (0.0, float("inf"))}),
    (SparseFeature, {**NAMED, "kind": "id_list"}, {"max_length": (1, 0)}),
    (SparseFeature, {**NAMED, "kind": "id"}, {"max_length": (None, 1), "weight_column": (None, "w")}),
    (Standardize, {"mean": 0.0}, {"std": (0.001, 0.0)}),
    (Clip, {"lowest": 1.0}, {"highest": (1.0, 0.999)}),
    (Clip, {}, {"lowest": (0.0, None)}),
    (Clip, {}, {"highest": (0.0, None)}),
]


@pytest.mark.parametrize(("model", "rest", "ends"), ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_ends_of_what_is_allowed(
    model: type[BaseModel], rest: dict[str, Any], ends: dict[str, tuple[Any, Any]]
) -> None:
    for name, (allowed, refused) in ends.items():
        model.model_validate({**rest, name: allowed})
        with pytest.raises(ValidationError):
            model.model_validate({**rest, name: refused})


def test_options_say_what_follows_from_them() -> None:
    assert BadRows(samples=0).described == 1 and BadRows(samples=5).described == 5
    assert BadRows(policy="skip", samples=0).described == 0
    assert ReadOptions(patience_s=7.0, stall_timeout_s=5.0).longest_wait_s == 12


def test_models_are_strict() -> None:
    options = Shuffle()
    for wrong in ({"window": 2}, {"windows": "2"}, {"windows": 2.0}):
        with pytest.raises(ValidationError) as caught:
            Shuffle.model_validate(wrong)
        assert "input_value" not in str(caught.value), "values may be secrets"
    with pytest.raises(ValidationError):
        options.rows = 3
