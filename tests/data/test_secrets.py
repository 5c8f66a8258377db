"""No secret of a URI, of the environment or of a row that is redacted reaches a config, a log or a run folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from rayrec.cli import run
from rayrec.data import DataError, DataSet, Manifest, Schema, Vocabulary
from rayrec.storage import locate
from rayrec.storage.secrets import secret_in, without_secrets
from rayrec.train import ConfigError, Display, TrainConfig, Trainer, parse_config
from tests.train import small

SECRET = "pl4nted/s3cret+"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (f"s3://AKIA:{SECRET}@bucket/day=1?region=eu", "s3://***@bucket/day=1?region=eu"),
        (f"s3://AKIA:{SECRET}@bucket", "s3://***@bucket"),
        (f"gs://bucket/a?access_token={SECRET}", "gs://bucket/a?access_token=***"),
        (f"abfs://box:{SECRET}@account.dfs.core.windows.net/a?x=1", "abfs://***@account.dfs.core.windows.net/a?x=1"),
        (f"s3://bucket/a?x=1&secret_key={SECRET}&region=eu", "s3://bucket/a?x=1&secret_key=***&region=eu"),
    ],
)
def test_a_uri_with_credentials_is_refused_wherever_one_is_read(uri: str, shown: str) -> None:
    assert without_secrets(f"see {uri}") == f"see {shown}"
    for refused in (
        lambda: locate(uri),
        lambda: DataSet(path=uri),
        lambda: DataSet(path=["a.parquet", uri]),
        lambda: Vocabulary(path=uri),
        lambda: Manifest.read(uri, Schema.model_validate({"sparse": [{"name": "a"}]})),
    ):
        with pytest.raises(ValueError) as caught:
            refused()
        assert shown in str(caught.value) and SECRET not in str(caught.value)
    with pytest.raises(DataError, match="AWS_SECRET_ACCESS_KEY") if uri[:2] == "s3" else pytest.raises(DataError):
        locate(uri)


@pytest.mark.parametrize(
    "uri", ["/a:b@c", "a@b.parquet", "hdfs://user@name:8020/a@b", "s3://b/k?endpoint_override=h:9"]
)
def test_other_names_are_left_alone(uri: str) -> None:
    assert secret_in(uri) is None and without_secrets(uri) == uri


@pytest.mark.parametrize("field", ["data.train", "storage.path", "init_from.path"])
def test_no_field_of_a_config_may_hold_credentials_and_nothing_of_them_is_written(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted in a URI, of every field that takes one: the command's output and all files that it leaves."""
    uri = f"s3://AKIA:{SECRET}@bucket/x"
    small.write_all(tmp_path / "data", rows=100)
    config, home = tmp_path / "train.yaml", tmp_path / "home"
    raw = small.raw_config(tmp_path / "data")
    raw["data"]["train"] = {"path": raw["data"]["train"]}
    config.write_text(yaml.safe_dump(raw))
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(config), "--set", f"{field}={uri}"])
    shown = "".join(capsys.readouterr())
    files = b"\n".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "***" in shown, shown
    assert SECRET not in shown and SECRET.encode() not in files


def test_a_config_with_credentials_is_refused_without_repeating_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"s3://AKIA:{SECRET}@bucket/x"
    for data in (uri, [uri], [{"path": uri, "weight": 1.0}], {"path": uri, "unknown": 3}, {"path": [uri, 3]}, [[uri]]):
        raw = small.raw_config(tmp_path, data={"train": data})
        for make in (parse_config, lambda raw: TrainConfig(**raw)):
            with pytest.raises(ValueError) as caught:
                make(raw)
            assert SECRET not in str(caught.value)
    for field, value in {
        "data__eval": uri,
        "data__train": {"path": "/x", "index": uri},
        "sharding": {"plan": uri},
        "model__args": {"note": [{"at": uri}]},
    }.items():
        with pytest.raises(ConfigError, match=r"\*\*\*") as caught:
            parse_config(small.raw_config(tmp_path, **{field: value}))
        assert SECRET not in str(caught.value)
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(small.raw_config(tmp_path, data={"train": uri})))
    assert run(["train", str(file)])
    shown = "".join(capsys.readouterr())
    assert "AWS_ACCESS_KEY_ID" in shown and SECRET not in shown
    with pytest.raises(ConfigError):
        parse_config(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_run_keeps_what_must_not_be_told_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Planted: keys in the environment, and a value in a row that cannot be used."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    data = tmp_path / "data"
    data.mkdir()
    rows = small.table(400)
    column = rows.column_names.index("label")
    bad = pa.array([12345.5 if row == 7 else float(value) for row, value in enumerate(rows["label"].to_pylist())])
    pq.write_table(rows.set_column(column, "label", bad), data / "a.parquet")
    read = {"bad_rows": {"policy": policy, "redact": True}}
    raw = small.raw_config(tmp_path, data={"train": str(data), "read": read}, trainer__epochs=1)
    log = io.StringIO()
    trainer = Trainer(parse_config(raw), display=Display(Console(file=log)))
    if policy == "skip":
        assert trainer.fit().train["samples"] == 399
    else:
        with pytest.raises(ValueError, match="redacted"):
            trainer.fit()
    files = [path for path in (tmp_path / raw["name"]).rglob("*") if path.is_file()]
    files = files or [path for path in tmp_path.rglob("*") if path.is_file() and data not in path.parents]
    assert any(path.name == "config.yaml" for path in files)
    found = "\n".join(path.read_bytes().decode(errors="replace") for path in files) + log.getvalue()
    assert "the label must be 0 or 1" in found
    for planted in (SECRET, "12345.5"):
        assert planted not in found, planted


def test_bad_rows_may_be_counted_without_samples(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = small.table(400)
    pq.write_table(
        rows.set_column(rows.column_names.index("label"), "label", pa.array([9] * 3 + [1] * 397)), data / "a.parquet"
    )
    read = {"bad_rows": {"policy": "skip", "samples": 0}}
    raw = small.raw_config(tmp_path, data={"train": str(data), "read": read}, trainer__epochs=1)
    result = Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
    assert result.train["samples"] == 397
    events = [json.loads(line) for file in tmp_path.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    assert [(e["count"], e["samples"]) for e in events if e.get("event") == "skipped"] == [(3, [])]
    read["bad_rows"]["limit"] = 2  # type: ignore[assignment]
    raw = small.raw_config(tmp_path, data={"train": str(data), "read": read}, trainer__epochs=1, name="other")
    with pytest.raises(ValueError, match="more than 2 bad rows were skipped"):
        Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
