"""The C++ mapping beside Python's: 100,000 rows of drawn schemas, equal bit by bit, and the same rows refused."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, Mapping, Schema
from rayrec.dynamic_ids import DynamicIds, IdMap, export
from rayrec.inference.export import write_mapping
from rayrec.models import Batch
from tests.inference.cpp import built, needs_cpp

pytestmark = [needs_cpp, pytest.mark.long]

SCHEMAS, REQUESTS, ROWS = 40, 25, 100
WORDS = ["", "a", "seven77", "eight888", "nine 9999", "Zürich", "東京", "x" * 40, '"\\\n', "7"]


@pytest.fixture(scope="module")
def rayrec_map() -> Path:
    return built("rayrec_map")


def ask(program: Path, folder: Path, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = "".join(json.dumps(body) + "\n" for body in bodies)
    done = subprocess.run([program, folder], input=text, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def hash_of(text: str) -> int:
    """The id of a text in maps of dynamic ids."""

    def mixed(number: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            number = (number ^ number >> shift) * factor % 2**64
        return number ^ number >> 31

    raw, start = text.encode(), 0x7E3779B97F4A7C15
    state = mixed((len(raw) + start) % 2**64)
    for at in range(0, len(raw), 8):
        state = mixed(((state ^ int.from_bytes(raw[at : at + 8], "little")) + start) % 2**64)
    return state


class Drawn:
    """A schema with columns that fit it, nearly always."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.makers, self.ids = dict[str, Any](), dict[str, IdMap]()
        dense = [self._dense(f"d{i}") for i in range(self.draw.randrange(4))]
        self.rows_of: dict[str, int] = {}
        sparse = [self._sparse(f"s{i}") for i in range(self.draw.randrange(1, 6))]
        derived = self._derived(dense, sparse)
        sequences = self._sequences(sparse)
        raw = {"dense": dense, "sparse": sparse, "derived": derived, "sequences": sequences}
        number = self.draw.choice(["number", "float32", "float16", "decimal"])
        types = {"t_number": number, "t_text": "text", "t_list": "list<integer>"} if derived else {}
        self.schema = Schema(**raw, column_types=types)
        self.mapping = Mapping(self.schema, self.rows_of, labels=False)
        tables = [{"rows": rows, "features": [name]} for name, rows in self.rows_of.items()]
        write_mapping({"schema": self.schema.model_dump(mode="json"), "tables": tables}, folder, self.ids)

    def row(self) -> dict[str, Any]:
        found = {name: make() for name, make in self.makers.items()}
        for names in self.together:
            size = self.draw.randrange(6)
            found |= {name: [make() for _ in range(size)] for name, make in names.items()}
        return found

    def _dense(self, name: str) -> dict[str, Any]:
        draw, width = self.draw, self.draw.choice([1, 1, 1, 3])
        steps: list[dict[str, Any]] = [
            {"kind": "clip", "lowest": draw.choice([None, -3.5]), "highest": 1e6},
            {"kind": "standardize", "mean": draw.gauss(0, 10), "std": draw.uniform(0.1, 20)},
            {"kind": "min_max", "lowest": -7.25, "highest": draw.uniform(0, 90)},
            {"kind": "quantile", "boundaries": sorted({draw.gauss(0, 40) for _ in range(draw.randrange(2, 30))})},
            {"kind": "log1p"},
        ]
        default = draw.choice([None, 0.0, 1.5])
        chosen = draw.sample(steps, draw.randrange(3))
        kinds = [
            lambda: draw.gauss(0, 50),
            lambda: draw.randrange(-(2**40), 2**40),
            lambda: draw.random() * 10 ** draw.randrange(-12, 38),
        ]
        if any(step["kind"] == "log1p" for step in chosen):
            chosen.insert(0, {"kind": "clip", "lowest": -0.5})
        make = draw.choice(kinds)
        null = 0.03 if default is not None else 0.0005

        def one() -> Any:
            return None if draw.random() < null else draw.choice([1e39, 2**63]) if draw.random() < 2e-5 else make()

        self.makers[name] = (
            one if width == 1 else lambda: [one() for _ in range(width if draw.random() < 0.9995 else 2)]
        )
        return {"name": name, "width": width, "default": default, "transforms": chosen}

    def _sparse(self, name: str) -> dict[str, Any]:
        draw = self.draw
        kind = draw.choice(["id", "id", "id_list", "id_list", "weighted_id_list"])
        law = draw.choice(["identity", "hash", "vocabulary", "dynamic"])
        text = law != "identity" and draw.random() < 0.5
        rows = draw.choice([3, 1000, 2**20 + 7, 2**31 + 9, 2**33 + 1]) if law == "hash" else 50
        self.rows_of[name] = rows
        on_null = draw.choice(["error", "empty", "default"])
        default = None if on_null != "default" else draw.choice(WORDS) if text else draw.randrange(50)
        mapping: dict[str, Any] = {"kind": law}
        if law == "identity":
            mapping["bounds"] = draw.choice(["error", "clip", "drop"])
        if law == "hash":
            mapping |= {"seed": draw.choice([0, 1, 2**40]), "text_law": draw.choice([None, 1, 2])}
        if law == "dynamic":
            mapping |= {"path": self._ids(name, text), "unseen": draw.choice(["hashed", "zero"])}
        if law == "vocabulary":
            mapping |= {"oov_rows": draw.choice([0, 1, 7]), "path": self._vocabulary(name, text)}
            mapping["spread_over"] = draw.choice([None, 0, 5, 20, 40, 47, 50])
            if mapping["oov_rows"] == 0 and default is not None:
                default = WORDS[1] if text else 1
        weird = (
            0.2
            if law in ("hash", "dynamic") or mapping.get("oov_rows") or mapping.get("bounds") in ("clip", "drop")
            else 0.0005
        )

        def one() -> Any:
            if draw.random() < (0.03 if on_null != "error" else 0.0005):
                return None
            if text:
                return str(draw.getrandbits(60)) if draw.random() < weird else draw.choice(WORDS[1:4])
            return draw.choice([-1, 51, 2**32, -(2**63), 2**63 - 1]) if draw.random() < weird else draw.randrange(1, 20)

        def some(make: Any) -> Any:
            return (
                None
                if draw.random() < (0.03 if on_null != "error" else 0.0005)
                else [make() for _ in range(draw.randrange(7))]
            )

        found = {"name": name, "kind": kind, "mapping": mapping, "on_null": on_null, "default": default}
        found["id_type"] = draw.choice([None, "text" if text else "integer"])
        if kind == "id":
            self.makers[name] = one
            return found
        found |= {"max_length": draw.choice([None, 1, 4]), "keep": draw.choice(["first", "last"])}
        weight = lambda: draw.choice([1, draw.gauss(0, 2), 1e39 if draw.random() < 1e-4 else 0.25])  # noqa: E731
        if kind == "weighted_id_list":
            self.makers[name] = lambda: some(
                lambda: None if draw.random() < 3e-4 else {"id": one(), "weight": weight()}
            )
        else:
            self.makers[name] = lambda: some(one)
        return found

    def _ids(self, name: str, text: bool) -> str:
        """A map that has rows for some of the ids."""
        own = self.ids[name] = IdMap(DynamicIds(rows=50))
        known = [hash_of(word) for word in WORDS[1:3]] if text else [*range(1, 12), -1, -(2**63)]
        own.step(np.array([key % 2**64 for key in known], np.uint64).view(np.int64), 1)
        export(own, self.folder / f"{name}.bin")
        return str(self.folder / f"{name}.bin")

    def _vocabulary(self, name: str, text: bool) -> str:
        path = self.folder / f"{name}.{self.draw.choice(['txt', 'parquet'])}"
        ids: list[Any] = [f"w{i}" for i in range(30)] + WORDS[1:4] if text else [*range(1, 30), -(2**63)]
        if path.suffix == ".txt":
            path.write_text("\n".join(map(str, ids)))
        else:
            pq.write_table(pa.table({"id": ids}), path)
        return str(path)

    def _derived(self, dense: list[dict[str, Any]], sparse: list[dict[str, Any]]) -> list[dict[str, Any]]:
        draw = self.draw
        if draw.random() < 0.5:
            return []
        self.makers |= {
            "t_number": lambda: None if draw.random() < 0.05 else draw.choice([3, draw.gauss(0, 100)]),
            "t_text": lambda: None if draw.random() < 0.05 else draw.choice(WORDS),
            "t_list": lambda: (
                None if draw.random() < 0.05 else [draw.choice([None, 7, -5, 2**50]) for _ in range(draw.randrange(4))]
            ),
        }
        edges = draw.choice([{"boundaries": [-50.0, 0.0, 3.0, 70.5]}, {"log_base": 1.7, "buckets": 9}])
        hashed = {"mapping": {"kind": "hash"}, "on_null": "empty"}
        sparse += [
            {"name": "bucket", "on_null": "default", "default": 0},
            {"name": "gone"},
            {"name": "crossed", **hashed},
            {"name": "crossed_list", "kind": "id_list", **hashed},
        ]
        self.rows_of |= {"bucket": 12, "gone": 2, "crossed": 999, "crossed_list": 2**31}
        return [
            {"kind": "buckets", "name": "bucket", "column": "t_number", **edges},
            {"kind": "missing", "name": "gone", "column": "t_list"},
            {"kind": "cross", "name": "crossed", "columns": ["t_text", "bucket"]},
            {"kind": "cross", "name": "crossed_list", "columns": ["t_list", "t_text", "t_list"]},
        ]

    def _sequences(self, sparse: list[dict[str, Any]]) -> list[dict[str, Any]]:
        draw = self.draw
        self.together: list[dict[str, Any]] = []
        if draw.random() < 0.6:
            return []
        sparse += [{"name": f"q{i}", "kind": "id_list", "mapping": {"kind": "hash", "seed": i}} for i in range(2)]
        self.rows_of |= {"q0": 77, "q1": 2**32}
        number = lambda: draw.randrange(-9, 9)  # noqa: E731
        self.together = [{"q0": number, "q1": number, "qn": number}]
        values = [{"name": "qn"}]
        order = draw.choice(["oldest_first", "newest_first"])
        return [{"name": "q", "ids": ["q0", "q1"], "values": values, "length": draw.choice([None, 3]), "order": order}]


