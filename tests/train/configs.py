"""Every kind of config, with small data of its shape: those of the repository, of `rayrec init`, and drawn ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.train import parse_config
from tests.cli.test_init import census, ratings
from tests.test_readme import ROOT, blocks

NEWEST = 1_700_000_000  # seconds; all times of rows lie before
EPOCH_ROWS, EVAL_ROWS, BATCH = 96, 40, 8

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "data").glob("*/*.yaml"))
GUIDES = ["histories", "several-tasks"]
NOTEBOOKS = ["own_data", "own_model"]


def of_repository(name: str) -> dict[str, Any]:
    """The plain values of a config in `data/`."""
    raw: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return raw


def of_guide(name: str) -> dict[str, Any]:
    """The config in a guide."""
    (text,) = blocks("yaml", ROOT / "docs" / "guides" / f"{name}.md")
    raw: dict[str, Any] = yaml.safe_load(text)
    return raw


def of_notebook(name: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """The config that a notebook makes, and its own model, if it has one."""
    names: dict[str, Any] = {"folder": folder}
    for cell in nbformat.read(ROOT / "jobs" / "notebooks" / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code" and ("config = TrainConfig(" in cell.source or "(nn.Module)" in cell.source):
            exec(compile(cell.source, name, "exec"), names)
    return names["config"].to_dict(), names.get("TwoSides")


class Rows:
    """Drawn columns for a config."""

    def __init__(self, raw: dict[str, Any], rows: int, seed: int, folder: Path) -> None:
        self._random, self._rows, self._folder = np.random.default_rng(seed), rows, folder
        self._columns: dict[str, Any] = {}
        self._table_rows = {name: table["rows"] for table in raw["tables"] for name in table["features"]}
        self._raw, self._schema = raw, parse_config(raw).data_schema

    def table(self) -> pa.Table:
        """All columns that the config reads."""
        schema = self._schema
        for task in schema.tasks:
            self._columns[task.column] = self._label(task)
        for part in (schema.sample_weight, schema.group, schema.timestamp):
            if part is not None:
                self._columns[part.column] = self._integers(9) + (NEWEST - 9 if part is schema.timestamp else 0)
        for sequence in schema.sequences:
            self._sequence(sequence, {feature.name: feature for feature in schema.sparse})
        for spec in schema.derived:
            self._derived(spec)
        derived = {spec.name for spec in schema.derived}
        for number in schema.dense:
            if number.column not in self._columns and number.column not in derived:
                self._columns[number.column] = self._numbers(number.width)
        for feature in schema.sparse:
            if feature.column not in self._columns and feature.column not in derived:
                self._columns[feature.column] = self._sparse(feature)
            if feature.weight_column is not None:
                lengths = [len(ids) for ids in self._columns[feature.column].to_pylist()]
                self._columns[feature.weight_column] = [[0.5] * count for count in lengths]
        return pa.table(self._columns)

    def _integers(self, high: int) -> np.ndarray[Any, Any]:
        return self._random.integers(0, high, self._rows)

    def _numbers(self, width: int = 1) -> pa.Array:
        values = self._random.gamma(2.0, size=(self._rows, width)).astype(np.float32)
        return pa.array(values[:, 0]) if width == 1 else pa.FixedSizeListArray.from_arrays(values.ravel(), width)

    def _label(self, task: Any) -> Any:
        if task.kind == "number" or task.at_least is not None:
            return self._random.normal(size=self._rows) + (task.at_least or 0)
        ones = self._integers(2)
        if isinstance(task.positive, str):
            return [task.positive if one else task.negative or "other" for one in ones]
        return ones if task.positive is None else np.where(ones, task.positive, (task.negative or 0))

    def _ids(self, feature: Any, count: int) -> list[Any]:
        if feature.mapping.kind == "vocabulary":
            ids = pq.read_table(feature.mapping.path).column(0).to_pylist()
            return [ids[i] for i in self._random.integers(0, len(ids), count)]
        high = self._table_rows[feature.name] if feature.mapping.kind == "identity" else 10_000
        ids = self._random.integers(0, high, count).tolist()
        return [f"id {i}" for i in ids] if feature.mapping.kind == "hash" and feature.mapping.seed % 2 else ids

    def _lists(self, feature: Any, lengths: Any) -> pa.Array:
        ids = self._ids(feature, int(sum(lengths)))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        kind = pa.list_(pa.string() if ids and isinstance(ids[0], str) else pa.int64())
        return pa.array([ids[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)], kind)

    def _sparse(self, feature: Any) -> pa.Array:
        if feature.kind == "id":
            return pa.array(self._ids(feature, self._rows))
        lists = self._lists(feature, self._random.integers(1, 4, self._rows))
        if feature.kind == "weighted_id_list" and feature.weight_column is None:
            pairs = [[{"id": one, "weight": 0.5} for one in ids] for ids in lists.to_pylist()]
            return pa.array(pairs, pa.list_(pa.struct([("id", lists.type.value_type), ("weight", pa.float32())])))
        return lists

    def _sequence(self, sequence: Any, features: dict[str, Any]) -> None:
        lengths = self._random.integers(1, 5, self._rows)
        for name in sequence.ids:
            self._columns[features[name].column] = self._lists(features[name], lengths)
        for values in sequence.values:
            drawn = [[NEWEST - 60 * i for i in range(count, 0, -1)] for count in lengths]
            kind = pa.int64() if values.kind == "time" else pa.float32()
            self._columns[values.column_name] = pa.array(drawn, pa.list_(kind))

    def _derived(self, spec: Any) -> None:
        makers = {
            "buckets": self._numbers,
            "expression": self._numbers,
            "missing": lambda: pa.array([None if i % 3 == 0 else 1.5 for i in range(self._rows)]),
            "cross": lambda: pa.array([f"part {i}" for i in self._integers(5)]),
            "time_part": lambda: self._integers(86_400) + NEWEST,
            "age": lambda: NEWEST - self._integers(86_400),
            "tokens": lambda: pa.array([f"Some words {i}" for i in self._integers(6)]),
        }
        for column in spec.inputs:
            made = {derived.name for derived in self._schema.derived}
            if column not in self._columns and column not in made:
                self._columns[column] = makers[spec.kind]()
        if spec.kind == "age":
            self._columns[spec.at] = np.full(self._rows, NEWEST)


def shop(path: Path) -> Path:
    """The smallest: a number, a text and a label."""
    rows = [f"{i % 97 + 0.5},{('paris', 'rome', 'oslo')[i % 3]},{int(i % 5 == 0)}" for i in range(600)]
    path.write_text("\n".join(["amount,city,bought", *rows]) + "\n")
    return path


def wide_census(path: Path) -> Path:
    """42 columns without names, numbers and texts in turn, and the label a text."""
    rows = [
        ", ".join([*(str((i * 7 + c) % 90) if c % 2 else f"kind {(i + c) % 6}" for c in range(41)),
                   "50000+." if i % 4 == 0 else "- 50000."])
        for i in range(400)
    ]  # fmt: skip
    path.write_text("\n".join(rows) + "\n")
    return path


# How a file is written into a folder, and its label.
INIT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "shop": (lambda folder: shop(folder / "shop.csv"), "bought"),
    "wide": (lambda folder: wide_census(folder / "wide.csv"), "c41=50000+."),
    "census": (lambda folder: census(folder / "census.csv.gz"), "c6=50000+."),
    "ratings": (lambda folder: ratings(folder / "ratings.csv.gz"), "rating>=4"),
}


def init(data: Path, label: str) -> dict[str, Any]:
    """The config that `rayrec init` writes for a file or a folder, with a few steps."""
    with contextlib.chdir(data.parent):
        assert run(["init", data.name, "--label", label, "--name", "begun"]) == 0
    raw = few_steps(yaml.safe_load((data.parent / "begun.yaml").read_text()))
    for field in ("train", "eval"):
        if isinstance(raw["data"][field], str):  # else the file itself, divided by a filter
            raw["data"][field] = str(data.parent / raw["data"][field])
    raw["trainer"]["batch_size"] = 64
    raw["storage"]["path"] = str(data.parent / "runs")
    return raw


def of_init(kind: str, folder: Path) -> dict[str, Any]:
    """The config that `rayrec init` writes for a file of this kind, which is written below a folder."""
    write, label = INIT[kind]
    return init(write(folder), label)


def with_data(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config with small data of its shape below a folder, small tables, and a few steps in this process."""
    raw = copy.deepcopy(raw)
    for table in raw["tables"]:
        table["rows"] = min(table["rows"], 2000)
    for feature in raw["schema"]["sparse"]:
        if (path := feature.get("mapping", {}).get("path")) is not None and not Path(path).exists():
            folder.mkdir(parents=True, exist_ok=True)
            feature["mapping"]["path"] = vocabulary(folder)
    period = raw["data"].get("progressive")
    if period is not None:
        for value in range(3):
            _write(raw, folder / "train" / f"{period}={value}", EPOCH_ROWS // 2, value)
        raw["data"]["train"] = str(folder / "train")
    elif isinstance(raw["data"]["train"], list):
        for number, part in enumerate(raw["data"]["train"]):
            part["path"] = str(_write(raw, folder / f"train-{number}", EPOCH_ROWS // 2, number))
    else:
        raw["data"]["train"] = str(_write(raw, folder / "train", EPOCH_ROWS, 7))
    if period is None:
        for number, part in enumerate(("eval", *{"test"}.intersection(raw["data"]))):
            raw["data"][part] = str(_write(raw, folder / part, EVAL_ROWS, 8 + number))
    return few_steps(raw)


def few_steps(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with batches and epochs for about a dozen steps in this process."""
    trainer = {name: value for name, value in raw.get("trainer", {}).items() if name != "early_stopping"}
    few = {"num_workers": 0, "batch_size": BATCH, "epochs": 1, "threads_per_worker": 1, "log_every": 1}
    data = {**raw["data"], "read": {"reader": "local"}}
    return {**raw, "data": data, "trainer": {**trainer, **few}, "storage": {"path": "runs"}}


def _write(raw: dict[str, Any], folder: Path, rows: int, seed: int) -> Path:
    folder.mkdir(parents=True)
    pq.write_table(Rows(raw, rows, seed, folder).table(), folder / "part-0.parquet", row_group_size=16)
    return folder


def vocabulary(folder: Path) -> str:
    """The path of a vocabulary of texts."""
    path = folder / "vocabulary.parquet"
    pq.write_table(pa.table({"id": [f"word {i}" for i in range(20)]}), path)
    return str(path)


DERIVED: list[dict[str, Any]] = [
    {"kind": "buckets", "column": "amount", "boundaries": [0.5, 1.0, 2.0]},
    {"kind": "missing", "column": "note"},
    {"kind": "cross", "columns": ["left", "right"]},
    {"kind": "time_part", "column": "shown_at"},
    {"kind": "age", "column": "made_at", "at": "asked_at"},
    {"kind": "expression", "expression": "price * 2 + log1p(cost)"},
    {"kind": "tokens", "column": "title"},
]
NUMBERS = {"age", "expression"}  # derived columns that are numbers; others are ids
TRANSFORMS: list[list[dict[str, Any]]] = [
    [], [{"kind": "log1p"}], [{"kind": "standardize", "mean": 1.0, "std": 2.0}, {"kind": "clip", "lowest": -2.0}],
]  # fmt: skip


@st.composite
def drawn(draw: st.DrawFn, vocabulary_path: str) -> dict[str, Any]:
    """A config with any kinds of features, labels, mappings, derived columns and data."""
    mappings: list[dict[str, Any]] = [
        {"kind": "identity"}, {"kind": "hash"}, {"kind": "hash", "seed": 1},
        {"kind": "vocabulary", "path": vocabulary_path},
    ]  # fmt: skip
    sparse: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["id", "id_list", "weighted_id_list"]))
        feature = {"name": f"f{number}", "kind": kind, "mapping": draw(st.sampled_from(mappings))}
        if kind == "weighted_id_list" and draw(st.booleans()):
            feature["weight_column"] = f"w{number}"
        sparse.append(feature)
    schema: dict[str, Any] = {"dense": [{"name": "number", "transforms": draw(st.sampled_from(TRANSFORMS))}]}
    if draw(st.booleans()):
        schema["dense"].append({"name": "numbers", "width": 3})
    if draw(st.booleans()):
        sparse += [{"name": f"history_{i}", "kind": "id_list", "mapping": mappings[i]} for i in range(2)]
        values = [{"name": "history_at", "kind": "time"}]
        schema["sequences"] = [{"name": "history", "ids": ["history_0", "history_1"], "values": values, "length": 3}]
    chosen = draw(st.lists(st.sampled_from(DERIVED), unique_by=lambda spec: spec["kind"], max_size=4))
    schema["derived"] = [{"name": f"derived_{spec['kind']}", **spec} for spec in chosen]
    for spec in schema["derived"]:
        if spec["kind"] in NUMBERS:
            schema["dense"].append({"name": spec["name"]})
        else:
            kind = "id_list" if spec["kind"] == "tokens" else "id"
            sparse.append({"name": spec["name"], "kind": kind, "mapping": {"kind": "hash"}})
    schema["sparse"] = sparse
    schema |= draw(
        st.sampled_from([
            {"label": {"column": "clicked"}},
            {"label": {"column": "rating", "at_least": 0.5}},
            {"label": {"column": "answer", "positive": "yes", "negative": "no"}},
            {"label": {"column": "price_paid", "kind": "number"}},
            {"labels": [{"name": "click"}, {"name": "buy", "given": "click"}]},
        ])
    )  # fmt: skip
    if draw(st.booleans()):
        schema["sample_weight"] = {"column": "weight"}
    if draw(st.booleans()):
        schema["timestamp"] = {"column": "at"}
    form = draw(st.sampled_from(["one", "mix", "period"]))
    data: dict[str, Any] = {"train": "one"}
    if form == "mix":
        data = {"train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]}
    elif form == "period":
        data = {"train": "days", "progressive": "day"}
    tables = [{"name": f["name"], "rows": 64, "dim": 4, "features": [f["name"]]} for f in sparse]
    over_arch = [8, len(schema.get("labels", [1]))]
    model = {"name": "dcn", "args": {"dense_arch": [4], "over_arch": over_arch, "cross_layers": 1}}
    optimizers = {"dense": {"kind": draw(st.sampled_from(["adam", "sgd"]))}}
    return {
        "name": "drawn", "data": data, "schema": schema, "tables": tables, "model": model, "optimizers": optimizers
    }  # fmt: skip
