"""`rayrec worth`: variants that train side by side in the order of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.cli import run
from rayrec.train.worth import variants_of
from tests.train import small
from tests.train.test_time_order import ROWS, WINDOWS, write


def raw_of(folder: Path) -> dict[str, Any]:
    raw = small.raw_config(folder, trainer__batch_size=32)
    raw["schema"]["timestamp"] = {"column": "at"}
    raw["data"] |= {"train": str(folder / "log"), "eval": None, "order": "time", "windows": {"time": "1h"}}
    return raw


def test_variants_train_on_the_same_rows_in_the_order_of_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two equal variants no bit differs. With a delay of an hour, nothing is learned in the first one."""
    write(tmp_path / "log", WINDOWS)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_of(tmp_path)))
    variants: dict[str, Any] = {
        "same": {},
        "renamed": {"set": {"trainer.seed": 0}},
        "hour": {"delay": "1h"},
        "never": {"delay": "100d"},
        "narrow": {"width": 0.5},
        "no item": {"without": ["item"]},
        "hashed": {"set": {"schema.sparse.user.mapping": {"kind": "hash"}}},
    }
    (tmp_path / "vary.yaml").write_text(yaml.safe_dump(variants, sort_keys=False))
    line = ["worth", str(tmp_path / "config.yaml"), "--vary", str(tmp_path / "vary.yaml"), "--out", str(tmp_path / "o")]
    assert run(line) == 0
    figures = {one["name"]: one for one in json.loads((tmp_path / "o" / "worth.json").read_text())["variants"]}
    assert [*figures] == ["config", *variants]
    first = [window["ne"] for window in figures["config"]["windows"]]
    assert len(first) == WINDOWS and first[-1] < first[0]
    for name in ("same", "renamed"):
        assert figures[name]["difference"] == figures[name]["error"] == 0, name
        assert all(window["difference"] == window["error"] == 0 for window in figures[name]["windows"])
    of = {name: [window["ne"] for window in one["windows"]] for name, one in figures.items()}
    assert of["hour"][0] == of["never"][0] != first[0] and of["hour"][1] != of["never"][1]
    assert figures["never"]["difference"] > 0 < figures["never"]["error"]
    assert all(figures[name]["difference"] != 0 for name in ("narrow", "no item", "hashed"))
    page = (tmp_path / "o" / "worth.html").read_text()
    assert page.count("<svg viewBox") >= len(variants) and "minus config" in page and "What this does not tell" in page
    assert "in the later half" in capsys.readouterr().out
    assert run([*line, "--rows", str(2 * ROWS - 10)]) == 0
    shorter = json.loads((tmp_path / "o" / "worth.json").read_text())["variants"][0]
    assert shorter["windows"][0]["ne"] == first[0] and len(shorter["windows"]) == 2


def test_what_a_variant_changes(tmp_path: Path) -> None:
    raw = raw_of(tmp_path)
    changes = {
        "a": {"without": ["user", "age"]},
        "b": {"width": 0.5},
        "c": {"delay": "90min"},
    }
    config, without, half, late = (one for one in variants_of(raw, changes, tmp_path))
    assert config.name == "config" and late.delay_us == 90 * 60 * 10**6 and late.config == config.config
    assert [one.name for one in without.config.data_schema.sparse] == ["item", "tags"]
    assert not without.config.data_schema.dense and "user" not in [one.name for one in without.config.tables]
    assert {one.dim for one in half.config.tables} == {4}
    assert half.config.model.args == {"dense_arch": [8, 4], "over_arch": [8, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "name one or more variants"),
        ({"config": {}}, "none of them 'config'"),
        ({"x": {"delays": "1h"}}, "x: .*delays"),
        ({"x": {"delay": "soon"}}, "x: .*delay"),
        ({"x": {"without": ["usr"]}}, "x: without: no feature 'usr'; the schema has .*user"),
        ({"x": {"set": {"tables.usr.dim": 8}}}, "x: .*no item 'usr'"),
    ],
)
def test_what_is_wrong_with_a_variant_is_named(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        variants_of(raw_of(tmp_path), changes, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer.batch_size": 16}, "variant 'x': trainer.batch_size must be that of the config"),
        ({"data.windows": {"rows": 10}}, "variant 'x': data.train and data.windows must be those"),
        ({"data.order": None, "data.windows": None}, "variant 'x': needs data.order: time"),
    ],
)
def test_variants_that_cannot_share_batches_are_refused(
    tmp_path: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_of(tmp_path)))
    (tmp_path / "vary.yaml").write_text(yaml.safe_dump({"x": {"set": change}}))
    assert run(["worth", str(tmp_path / "config.yaml"), "--vary", str(tmp_path / "vary.yaml")]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