def test_a_hundred_thousand_rows_are_mapped_as_python_maps_them(rayrec_map: Path, tmp_path: Path) -> None:
    rows = refused = columns_refused = 0
    for seed in range(SCHEMAS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        drawn = Drawn(seed, folder)
        requests = [[drawn.row() for _ in range(ROWS)] for _ in range(REQUESTS)]
        bodies: list[dict[str, Any]] = [{"rows": request} for request in requests]
        bodies[0] = {"rows": {name: [row[name] for row in requests[0]] for name in requests[0][0]}}
        for place, found in enumerate(ask(rayrec_map, folder, bodies)):
            where = f"schema {seed}, request {place}"
            rows += ROWS
            try:
                batch, errors = drawn.mapping.to_batch_and_errors(requests[place])
            except DataError as error:
                assert found.get("errors", [{}])[0].get("column") == error.column, (where, str(error), found)
                columns_refused += 1
                continue
            if errors:
                theirs = [(one["row"], one["column"], one["problem"]) for one in found["errors"]]
                ours = [(row, error.column, error.problem) for row, error in sorted(errors.items())[:20]]
                assert theirs == ours, where
                refused += len(errors)
                requests[place] = [row for at, row in enumerate(requests[place]) if at not in errors]
                (found,) = ask(rayrec_map, folder, [{"rows": requests[place]}])
                batch = drawn.mapping.to_batch(requests[place])
            assert_equal(found, batch, drawn.schema, where)
    assert rows == 100_000 and refused > 100 and columns_refused > 0, (rows, refused, columns_refused)


def assert_equal(found: dict[str, Any], batch: Batch, schema: Schema, where: str) -> None:
    at = 0
    for feature in schema.dense:
        theirs = np.array([float(one) for one in found["dense"][feature.name]], np.float32)
        ours = batch.dense[:, at : at + feature.width].reshape(-1).numpy()
        np.testing.assert_array_equal(theirs.view(np.int32), ours.view(np.int32), f"{where}: {feature.name}")
        at += feature.width
    for name in schema.sparse_names:
        bags, jagged = found["sparse"][name], batch.sparse[name]
        np.testing.assert_array_equal(bags["ids"], jagged.values().numpy(), f"{where}: {name}")
        np.testing.assert_array_equal(np.diff(bags["offsets"]), jagged.lengths().numpy(), f"{where}: {name}")
        if bags["weights"]:
            theirs = np.array([float(one) for one in bags["weights"]], np.float32)
            np.testing.assert_array_equal(theirs, jagged.weights().numpy(), f"{where}: {name}")


def test_rows_of_nothing_but_nulls_and_empty_lists_are_mapped_alike(rayrec_map: Path, tmp_path: Path) -> None:
    """Each row is a request: nothing says which types its columns have."""
    hashed = {"mapping": {"kind": "hash"}}
    schema = Schema(
        dense=[{"name": "d", "default": 2.5}, {"name": "wide", "width": 2, "default": 1.5}],
        sparse=[
            {"name": "one", "id_type": "text", "default": "x", **hashed},
            {"name": "list", "kind": "id_list", "default": 3, **hashed},
            {"name": "pairs", "kind": "weighted_id_list", "on_null": "empty", **hashed},
            {"name": "ids", "kind": "weighted_id_list", "weight_column": "weights", "on_null": "empty", **hashed},
        ],
    )
    rows_of = {"one": 10, "list": 10, "pairs": 10, "ids": 10}
    tables = [{"rows": 10, "features": list(rows_of)}]
    write_mapping({"schema": schema.model_dump(mode="json"), "tables": tables}, tmp_path)
    some: list[Any] = [None, [], [None]]
    weights: list[Any] = [(None, None), ([], []), (None, []), ([None], [1])]
    numbers: list[dict[str, Any]] = [{"d": None, "wide": None, "one": None}, {"d": 1, "wide": [None, 1], "one": "y"}]
    rows = [
        {**number, "list": ids, "pairs": pairs, "ids": weighted[0], "weights": weighted[1]}
        for number in numbers
        for ids in some
        for pairs in some
        for weighted in weights
    ]
    mapping = Mapping(schema, rows_of, labels=False)
    for row, found in zip(rows, ask(rayrec_map, tmp_path, [{"rows": [row]} for row in rows]), strict=True):
        assert_equal(found, mapping.to_batch([row]), schema, str(row))


@pytest.mark.parametrize(("name", "dtype"), [("float16", np.float16), ("float32", np.float32), ("number", np.float64)])
def test_numbers_are_rounded_to_the_width_of_training(rayrec_map: Path, tmp_path: Path, name: str, dtype: Any) -> None:
    draw = random.Random(0)
    makers = [lambda: draw.gauss(0, 1), lambda: draw.uniform(-7e4, 7e4), lambda: draw.uniform(-1e-7, 1e-7)]
    numbers = [0.99, 9.99, 65519.9, 65520.0, 2.9e-8, 3e-8, -0.0, *(draw.choice(makers)() for _ in range(3000))]
    with np.errstate(over="ignore"):
        narrow = np.array(numbers, dtype).astype(np.float64)
    edges = np.unique(narrow[np.isfinite(narrow)])[::2].tolist()
    derived = [{"kind": "buckets", "name": f"{x}_bucket", "column": x, "boundaries": edges} for x in ("x", "xs")]
    sparse = [{"name": "x_bucket"}, {"name": "xs_bucket", "kind": "id_list"}]
    types = {"x": name, "xs": f"list<{name}>"}
    schema = Schema.model_validate({"sparse": sparse, "derived": derived, "column_types": types})
    rows_of = {"x_bucket": 5000, "xs_bucket": 5000}
    tables = [{"rows": 5000, "features": list(rows_of)}]
    write_mapping({"schema": schema.model_dump(mode="json"), "tables": tables}, tmp_path)
    rows = [{"x": number, "xs": [number, number]} for number in numbers]
    (found,) = ask(rayrec_map, tmp_path, [{"rows": rows}])
    assert found["sparse"]["x_bucket"]["ids"] == np.searchsorted(edges, narrow, side="right").tolist()
    assert_equal(found, Mapping(schema, rows_of, labels=False).to_batch(rows), schema, name)


def test_rounded_ids_and_times_in_another_unit_are_refused_alike(rayrec_map: Path, tmp_path: Path) -> None:
    values = [{"name": "at", "kind": "time", "unit": "ms"}]
    schema = Schema.model_validate(
        {
            "sparse": [{"name": "user", "mapping": {"kind": "hash"}}, {"name": "item", "kind": "id_list"}],
            "sequences": [{"name": "history", "ids": ["item"], "values": values}],
        }
    )
    rows_of = {"user": 9, "item": 9}
    write_mapping({"schema": schema.model_dump(mode="json"), "tables": [{"rows": 9, "features": [*rows_of]}]}, tmp_path)
    mapping = Mapping(schema, rows_of, labels=False)
    good = {"user": 5.0, "item": [1], "at": [1_700_000_000_000]}
    rows = [good, good | {"user": 2.0**60}, good | {"at": [1_700_000_000 * 10**9]}, good | {"at": [-1]}]
    for row, found in zip(rows, ask(rayrec_map, tmp_path, [{"rows": [row]} for row in rows]), strict=True):
        if row is good:
            assert_equal(found, mapping.to_batch([row]), schema, str(row))
            continue
        with pytest.raises(DataError) as refused:
            mapping.to_batch([row])
        (theirs,) = found["errors"]
        assert (theirs["column"], theirs["problem"]) == (refused.value.column, refused.value.problem)
        assert theirs["value"] == refused.value.value


@pytest.mark.parametrize(
    ("at", "problem"),
    [(0, "not an exported map"), (16, "version 9"), (24, "damaged"), (200, "too few rows"), (64, "damaged")],
)
def test_a_damaged_map_of_dynamic_ids_is_told(rayrec_map: Path, tmp_path: Path, at: int, problem: str) -> None:
    own, rows = IdMap(DynamicIds(rows=64)), 8 if problem == "too few rows" else 64
    schema = {"sparse": [{"name": "user", "mapping": {"kind": "dynamic"}}]}
    write_mapping({"schema": schema, "tables": [{"rows": rows, "features": ["user"]}]}, tmp_path, {"user": own})
    (file,) = (tmp_path / "ids").iterdir()
    raw = bytearray(file.read_bytes())
    raw[at] = 9
    if at == 64:  # no buckets, and the right size for that
        raw[24:] = bytes(8) + raw[32:64]
    file.write_bytes(raw)
    done = subprocess.run([rayrec_map, tmp_path], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and problem in done.stderr


def test_inputs_of_the_protocol_are_those_of_the_export(rayrec_map: Path, tmp_path: Path) -> None:
    """An export of an earlier release, without the list, has inputs of the same names, for columns that are read."""
    for seed in range(SCHEMAS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        columns = Drawn(seed, folder).schema.feature_columns
        raw, found = json.loads((folder / "mapping.json").read_text()), list[Any]()
        for earlier in (False, True):
            if earlier:
                expected = raw.pop("inputs")
                (folder / "mapping.json").write_text(json.dumps(raw))
            done = subprocess.run([rayrec_map, folder, "--inputs"], stdout=subprocess.PIPE, check=True, timeout=60)
            found.append(json.loads(done.stdout))
        assert found[0] == expected
        names = [entry["name"] for entry in expected]
        read = {name for name in names if name in columns or name.rpartition(".")[0] in columns}
        assert {entry["name"] for entry in found[1]} == read, seed
