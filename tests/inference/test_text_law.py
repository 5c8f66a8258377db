"""A run keeps the version of the hash of strings that it began with; new runs begin with the newest."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from rayrec.data import Mapping
from rayrec.inference import Model, Scorer
from rayrec.train import Display, Trainer, TrainError, evaluate_run, export_run, parse_config
from tests.inference.runs import checkpoint_of
from tests.train import small

CITIES = {"city": [f"city {n}" for n in range(9)], "user": [0] * 9, "age": [0.0] * 9, "tags": [[]] * 9}


def fit(folder: Path, *, text_law: int | None = None, **changes: Any) -> Path:
    """Trains a run with a hashed text feature, and one whose ids are integers; returns its folder."""
    hashed: dict[str, Any] = {"kind": "hash"} | ({"text_law": text_law} if text_law else {})
    sparse = [
        {"name": "user", "mapping": hashed},
        {"name": "item", "column": "city", "mapping": hashed},
        {"name": "tags", "kind": "id_list"},
    ]
    raw = small.raw_config(folder, schema__sparse=sparse, **changes)
    return Path(Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit().folder)


def laws(raw: dict[str, Any]) -> dict[str, int | None]:
    return {feature["name"]: feature["mapping"].get("text_law") for feature in raw["schema"]["sparse"]}


def config_of(run: Path) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_all(tmp_path_factory.mktemp("runs"), rows=200)


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    return fit(folder, name="new", trainer__epochs=1)


@pytest.fixture(scope="module")
def earlier(folder: Path) -> Path:
    """A run as an earlier release left it: with the first version, which none of its files names."""
    run = fit(folder, name="earlier", text_law=1, trainer__epochs=1)
    for file in (run / "config.yaml", run / "given.yaml"):
        raw = yaml.safe_load(file.read_text())
        for feature in raw["schema"]["sparse"]:
            feature["mapping"].pop("text_law", None)
        file.write_text(yaml.safe_dump(raw))
    assert "text_law" not in json.dumps(checkpoint_of(run).manifest.mapping)
    return run


def test_a_new_run_and_its_export_record_the_newest_version(new: Path, folder: Path, tmp_path: Path) -> None:
    wanted = {"user": 2, "item": 2, "tags": None}
    assert laws(config_of(new)) == wanted
    stored = checkpoint_of(new).manifest.mapping or {}
    assert {name: of.get("text_law") for name, of in stored.items()} == wanted
    export = export_run(new, tmp_path / "export").folder
    assert laws(json.loads((export / "mapping.json").read_text())) == wanted
    by_law = {law: Mapping.from_config(_with_law(new, law), labels=False).to_batch(CITIES) for law in (None, 1, 2)}
    scored = [Model(export).score(by_law[law]) for law in (1, 2)]
    by_export = Scorer(Model(export)).mapping.to_batch(CITIES)
    assert by_export.sparse["item"].values().tolist() == by_law[2].sparse["item"].values().tolist()
    assert not torch.equal(*scored), "the rows are others"
    before = evaluate_run(new)
    again = fit(folder, name="new", trainer__epochs=2)
    assert (again, laws(config_of(again))) == (new, wanted) and before["step"] > 0


def _with_law(run: Path, law: int | None) -> dict[str, Any]:
    raw = config_of(run)
    raw["schema"]["sparse"][1]["mapping"]["text_law"] = law
    return raw


def test_an_earlier_run_goes_on_with_the_first_version(earlier: Path, folder: Path, tmp_path: Path) -> None:
    before = evaluate_run(earlier)
    export = export_run(earlier, tmp_path / "export").folder
    rows = Scorer(Model(export)).mapping.to_batch(CITIES).sparse["item"].values().tolist()
    first = Mapping.from_config(_with_law(earlier, 1), labels=False).to_batch(CITIES)
    assert rows == first.sparse["item"].values().tolist()
    assert fit(folder, name="earlier", trainer__epochs=2) == earlier
    assert laws(config_of(earlier)) == {"user": 1, "item": 1, "tags": None}
    assert evaluate_run(earlier)["step"] == 2 * before["step"]
    with pytest.raises(TrainError, match="text_law: 1 → 2"):
        fit(folder, name="earlier", text_law=2, trainer__epochs=3)


def test_a_run_that_starts_from_an_earlier_one_takes_its_version(earlier: Path, new: Path, folder: Path) -> None:
    for source, law in ((earlier, 1), (new, 2)):
        run = fit(folder, name=f"from_{law}", trainer__epochs=1, init_from={"path": str(source)})
        assert laws(config_of(run)) == {"user": law, "item": law, "tags": None}
    message = "feature 'item': its ids would map to other rows: text_law was None and is 2"
    with pytest.raises(TrainError, match=message):
        fit(folder, name="other", text_law=2, init_from={"path": str(earlier)})


def test_integers_map_to_the_same_rows_under_either_version(earlier: Path) -> None:
    raw = config_of(earlier)
    raw["name"], raw["init_from"] = "integers", {"path": str(earlier)}
    raw["schema"]["sparse"][0]["mapping"]["text_law"] = 2
    raw["schema"]["sparse"][1]["mapping"]["text_law"] = 1
    assert raw["schema"]["sparse"][0]["id_type"] == "integer"
    assert Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit().steps > 0
