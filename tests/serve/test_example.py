"""The example request that `rayrec serve` prints, for schemas with every kind of feature."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.data import Mapping, Schema
from rayrec.models import Batch
from rayrec.serve import Limits, RequestError
from rayrec.serve.example import example_row, request
from rayrec.serve.requests import JSON, Reader
from rayrec.serve.v2 import inputs_of

TYPES = {
    "city": "text",
    "shop": "integer",
    "query": "text",
    "price": "float32",
    "clicks": "number",
    "on": "boolean",
    "at": "time",
    "seen_at": "time",
    "unix_ms": "integer",
    "words": "list<text>",
    "tags": "list<text>",
    "by_city": "map<text, number>",
    "by_shop": "map<integer, integer>",
}
# Name of a derived column: (its spec, whether it is a number, an id, a list or a weighted list)
DERIVED: dict[str, tuple[dict[str, Any], str]] = {
    "price_bucket": ({"kind": "buckets", "column": "price", "boundaries": [1.0, 5.0]}, "id"),
    "no_price": ({"kind": "missing", "column": "price"}, "number"),
    "city_shop": ({"kind": "cross", "columns": ["city", "shop"]}, "id"),
    "words_tags": ({"kind": "cross", "columns": ["words", "tags"]}, "id_list"),
    "hour": ({"kind": "time_part", "column": "at", "part": "hour"}, "id"),
    "weekday": ({"kind": "time_part", "column": "unix_ms", "part": "weekday", "unit": "ms"}, "id"),
    "hours": ({"kind": "age", "column": "seen_at", "at": "at"}, "number"),
    "here": ({"kind": "lookup", "column": "by_city", "key": "city"}, "number"),
    "rome": ({"kind": "lookup", "column": "by_city", "value": "rome"}, "number"),
    "in_shop": ({"kind": "lookup", "column": "by_shop", "key": "shop"}, "id"),
    "rate": ({"kind": "expression", "expression": "log(price) / clicks"}, "number"),
    "tokens": ({"kind": "tokens", "column": "query"}, "id_list"),
    "counted": ({"kind": "tokens", "column": "query", "counts": True}, "weighted_id_list"),
    "common": ({"kind": "overlap", "columns": ["words", "tags"]}, "number"),
    "pairs": ({"kind": "pairs", "column": "by_city"}, "weighted_id_list"),
}
HASH = {"kind": "hash"}


@st.composite
def features(draw: st.DrawFn) -> dict[str, list[dict[str, Any]]]:
    """Features of the columns of the data: their ids are integers or texts, in a vocabulary or not."""
    sparse, dense, sequences = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()

    def ids(name: str, kind: str) -> dict[str, Any]:
        text = draw(st.booleans())
        vocabulary = {"kind": "vocabulary", "path": "texts.txt" if text else "integers.txt", "oov_rows": 0}
        mapping = draw(st.sampled_from([vocabulary, HASH] + ([] if text else [{"kind": "identity"}])))
        feature = {"name": name, "kind": kind, "mapping": mapping, "id_type": "text" if text else "integer"}
        default = {"default": draw(st.sampled_from(["b", "a"] if text else [7, 5]))} if draw(st.booleans()) else {}
        return feature | default

    for number, kind in enumerate(draw(st.lists(st.sampled_from(["id", "id_list", "weighted_id_list"]), max_size=4))):
        sparse.append(ids(f"feature {number}", kind))
        if kind == "weighted_id_list" and draw(st.booleans()):
            sparse[-1]["weight_column"] = f"weights {number}"
        if kind == "id" and draw(st.booleans()):  # a column that two features read
            sparse.append({**sparse[-1], "name": f"again {number}", "mapping": HASH, "column": f"feature {number}"})
    for number, width in enumerate(draw(st.lists(st.integers(1, 3), max_size=3))):
        transforms = draw(st.sampled_from([[], [{"kind": "log1p"}, {"kind": "standardize", "mean": 1.0, "std": 2.0}]]))
        dense.append({"name": f"dense {number}", "width": width, "transforms": transforms})
    if draw(st.booleans()):
        dense.append({"name": "price"})  # a feature, and perhaps an input of derived columns
    for number in range(draw(st.integers(0, 2))):
        names = [f"history {number}{suffix}" for suffix in draw(st.sampled_from(["a", "ab"]))]
        sparse += [ids(name, "id_list") for name in names]
        values = [
            {"name": f"{kind} {number}", "kind": kind, "unit": draw(st.sampled_from(["s", "ms", "us", "ns"]))}
            for kind in draw(st.sampled_from([[], ["time"], ["number"], ["time", "number"]]))
        ]
        sequences.append({"name": f"sequence {number}", "ids": names, "values": values, "length": 2})
    return {"sparse": sparse, "dense": dense, "sequences": sequences}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=features(), derived=st.lists(st.sampled_from([*DERIVED]), unique=True))
def test_the_example_is_accepted_as_it_is_printed(raw: dict[str, Any], derived: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a\nb\n")
    (tmp_path / "integers.txt").write_text("5\n7\n")
    for name in derived:
        spec, kind = DERIVED[name]
        raw.setdefault("derived", []).append({"name": name, **spec})
        feature = {"name": name} if kind == "number" else {"name": name, "kind": kind, "mapping": HASH}
        raw["dense" if kind == "number" else "sparse"].append(feature)
    raw["dense"] = raw["dense"] or [{"name": "x"}]
    needed = Schema.model_validate(raw).feature_columns
    raw["column_types"] = {name: kind for name, kind in TYPES.items() if name in needed and derived}
    (tmp_path / "mapping.json").write_text(json.dumps({"schema": raw}))
    schema = Schema.model_validate(raw).with_paths_from(tmp_path)
    keys = schema.sparse_names
    reader = Reader(Mapping(schema, dict.fromkeys(keys, 20), labels=False), keys, Limits())

    body = shlex.split(request(tmp_path, "http://h"))[-1]
    batch, _ = reader.batch([reader.read(body.encode(), JSON)])
    assert batch.sparse.stride() == 1 and bool(np.isfinite(batch.dense.numpy()).all())
    assert set(example_row(tmp_path)) == set(schema.feature_columns), "what GET /schema lists as columns"
    inputs = {entry["name"].removesuffix(".lengths").removesuffix(".ids") for entry in inputs_of(schema)}
    kinds = schema.column_types
    unsupported = {name for name in schema.feature_columns if kinds.get(name, "").startswith(("time", "map"))}
    assert set(schema.feature_columns) - inputs == unsupported


def test_times_of_a_sequence_are_integers_in_the_open_inference_protocol() -> None:
    values = [{"name": "times", "kind": "time"}, {"name": "stars", "kind": "number"}]
    sequence = {"name": "s", "ids": ["history"], "values": values}
    schema = Schema.model_validate({"sparse": [{"name": "history", "kind": "id_list"}], "sequences": [sequence]})
    datatypes = {entry["name"]: entry["datatype"] for entry in inputs_of(schema)}
    assert (datatypes["times"], datatypes["stars"]) == ("INT64", "FP64")


@pytest.mark.parametrize("keys", [["7", "8"], [7, 8]])
def test_a_map_with_integer_keys_is_an_object_in_json(keys: list[Any]) -> None:
    schema = Schema.model_validate(
        {
            "dense": [{"name": "in_shop"}],
            "derived": [{"name": "in_shop", "kind": "lookup", "column": "by_shop", "key": "shop"}],
            "column_types": {"by_shop": "map<integer, number>", "shop": "integer"},
        }
    )
    mapping = Mapping(schema, {}, labels=False)
    assert mapping.to_batch([{"shop": 8, "by_shop": dict(zip(keys, [0.5, 0.25], strict=True))}]).dense.tolist() == [
        [0.25]
    ]


TIMED = {
    "sparse": [
        {"name": "history", "kind": "id_list", "mapping": {"kind": "hash"}},
        {"name": "item", "mapping": {"kind": "hash"}},
    ],
    "sequences": [{"name": "seen", "ids": ["history"], "values": [{"name": "at", "kind": "time"}]}],
}


@pytest.mark.parametrize("history", [[3, 4], []])
def test_a_history_with_times_may_be_in_the_context(history: list[int]) -> None:
    """An empty one, of a new user, has lists without a type."""
    schema = Schema.model_validate(TIMED)
    reader = Reader(Mapping(schema, {"history": 50, "item": 50}, labels=False), ("history", "item"), Limits())
    context = {"history": history, "at": ["2024-01-01T00:00:00", "2024-01-02T00:00:00"][: len(history)]}
    candidates = [{"item": 1}, {"item": 2}]

    def batch(body: object) -> Batch:
        return reader.batch([reader.read(json.dumps(body).encode(), JSON)])[0]

    apart = batch({"context": context, "candidates": candidates})
    joined = batch({"rows": [{**context, **candidate} for candidate in candidates]})
    assert apart.sparse.keys() == joined.sparse.keys()
    assert apart.sparse.values().tolist() == joined.sparse.values().tolist()
    assert apart.sparse.lengths().tolist() == joined.sparse.lengths().tolist()
    with pytest.raises(RequestError, match="belong together"):
        batch({"context": {"history": history}, "candidates": [{**c, "at": context["at"]} for c in candidates]})
