"""The run folder: that it can be written is found out first, one run at a time, and what a relaunch may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayrec.train import StorageError, TrainError, parse_config
from rayrec.train.config.difference import flat
from rayrec.train.config.file import apply_override
from rayrec.train.config.relaunch import RULES
from rayrec.train.run.folder import RunFolder, refuse_other_config, write_json, write_yaml
from rayrec.train.run.paths import resolved
from tests.train.small import RAW


def test_a_path_below_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StorageError, match=r"storage\.path: the run folder .*runs/x cannot be written \(Not a dir"):
        RunFolder(file / "runs" / "x").create()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    folder.create()
    still_going = pytest.raises(StorageError, match="in use by a run that is still going")
    with folder.locked(), still_going, folder.locked():
        pass
    with folder.locked():
        pass


def test_an_earlier_run_is_set_aside_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "x")
    assert folder.set_aside() is None
    asides = []
    for text in ("first", "second"):
        folder.create()
        folder.metrics.write_text(text)
        asides.append(folder.set_aside())
        assert not folder.path.exists()
    assert [(Path(aside) / "metrics.jsonl").read_text() for aside in asides if aside] == ["first", "second"]


def test_half_written_files_are_read_past(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert (folder.read_config(), folder.read_result(), folder.last_attempt()) == (None, None, 0)
    folder.metrics.write_text('{"kind": "train", "attempt": 2}\n{"kind": "tr')
    folder.result.write_text('{"ep')
    assert folder.last_attempt() == 2
    assert folder.read_result() is None
    write_json(folder.result, {"epochs": 3})
    assert folder.read_result() == {"epochs": 3} and folder.result.read_text() == '{\n  "epochs": 3\n}\n'


@pytest.mark.parametrize(
    "override",
    [
        *["trainer.num_workers=4", "trainer.epochs=9", "storage.keep=1", "optimizers.dense.lr=0.5"],
        *["data.train=elsewhere", "optimizers.tables={user: {lr: 0.5}}"],
        "optimizers.tables={user: {kind: rowwise_adagrad}}",  # which it was before
    ],
)
def test_what_a_relaunch_may_change(tmp_path: Path, override: str) -> None:
    earlier = parse_config(RAW).to_dict()
    refuse_other_config(RunFolder(tmp_path), earlier, parse_config(apply_override(RAW, override)).to_dict())


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("tables.user.rows=41", "tables.user.rows: 40 → 41)"),
        ("trainer.seed=1", "trainer.seed: 0 → 1"),
        ("optimizers.sparse.kind=sgd", 'optimizers.sparse.kind: "rowwise_adagrad" → "sgd"'),
        ("optimizers.tables={user: {kind: sgd}}", '(optimizers.tables.user.kind: "rowwise_adagrad" → "sgd")'),
        ("model.args.over_arch=[8, 1]", "model.args.over_arch: [16, 1] → [8, 1])"),
        ("schema.label.column=click", 'schema.label.column: "label" → "click")'),
        ("schema.label.at_least=4", "schema.label.at_least: null → 4.0)"),
        ("optimizers.dense.kind=sgd", 'optimizers.dense.kind: "adam" → "sgd"'),
        ("data.negative_rate=0.5", "data.negative_rate: 1.0 → 0.5"),
    ],
)
def test_what_a_relaunch_may_not_change(tmp_path: Path, override: str, part: str) -> None:
    folder = RunFolder(tmp_path)
    write_yaml(folder.config, parse_config(RAW).to_dict())
    earlier = folder.read_config()
    assert earlier is not None
    with pytest.raises(StorageError) as caught:
        refuse_other_config(folder, earlier, parse_config(apply_override(RAW, override)).to_dict())
    assert part in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_a_table_with_its_own_optimizer_keeps_it(tmp_path: Path) -> None:
    earlier = apply_override(RAW, "optimizers.tables={user: {kind: sgd}}")
    refuse_other_config(RunFolder(tmp_path), earlier, apply_override(earlier, "optimizers.tables.user.lr=0.5"))
    with pytest.raises(StorageError, match=r'tables.user.kind: "sgd" → "rowwise_adagrad"\)'):
        refuse_other_config(RunFolder(tmp_path), earlier, RAW)


def test_a_field_that_is_newer_than_the_run_is_no_difference_until_it_is_set(tmp_path: Path) -> None:
    now = parse_config(RAW).to_dict()
    earlier = json.loads(json.dumps(now))
    del earlier["schema"]["label"]["positive"], earlier["schema"]["sparse"][0]["max_length"]
    refuse_other_config(RunFolder(tmp_path), earlier, now)


def test_every_field_has_a_rule_of_what_a_relaunch_may_change() -> None:
    ruled = {rule.field for rule in RULES}
    assert len(ruled) == len(RULES)
    for field in flat(parse_config(RAW).to_dict()):
        assert any(field == name or field.startswith(f"{name}.") for name in ruled), field


def test_a_vocabulary_may_lie_elsewhere(tmp_path: Path) -> None:
    now = parse_config(RAW).to_dict()
    now["schema"]["sparse"][0]["mapping"] = {"kind": "vocabulary", "path": "/new/ids.parquet", "oov_rows": 1}
    earlier = json.loads(json.dumps(now).replace("/new/", "/old/"))
    refuse_other_config(RunFolder(tmp_path), earlier, now)


def test_of_many_differences_some_are_shown_and_another_order_is_named(tmp_path: Path) -> None:
    now = parse_config(RAW).to_dict()
    earlier = {**now, "tables": now["tables"][::-1]}
    with pytest.raises(StorageError, match=r"\(tables: the same items in another order\)"):
        refuse_other_config(RunFolder(tmp_path), earlier, now)
    earlier = {**now, "schema": {**now["schema"], "sparse": now["schema"]["sparse"][:2]}}
    with pytest.raises(StorageError, match=r'schema.sparse.tags.name: null → "tags"; .*; schema: \d more fields\)'):
        refuse_other_config(RunFolder(tmp_path), earlier, now)


def test_relative_paths_start_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(apply_override(RAW, "data.train=[a, /b, 's3://c/d']"))
    assert resolved(config, tmp_path).data.train.path == [str(tmp_path / "a"), "/b", "s3://c/d"]
    assert resolved(config, tmp_path).storage.path == str(tmp_path / "runs")
    package = tmp_path / "_ray_pkg_0123" / "sub"
    for part in ("a", "eval"):
        (package / part).mkdir(parents=True)
    monkeypatch.chdir(package)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolved(config).data.eval.path == str(package / "eval")
    assert resolved(config).storage.path == str(tmp_path / "home" / "rayrec" / "runs")
    (package / "eval").rmdir()
    with pytest.raises(TrainError, match=r"data\.eval: eval is not in the job's copy of the working folder"):
        resolved(config)
