"""A run keeps the rows over which it spread the ids of its vocabularies; a new run spreads them over the table."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from rayrec.checkpoint import CheckpointStore
from rayrec.data import Mapping
from rayrec.inference import Model, Scorer
from rayrec.train import Display, Trainer, TrainError, evaluate_run, export_run, parse_config
from tests.inference.runs import checkpoint_of
from tests.train import small

USERS = [*range(30)]
ROWS = {"user": [*range(40)], "item": [0] * 40, "age": [0.0] * 40, "tags": [[]] * 40}


def fit(folder: Path, *, size: int = 30, rows: int = 60, spread: int | None = None, **changes: Any) -> Path:
    """Trains a run with users by a vocabulary, which a second feature of the table reads as well."""
    path = folder / f"users_{size}.txt"
    path.write_text("".join(f"{user}\n" for user in range(size)))
    known: dict[str, Any] = {"kind": "vocabulary", "path": str(path), "oov_rows": 2}
    known |= {} if spread is None else {"spread_over": spread}
    sparse = [
        {"name": "user", "mapping": known},
        {"name": "item"},
        {"name": "tags", "kind": "id_list"},
        {"name": "again", "column": "user", "mapping": known},
    ]
    tables = [
        {"name": "user", "rows": rows, "dim": 8, "features": ["user", "again"]},
        {"name": "item", "rows": 80, "dim": 8, "features": ["item"]},
        {"name": "tags", "rows": 20, "dim": 8, "features": ["tags"]},
    ]
    raw = small.raw_config(folder, schema__sparse=sparse, tables=tables, **changes)
    return Path(Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit().folder)


def config_of(run: Path) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return raw


def spread_of(raw: dict[str, Any]) -> dict[str, int | None]:
    mappings = {feature["name"]: feature["mapping"] for feature in raw["schema"]["sparse"]}
    return {name: mappings[name].get("spread_over") for name in ("user", "again")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_all(tmp_path_factory.mktemp("runs"), rows=200)


@pytest.fixture(scope="module")
def new(folder: Path) -> Path:
    return fit(folder, name="new", trainer__epochs=1)


@pytest.fixture(scope="module")
def earlier(folder: Path) -> Path:
    """A run as an earlier release left it: in the order of the vocabulary, which none of its files says."""
    run = fit(folder, name="earlier", spread=0, trainer__epochs=1)
    for file in (run / "config.yaml", run / "given.yaml"):
        raw = yaml.safe_load(file.read_text())
        for feature in raw["schema"]["sparse"]:
            feature["mapping"].pop("spread_over", None)
        file.write_text(yaml.safe_dump(raw))
    assert "spread_over" not in json.dumps(checkpoint_of(run).manifest.mapping)
    return run


def table_of(run: Path) -> torch.Tensor:
    with CheckpointStore(run / "checkpoints").reader(checkpoint_of(run)) as reader:
        key = next(key for key in reader.index.tensors if key.startswith("table/") and key.endswith(".user"))
        return reader.tensor(key)


def rows_in(source: Any) -> list[int]:
    mapping = source.mapping if isinstance(source, Scorer) else Mapping.from_config(source, labels=False)
    rows: list[int] = mapping.to_batch(ROWS).sparse["user"].values().tolist()
    return rows


def test_a_new_run_and_its_export_record_the_rows(new: Path, folder: Path, tmp_path: Path) -> None:
    assert spread_of(config_of(new)) == {"user": 60, "again": 60}
    assert (checkpoint_of(new).manifest.mapping or {})["user"]["spread_over"] == 60
    export = export_run(new, tmp_path / "export").folder
    assert spread_of(json.loads((export / "mapping.json").read_text())) == {"user": 60, "again": 60}
    rows = rows_in(new / "config.yaml")
    known = rows[: len(USERS)]
    assert rows_in(Scorer(Model(export))) == rows and sorted({*known}) != [*range(2, 32)]
    assert len({*known}) == 30 and min(known) >= 2 and max(known) > 40, "spread over the spare rows too"
    before = evaluate_run(new)
    again = fit(folder, name="new", size=40, trainer__epochs=2)  # relaunched with new ids
    assert (again, spread_of(config_of(again))) == (new, {"user": 60, "again": 60}) and before["step"] > 0
    assert rows_in(new / "config.yaml")[: len(USERS)] == known


def test_an_earlier_run_and_its_export_keep_the_order_of_the_vocabulary(
    earlier: Path, folder: Path, tmp_path: Path
) -> None:
    before = evaluate_run(earlier)
    export = export_run(earlier, tmp_path / "export").folder
    rows = [*range(2, 32)]
    assert rows_in(Scorer(Model(export)))[: len(USERS)] == rows_in(earlier / "config.yaml")[: len(USERS)] == rows
    assert fit(folder, name="earlier", trainer__epochs=2) == earlier
    assert spread_of(config_of(earlier)) == {"user": 0, "again": 0}
    assert evaluate_run(earlier)["step"] == 2 * before["step"]
    with pytest.raises(TrainError, match="spread_over: 0 → 60"):
        fit(folder, name="earlier", spread=60, trainer__epochs=3)


def test_a_run_that_starts_from_another_takes_its_rows(earlier: Path, new: Path, folder: Path) -> None:
    """With new ids and a larger table."""
    for source, spread in ((earlier, 0), (new, 60)):
        how: dict[str, Any] = {"init_from": {"path": str(source)}, "optimizers__sparse": {"kind": "sgd", "lr": 1e-12}}
        run = fit(folder, name=f"from_{spread}", size=40, rows=70, trainer__epochs=1, **how)
        assert spread_of(config_of(run)) == {"user": spread, "again": spread}
        rows = rows_in(run / "config.yaml")
        assert rows[: len(USERS)] == rows_in(source / "config.yaml")[: len(USERS)] and len({*rows}) == 40
        torch.testing.assert_close(table_of(run)[rows[: len(USERS)]], table_of(source)[rows[: len(USERS)]])
    with pytest.raises(TrainError, match="feature 'user': spread_over was 0 and is 60"):
        fit(folder, name="other", spread=60, init_from={"path": str(earlier)})
