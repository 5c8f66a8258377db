"""7 and "7" are two ids: the type that a model was trained with is recorded, the other one is refused everywhere."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from rayrec.data import DataError, Manifest, Mapping, Schema
from rayrec.train import Display, Trainer, TrainError, evaluate_run, export_run, parse_config
from tests.inference.runs import checkpoint_of, refused, train
from tests.train import small

REFUSED = r"feature 'item' was trained on integer ids \(id_type: integer\)"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), trainer__epochs=1)


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "model").folder


@pytest.fixture(scope="module")
def texts(run: Path) -> Path:
    """The evaluation rows, with the items as texts."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted((run.parent.parent / "eval").iterdir())])
    place = table.column_names.index("item")
    folder = run.parent.parent / "texts"
    folder.mkdir()
    pq.write_table(table.set_column(place, "item", table["item"].cast(pa.string())), folder / "part.parquet")
    return folder


def fit(run: Path, **changes: Any) -> None:
    raw = small.raw_config(run.parent.parent, **changes)
    Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()


def id_types(schema: Any) -> dict[str, Any]:
    return {feature["name"]: feature["id_type"] for feature in schema["sparse"]}


def test_the_run_its_checkpoint_and_its_export_have_the_type(run: Path, model: Path) -> None:
    wanted = {"user": "integer", "item": "integer", "tags": "integer"}
    assert id_types(yaml.safe_load((run / "config.yaml").read_text())["schema"]) == wanted
    assert id_types(json.loads((model / "mapping.json").read_text())["schema"]) == wanted
    assert {name: of["id_type"] for name, of in (checkpoint_of(run).manifest.mapping or {}).items()} == wanted


def test_the_other_type_is_refused_wherever_rows_come_from(run: Path, model: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=REFUSED) as caught:
        evaluate_run(run, str(texts), display=Display(Console(file=io.StringIO())))
    assert (caught.value.column, caught.value.file) == ("item", str(texts / "part.parquet"))
    assert re.search(REFUSED, refused("predict", model, texts, tmp_path / "out"))
    mapping = Mapping.from_config(run / "config.yaml", labels=False)
    rows = pq.read_table(texts / "part.parquet").slice(0, 3).to_pylist()
    with pytest.raises(DataError, match=REFUSED):
        mapping.to_batch(rows)
    assert mapping.to_batch([{**row, "item": int(row["item"])} for row in rows]).rows == 3


def test_a_run_goes_on_and_begins_with_ids_of_one_type(run: Path, texts: Path) -> None:
    with pytest.raises(DataError, match=REFUSED):
        fit(run, trainer__epochs=2, data__train=str(texts))
    with pytest.raises(DataError, match=REFUSED):
        fit(run, name="other", data__eval=str(texts))
    with pytest.raises(TrainError, match="id_type was integer and is text"):
        fit(run, name="warm", data__train=str(texts), data__eval=None, init_from={"path": str(run)})


def test_a_checkpoint_without_the_record_goes_on(run: Path) -> None:
    fit(run, name="earlier", trainer__epochs=1)
    config = run.parent / "earlier" / "config.yaml"
    raw = yaml.safe_load(config.read_text())
    for feature in raw["schema"]["sparse"]:
        del feature["id_type"]
    config.write_text(yaml.safe_dump(raw))
    fit(run, name="earlier", trainer__epochs=2)
    assert set(id_types(yaml.safe_load(config.read_text())["schema"]).values()) == {"integer"}


def test_numbers_of_folders_are_texts_where_the_schema_says_so(tmp_path: Path) -> None:
    for store in ("001", "1"):
        small.write(tmp_path / f"store={store}", 10, files=1)
    features = [{"name": "store", "mapping": {"kind": "hash"}}]
    loose = Manifest.read(str(tmp_path), Schema.model_validate({"sparse": features}))
    exact = Manifest.read(str(tmp_path), Schema.model_validate({"sparse": [{**features[0], "id_type": "text"}]}))
    assert {dict(file.partition)["store"] for file in loose.files} == {1}
    assert {dict(file.partition)["store"] for file in exact.files} == {"001", "1"}
    with pytest.raises(DataError, match="was trained on string ids"):
        Manifest.read(
            str(tmp_path), Schema.model_validate({"sparse": [{**features[0], "name": "row", "id_type": "text"}]})
        )
