"""`deploy/SERVING.md`: its request fits the run that it speaks of, its commands have the options that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from rayrec.cli import run
from rayrec.data import Mapping
from rayrec.serve import JSON, Limits
from rayrec.serve.requests import Reader

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "SERVING.md").read_text(encoding="utf-8")


def test_the_request_can_be_mapped_by_the_movielens_config() -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE, re.DOTALL)
    mapping = Mapping.from_config(yaml.safe_load((ROOT / "data/movielens/train.yaml").read_text()), labels=False)
    reader = Reader(mapping, mapping.schema.sparse_names, Limits())
    batch, _ = reader.batch([reader.read(body.encode(), JSON)])
    assert batch.rows == len(json.loads(body)["candidates"]) == 2
    assert batch.sparse["liked"].values().tolist() == [50, 181, 50, 181]
    assert batch.dense.shape == (2, 6)


def test_the_options_are_those_of_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("export", "predict", "serve"):
        assert run([command, "--help"]) == 0
        text = capsys.readouterr().out
        lines = [line for line in PAGE.splitlines() if line.startswith(f"rayrec {command}")]
        assert lines
        for option in re.findall(r"--[a-z-]+", " ".join(lines)):
            assert option in text, f"rayrec {command} has no {option}"


def test_cpp_is_given_a_folder_that_was_compiled() -> None:
    served = re.findall(r"rayrec_score (\S+)", PAGE)
    assert served and set(served) <= set(re.findall(r"^rayrec export \S+ (\S+) .*--target aoti", PAGE, re.MULTILINE))
