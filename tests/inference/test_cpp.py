"""Compiled graphs score as the trainer does, in Python and in the C++ library, which maps raw rows without Python.

Compiling takes long: one model has every built-in one inside, weighted lists, a vocabulary and two labels.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.inference import ExportOptions, Model, Scorer, export, processor
from rayrec.train import export_run
from tests.inference.cpp import built, needs_cpp
from tests.inference.runs import AllBuiltIn, train_all_built_in, trainer_scores
from tests.inference.towers import tower_of

pytestmark = [needs_cpp, pytest.mark.long]
LABELS = ("click", "like")
REFUSED = 3  # exit status of rayrec_score


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    return train_all_built_in(data)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(
        run, tmp_path_factory.mktemp("export") / "v1", ExportOptions(target="aoti"), factory=AllBuiltIn
    ).folder


@pytest.fixture(scope="module")
def rayrec_score() -> Path:
    return built("rayrec_score")


def test_queries_of_a_retriever(tmp_path: Path, rayrec_score: Path) -> None:
    """Queries of a history by the C++ library are those of the model; a model that reads times is refused."""
    tower = tower_of("sasrec", {"max_length": 6}, 50, 8)
    folder = export(tower.trained, tmp_path / "tower", ExportOptions(target="aoti")).folder
    histories = [[3, 7], [], list(range(20)), [49]]
    request = json.dumps({"rows": [{"history": history} for history in histories]})
    found = subprocess.run([rayrec_score, folder], input=request + "\n", capture_output=True, text=True, check=True)
    queries = torch.tensor(json.loads(found.stdout)["queries"])
    torch.testing.assert_close(queries, tower.queries(histories), rtol=0, atol=1e-5)
    path = folder / "export.json"
    path.write_text(path.read_text().replace('"lists": []', '"lists": ["past.at"]'))
    refused = subprocess.run([rayrec_score, folder], input="", capture_output=True, text=True)
    assert refused.returncode == 1 and "reads times or numbers of histories" in refused.stderr


@pytest.fixture(scope="module")
def rows(data: Path, exported: Path) -> list[dict[str, Any]]:
    """The raw evaluation rows, in the order of `trainer_scores`."""
    columns = Scorer(Model(exported)).schema.feature_columns
    files = sorted((data / "eval").iterdir())
    found = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    assert len(found) == 301
    return found


def score(program: Path, folder: Path, requests: Sequence[Any], status: int = 0) -> list[dict[str, Any]]:
    """Answers to requests: JSON values, or bytes as they are."""
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in requests]
    done = subprocess.run([program, folder], input=b"".join(lines), capture_output=True, timeout=120)
    assert done.returncode == status, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def array(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    """`[B, labels]`"""
    return np.array([answer["scores"][label] for label in LABELS], np.float32).T


def test_python_scores_compiled_and_uncompiled(run: Path, exported: Path) -> None:
    compiled, eager = Model(exported), Model(exported, target="eager")
    assert compiled.target == "aoti" and compiled.index.inputs.weighted and compiled.labels == LABELS
    for batch, logits in trainer_scores(run, AllBuiltIn):
        atol = 1e-6 * max(1.0, float(logits.abs().max()))  # an export's own limit
        torch.testing.assert_close(compiled.score(batch), logits, rtol=0, atol=atol)
        torch.testing.assert_close(eager.score(batch), logits, rtol=0, atol=0)


def test_the_graph_is_compiled_for_a_level_of_instructions(exported: Path) -> None:
    """Without registers of 512 bits, even where this processor has some."""
    assert Model(exported).index.march == processor.choose_march(None)
    if platform.machine() == "x86_64":
        for library in (exported / "aoti").rglob("*.so"):
            code = subprocess.run(["objdump", "-d", library], check=True, capture_output=True, text=True).stdout
            assert "%ymm" in code and "%zmm" not in code


def test_cpp_scores_as_the_trainer_does_without_python(
    run: Path, exported: Path, rayrec_score: Path, rows: list[dict[str, Any]]
) -> None:
    linked = subprocess.run(["ldd", rayrec_score], capture_output=True, text=True, check=True).stdout
    assert "libpython" not in linked
    trainer = torch.cat([torch.sigmoid(logits) for _, logits in trainer_scores(run, AllBuiltIn)]).numpy()
    (answer,) = score(rayrec_score, exported, [{"rows": rows}])
    np.testing.assert_allclose(array(answer), trainer, rtol=0, atol=1e-6)


def test_requests_in_every_form_have_the_scores_of_the_rows(
    exported: Path, rayrec_score: Path, rows: list[dict[str, Any]]
) -> None:
    some = [{**row, **{name: rows[0][name] for name in ("user", "city")}} for row in rows[:50]]
    columns = {name: [row[name] for row in some] for name in some[0]}
    context = {name: some[0][name] for name in ("user", "city")}
    candidates = [{name: row[name] for name in row if name not in context} for row in some]
    described = subprocess.run([rayrec_score, exported, "--describe"], check=True, capture_output=True, timeout=60)
    description = json.loads(described.stdout)
    assert description["version"] == Model(exported).version and description["labels"] == list(LABELS)
    assert sorted(description["columns"]) == sorted(some[0])
    datatypes = {entry["name"]: entry["datatype"] for entry in description["inputs"]}
    forms: list[Any] = [
        {"rows": some},
        {"rows": columns},
        {"context": context, "candidates": candidates},
        as_tensors(columns, {}, datatypes, binary=False),
        as_tensors(columns, context, datatypes, binary=False),
        as_tensors(columns, context, datatypes, binary=True),
    ]
    expected = Scorer(Model(exported)).score(some).probabilities
    for answer in score(rayrec_score, exported, forms):
        np.testing.assert_allclose(array(answer), np.array([expected[label] for label in LABELS]).T, rtol=0, atol=1e-6)
    parts = score(rayrec_score, exported, [{"rows": some[start : start + 7]} for start in range(0, 50, 7)])
    np.testing.assert_allclose(
        np.concatenate([array(part) for part in parts]), array(score(rayrec_score, exported, forms[:1])[0]), atol=1e-6
    )


def as_tensors(columns: dict[str, list[Any]], context: dict[str, Any], datatypes: dict[str, str], binary: bool) -> Any:
    """In the open inference protocol: lists as values and lengths, the context as inputs of one row."""
    inputs, blocks = [], b""
    for name, column in columns.items():
        values, tensors = [context[name]] if name in context else column, {}
        if isinstance(values[0], list):
            tensors[f"{name}.lengths"] = [len(items) for items in values]
            values = [item for items in values for item in items]
        for tensor, flat in (tensors | {name: values}).items():
            entry: dict[str, Any] = {"name": tensor, "datatype": datatypes[tensor], "shape": [len(flat)]}
            if binary:
                raw = as_bytes(flat, datatypes[tensor])
                entry["parameters"] = {"binary_data_size": len(raw)}
                blocks += raw
            else:
                entry["data"] = flat
            inputs.append(entry)
    return json.dumps({"inputs": inputs}).encode() + b"\n" + blocks


def as_bytes(values: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in values)
    return np.array(values, {"INT64": "<i8", "FP64": "<f8", "FP32": "<f4"}[datatype]).tobytes()


def test_wrong_rows_are_refused_by_name_and_the_next_request_is_scored(
    exported: Path, rayrec_score: Path, rows: list[dict[str, Any]]
) -> None:
    good = {**rows[0], "tag_weights": [1.0], "tags": [1]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tags": [10**9]}, "tags"),
        ({"user": None}, "user"),
        ({"user": 1.5}, "user"),
        ({"city": 7}, "city"),
        ({"tag_weights": []}, "tag_weights"),
    ]
    answers = score(rayrec_score, exported, [{"rows": [good | change]} for change, _ in cases], REFUSED)
    assert [[problem["column"] for problem in answer["errors"]] for answer in answers] == [[name] for _, name in cases]
    missing = {name: value for name, value in rows[0].items() if name != "city"}
    requests = [
        {"rows": [rows[0], {**rows[1], "tags": [-1], "tag_weights": [1.0]}]},
        {"rows": [missing]},
        {"rows": []},
        {"rows": rows[:3]},
    ]
    second, without, empty, scored = score(rayrec_score, exported, requests, REFUSED)
    assert second["errors"][0]["row"] == 1 and "1 of 2 rows" in second["error"]
    assert "column 'city' is missing" in without["error"] and "no rows" in empty["error"]
    assert array(scored).shape == (3, 2)


def test_no_line_ends_the_program_or_changes_a_score(
    exported: Path, rayrec_score: Path, rows: list[dict[str, Any]]
) -> None:
    """Random changes of bytes and values of requests, each before a good one."""
    draw, body = random.Random(0), {"rows": rows[:5]}
    columns = {name: [row[name] for row in rows[:5]] for name in rows[0]}
    described = subprocess.run([rayrec_score, exported, "--describe"], check=True, capture_output=True, timeout=60)
    datatypes = {entry["name"]: entry["datatype"] for entry in json.loads(described.stdout)["inputs"]}
    tensors = as_tensors(columns, {}, datatypes, binary=False).removesuffix(b"\n")
    lines: list[Any] = []
    for turn in range(3000):
        line = mutated(draw, json.dumps(body).encode() if turn % 3 else tensors)
        lines += [line.replace(b"\n", b" ").replace(b"binary_data_size", b"size") + b"\n", body]
    answers = score(rayrec_score, exported, lines, REFUSED)
    assert len(answers) == 6000
    expected = array(answers[1])
    for answer in answers[1::2]:
        np.testing.assert_array_equal(array(answer), expected)
    outcomes = Counter("scores" in answer for answer in answers[::2])
    assert min(outcomes.values()) > 20, outcomes


_ODD = (
    b"null",
    b"-1",
    b"1e400",
    b"99999999999999999999",
    b"true",
    b'"x"',
    b"[[[[[[[[",
    b"{}",
    b"\xff",
    b"NaN",
    b"[]",
    b"0.5",
)


def mutated(draw: random.Random, body: bytes) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(body) + 1)
        match draw.randrange(4):
            case 0:
                body = body[:at] + draw.randbytes(1) + body[at + 1 :]
            case 1:
                body = body[:at] + draw.choice(_ODD) + body[at + draw.choice((0, 1, 2)) :]
            case 2:
                body = body[:at] if draw.random() < 0.3 else body[:at] + body[at + 1 :]
            case 3:
                body = body.replace(draw.choice((b"1", b"2", b'"tags"', b"0.5")), draw.choice(_ODD), 1)
    return body


def changed(exported: Path, folder: Path, files: dict[str, bytes] | None = None, **index: Any) -> Path:
    """A copy of the export with other files and another index, intact by its checksums."""
    shutil.copytree(exported, folder)
    raw = json.loads((folder / "export.json").read_text()) | index
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)
        raw["files"][name] = [len(content), zlib.crc32(content)]
    (folder / "export.json").write_text(json.dumps(raw))
    return folder


def test_exports_that_cannot_be_scored_are_refused_with_the_reason(
    exported: Path, rayrec_score: Path, tmp_path: Path
) -> None:
    index, mapping = (json.loads((exported / name).read_text()) for name in ("export.json", "mapping.json"))
    parity = json.loads((exported / "parity.json").read_text()) | {"within_limits": False}
    size = (exported / "tables.bin").stat().st_size
    mapping["schema"]["derived"] = [{"kind": "tokens", "name": "city", "column": "title"}]
    cases: list[tuple[str, dict[str, bytes], dict[str, Any], str]] = [
        ("parity", {"parity.json": json.dumps(parity).encode()}, {}, "its scores are outside their limits"),
        ("nan", {"tables.bin": np.full(size // 4, np.nan, np.float32).tobytes()}, {}, "is not finite"),
        ("flags", {}, {"instructions": ["no_such_flag"]}, "this one lacks no_such_flag"),
        ("unrecorded", {}, {"march": None}, "did not record the processor"),
        ("torch", {}, {"versions": {**index["versions"], "torch": "1.0"}}, "was compiled with torch 1.0"),
        ("derived", {"mapping.json": json.dumps(mapping).encode()}, {}, "derived column 'city' (tokens)"),
    ]
    folders = {name: (changed(exported, tmp_path / name, files, **raw), text) for name, files, raw, text in cases}
    damaged = shutil.copytree(exported, tmp_path / "damaged")
    (damaged / "tables.bin").write_bytes(b"\x01" + (damaged / "tables.bin").read_bytes()[1:])
    folders["damaged"] = (damaged, "tables.bin is damaged (wrong checksum)")
    folders["missing"] = (tmp_path / "none", "export.json is missing")
    for folder, text in folders.values():
        done = subprocess.run([rayrec_score, folder], input="", capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and text in done.stderr, (folder, done.stderr)
    assert subprocess.run([rayrec_score], capture_output=True, timeout=60).returncode == 2
