"""The command line: what it prints, what it refuses, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec.cli import run
from tests.train.small import raw_config, write_all

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config file whose data is there."""
    write_all(tmp_path, rows=200)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(raw_config(tmp_path, trainer__epochs=1)))
    return file


def test_train_report_and_evaluate(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(config), "--name", "first", "--no-wait", "--set", "trainer.batch_size=32"]) == 0
    folder = config.parent / "runs" / "first"
    text = capsys.readouterr().out
    for part in ("sharding plan", "samples/s", "evaluation after epoch 1", "evaluation AUC", str(folder)):
        assert part in text
    assert json.loads((folder / "result.json").read_text())["steps"] == 7
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["wait_for_room_s"] == 0

    (folder / "report.html").unlink()
    assert run(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").exists()

    assert run(["evaluate", str(folder), "--data", str(config.parent / "train")]) == 0
    assert "on 200 rows" in capsys.readouterr().out
    assert json.loads((folder / "evaluation.json").read_text())["samples"] == 200

    assert run(["train", str(config), "--name", "first"]) == 0
    assert "is already finished" in capsys.readouterr().out


def test_plan_needs_no_data_and_writes_what_training_takes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = config.parent / "plan.json"
    assert run(["plan", str(config), "--world", "2x4", "--gpu", "h100", "--save", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "sharding plan" in text
    assert "What binds:" in text
    assert set(json.loads(saved.read_text())["plan"]["embedding_bags"]) == {"user", "item", "tag"}
    assert run(["plan", str(config), "--save", str(saved / "below")]) == 1
    assert run(["plan", str(config), "--world", "many"]) == 1
    assert "HOSTSxRANKS" in capsys.readouterr().err
    assert run(["plan", str(config), "--gpu", "abacus"]) == 1
    assert "'abacus' is not known" in capsys.readouterr().err
    assert run(["plan", str(config), "--save", str(saved)]) == 0
    assert run(["train", str(config), "--set", f"sharding.plan={saved}", "--set", "trainer.num_workers=0"]) in (0, 1)


def test_a_plan_is_loaded_compared_and_drawn(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, picture = config.parent / "plan.json", config.parent / "plan.html"
    assert run(["plan", str(config), "--world", "4", "--save", str(saved)]) == 0
    loaded = ["plan", str(config), "--world", "4", "--load", str(saved), "--diff", str(saved), "--html", str(picture)]
    assert run(loaded) == 0
    assert "no difference" in capsys.readouterr().out
    assert "<svg" in picture.read_text()
    assert run(["plan", str(config), "--load", str(config)]) == 1
    assert "plan is not JSON" in capsys.readouterr().err
    assert run(["plan", str(config), "--diff", str(config.parent / "none.json")]) == 1
    assert "--diff" in capsys.readouterr().err
    assert run(["plan", str(config), "--html", str(saved / "below")]) == 1


def test_data_can_be_looked_at(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(config)]) == 0
    assert run(["data", "inspect", str(config.parent / "train")]) == 0
    assert "schema:" in capsys.readouterr().out
    odd = config.parent / "odd"
    odd.mkdir()
    columns = {"[red]x[/red]": ["a", "b"] * 3, "[/b]": [1.5, 2.5] * 3, "label": [0, 1] * 3}
    pq.write_table(pa.table(columns), odd / "x.parquet")
    assert run(["data", "inspect", str(odd), "--write-vocabularies", str(odd / "words")]) == 0
    told = capsys.readouterr()
    assert "[red]x" in told.err and "[/b]" in told.err
    (found,) = (feature for feature in yaml.safe_load(told.out)["schema"]["sparse"])
    assert pq.read_table(found["mapping"]["path"])["id"].to_pylist() == ["a", "b"]
    words = config.parent / "users.parquet"
    assert run(["data", "vocabulary", str(config.parent / "train"), "--column", "user", "--out", str(words)]) == 0
    assert f"{pq.read_metadata(words).num_rows} of" in capsys.readouterr().out
    where = "[[label, =, 1], [user, <, 20]]"
    assert run(["data", "inspect", str(config.parent / "train"), "--filters", where]) == 0
    assert run(["data", "inspect", str(config.parent / "train"), "--filters", "[[usr, =, 1]]"]) == 1
    assert "column 'usr' is missing" in capsys.readouterr().err.replace("\n", " ")
    filtered = {"path": str(config.parent / "train"), "filters": [["user", "<", 20]]}
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "data": {"train": filtered}}))
    assert run(["data", "check", str(config), "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["rows"] < 200


def test_config_lists_fields_or_shows_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config"]) == 0
    assert "| `trainer.batch_size` | integer ≥ 1 | `1024` |" in capsys.readouterr().out
    assert run(["config", str(config), "--set", "trainer.seed=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["seed"] == 7


@pytest.mark.parametrize(
    ("args", "status", "part"),
    [
        (["train", "nowhere.yaml"], 1, "error: config file nowhere.yaml does not exist"),
        (["train", "CONFIG", "--set", "trainer.num_worker=1"], 1, "did you mean 'num_workers'?"),
        (["train", "CONFIG", "--set", "trainer"], 1, "write it as field.path=value"),
        (["train", "CONFIG", "--set", "data.train=nowhere"], 1, "does not exist"),
        (["train", "CONFIG", "--set", "storage.path=CONFIG"], 1, "cannot be written"),
        (["evaluate", "nowhere"], 1, "is not a run folder"),
        (["report", "nowhere"], 1, "nowhere"),
        (["train"], 2, "Missing argument 'CONFIG'"),
        (["train", "CONFIG", "--fast"], 2, "No such option: --fast"),
        (["tarin", "CONFIG"], 2, "No such command 'tarin'"),
    ],
)
def test_what_goes_wrong_is_one_message_and_a_status(
    config: Path, capsys: pytest.CaptureFixture[str], args: list[str], status: int, part: str
) -> None:
    assert run([arg.replace("CONFIG", str(config)) for arg in args]) == status
    error = " ".join(capsys.readouterr().err.split())
    assert part in error
    assert "Traceback" not in error


def test_a_place_that_cannot_be_written_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("user,label\n1,0\n")
    below = str(tmp_path / "a.csv" / "below")
    for args, part in [
        (["data", "fit", str(config), "--out", below], f"--out {below}: cannot write the file: "),
        (
            ["data", "convert", str(tmp_path / "a.csv"), below],
            f"cannot create the folder: Not a directory (file {below}); fix: ",
        ),
    ]:
        assert run(args) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert part.replace(" ", "") in error.replace(" ", "") and "name a" in error and "Error" not in error


def test_an_unforeseen_error_is_named_without_secrets_and_debug_shows_where(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("s3://KEY:hush@bucket/run?secret_key=hush: no such bucket")
    monkeypatch.setattr("rayrec.train.config.file.load_config", lambda *_: (_ for _ in ()).throw(error))
    for off in ("0", "", "False", "no"):
        monkeypatch.setenv("RAYREC_DEBUG", off)
        assert run(["train", str(config)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: RuntimeError: s3://") and "(--debug shows where)" in said
        assert "bucket/run" in said and "hush" not in said
    assert run(["train", "--debug", str(config)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_only_one_place_reads_whether_to_debug() -> None:
    """`RAYREC_DEBUG=0` must mean the same to training, to serving and to the commands."""
    places = [path.name for path in (ROOT / "rayrec").rglob("*.py") if 'get("RAYREC_DEBUG' in path.read_text()]
    assert places == ["debug.py"]
