"""The run folder: that it can be written is found out first, one run at a time, and what a relaunch may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rayrec.data import DataSet
from rayrec.train import (
    StorageError,
    TrainError,
    parse_config,
)
from rayrec.train.config.difference import flat
from rayrec.train.config.relaunch import RULES
from rayrec.train.run.folder import RunFolder, newest_checkpoint, refuse_other_config, write_json, write_yaml
from rayrec.train.run.mirror import FILES, Mirror
from rayrec.train.run.paths import in_job_package, resolved
from tests.train.small import RAW, config_of


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
    refuse_other_config(RunFolder(tmp_path), earlier, config_of(override).to_dict())


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
        refuse_other_config(folder, earlier, config_of(override).to_dict())
    assert part in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_a_table_with_its_own_optimizer_keeps_it(tmp_path: Path) -> None:
    earlier = config_of("optimizers.tables={user: {kind: sgd}}").to_dict()
    refuse_other_config(
        RunFolder(tmp_path), earlier, config_of("optimizers.tables={user: {kind: sgd, lr: 0.5}}").to_dict()
    )
    with pytest.raises(StorageError, match=r'tables.user.kind: "sgd" → "rowwise_adagrad"\)'):
        refuse_other_config(RunFolder(tmp_path), earlier, parse_config(RAW).to_dict())


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
    config = config_of("data.train=[a, /b, 's3://c/d']")
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


def far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, Path]:
    """A run folder that stands for a URI, and the folder that the URI means."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return RunFolder.at(f"file://{folder}/there", "a"), folder / "there" / "a"


def test_the_mirror_takes_what_is_there_and_sends_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = far(tmp_path, monkeypatch)
    there.mkdir(parents=True)
    (there / "config.yaml").write_text("a: 1")
    (there / "other").write_text("x")
    here.plan.write_text("of an earlier run")
    here.config.write_text("a: 0")
    mirror = Mirror(here)
    mirror.pull()
    here.metrics.write_text("{}")
    mirror.push([].append)
    assert (there / "metrics.jsonl").read_text() == "{}", "also where a file before it is not there"
    (there / "metrics.jsonl").unlink()
    assert here.config.read_text() == "a: 1" and not here.plan.exists() and not (here.path / "other").exists()
    assert sorted(path.name for path in there.iterdir()) == ["config.yaml", "other"], "no probe is left"
    said: list[str] = []
    for name in FILES:
        (here.path / name).write_text(name)
    (here.path / "other").write_text("y")
    mirror.push(said.append)
    assert {path.name: path.read_text() for path in there.iterdir()} == {**{name: name for name in FILES}, "other": "x"}
    (there / "plan.json").write_text("kept")
    (there / "report.html").write_text("to go")
    here.report.write_text("new report")
    mirror.push(said.append)
    assert (there / "plan.json").read_text() == "kept", "it has not changed here"
    assert (there / "report.html").read_text() == "new report" and said == []
    written = here.config.stat().st_mtime_ns
    (there / "config.yaml").write_text("config.yaml")
    mirror.pull()
    assert here.config.stat().st_mtime_ns == written, "what is alike is left as it is"


@pytest.mark.parametrize("has_id", [True, False])
def test_lines_that_a_killed_driver_did_not_copy_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_id: bool
) -> None:
    here, there = far(tmp_path, monkeypatch)
    lines = [f'{{"step": {step}}}\n' for step in range(30)]
    here.metrics.write_text("".join(lines[:10]))
    here.tensorboard.mkdir()
    (here.tensorboard / "events.1").write_text("curve")
    if has_id:
        here.run_id()
    Mirror(here).push(pytest.fail)
    here.metrics.write_text("".join(lines))
    (here.tensorboard / "events.1").write_text("longer curve")
    Mirror(here, writes_records=False).pull()  # `rayrec report`, which copies no records back
    Mirror(here, writes_records=False).push(pytest.fail)
    assert (there / "metrics.jsonl").read_text() == "".join(lines[:10])
    relaunched = Mirror(here)
    relaunched.pull()
    assert here.metrics.read_text() == "".join(lines)
    relaunched.push(pytest.fail)
    assert (there / "tensorboard" / "events.1").read_text() == "longer curve"
    shutil.rmtree(here.path)
    here = far(tmp_path, monkeypatch)[0]  # as on another machine
    Mirror(here).pull()
    assert here.metrics.read_text() == "".join(lines)
    assert (here.tensorboard / "events.1").read_text() == "longer curve"


def test_lines_of_a_run_that_another_machine_went_on_with_or_started_over_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = far(tmp_path, monkeypatch)
    here.metrics.write_text("1\n")
    run_id = here.run_id()
    Mirror(here).push(pytest.fail)
    here.metrics.write_text("1\n2 here\n")
    (there / "metrics.jsonl").write_text("1\n2 there\n")
    Mirror(here).pull()
    assert here.metrics.read_text() == "1\n2 there\n"
    here.metrics.write_text("1\n2 there\n3\n")
    here.tensorboard.mkdir()
    (there / "metrics.jsonl").unlink()
    (there / "run_id").write_text("another\n")
    Mirror(here).pull()
    assert not here.metrics.exists() and not here.tensorboard.exists() and here.run_id() == "another" != run_id


def test_a_mirror_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = far(tmp_path, monkeypatch)
    there.parent.write_text("a file")
    said: list[str] = []
    mirror = Mirror(here)
    with pytest.raises(StorageError, match=r"storage\.path: the run folder .*there/a cannot be read and written"):
        mirror.pull()
    here.config.write_text("a: 0")
    mirror.push(said.append)
    assert said == [f"cannot write files of the run to {there} (Not a directory); training continues"]
    near = Mirror(RunFolder(tmp_path))
    near.pull()
    near.push(said.append)
    assert len(said) == 1, "a folder needs no copy"
    (here.path / ".storage").write_text("xyz://somewhere/a")
    with pytest.raises(StorageError, match=r"storage\.path: cannot open .*xyz://somewhere/a"):
        Mirror(here)


def test_no_checkpoint_is_not_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert newest_checkpoint(RunFolder(tmp_path)) is None
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match=r"checkpoints cannot be read \(Not a directory\); nothing was started"):
        newest_checkpoint(RunFolder(tmp_path))


def attempts(folder: Path, *texts: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(texts))
    return RunFolder(folder).last_attempt()


def test_what_a_run_folder_holds_may_be_odd(tmp_path: Path) -> None:
    assert (
        attempts(tmp_path, '{"attempt": 1}', '{"attempt": 3}', '{"a": 1}', '{"attempt": 2}', '{"attempt": null}') == 3
    )
    folder = RunFolder(tmp_path)
    for text in ("[1]", "3"):
        folder.result.write_text(text)
        folder.config.write_text(text)
        assert folder.read_result() is None and folder.read_config() is None


def test_a_mirror_sends_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = RunFolder.at(f"file://{tmp_path}/there", "run")
    here.path.mkdir(parents=True, exist_ok=True)
    mirror, there = Mirror(here), tmp_path / "there" / "run"
    line = "x" * 999 + "\n"
    before: dict[str, tuple[int, int]] = {}

    def sent() -> int:
        """Bytes of the files there that are new or have changed since the last time."""
        now = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in there.glob("metrics*")}
        changed = sum(size for name, (at, size) in now.items() if before.get(name) != (at, size))
        before.clear()
        before.update(now)
        return changed

    total = 0
    for _ in range(500):
        with open(here.metrics, "a") as file:
            file.write(line)
        mirror.push(pytest.fail)
        total += sent()
    assert total < 5 * 500 * len(line), "the whole file each time would be 250 times as much"
    assert len(list(there.glob("metrics*"))) < 50
    other = Mirror(RunFolder.at(f"file://{tmp_path}/there", "run"))
    wanted = here.metrics.read_bytes()
    here.metrics.unlink()
    other.pull()
    assert here.metrics.read_bytes() == wanted
    other.push(pytest.fail)
    assert sent() == 0, "there is nothing new"
    with open(here.metrics, "a") as file:
        file.write("new\n")
    other.push(pytest.fail)
    assert sent() < 50 * len(line)
    here.metrics.write_text("begun again\n")
    other.push(pytest.fail)
    here.metrics.unlink()
    Mirror(here).pull()
    assert here.metrics.read_text() == "begun again\n"


def test_the_run_folder_of_a_uri_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    far = RunFolder.at("s3://b/runs/?region=x", "a")
    assert far.path.is_relative_to(tmp_path / "rayrec" / "runs") and far.path.name == "a"
    assert far.remote == "s3://b/runs/a?region=x" and far.checkpoints == "s3://b/runs/a/checkpoints?region=x"
    assert RunFolder.at("s3://b/runs", "a").path != far.path == RunFolder.at("s3://b/runs/?region=x", "a").path
    near = RunFolder.at(str(tmp_path), "b")
    assert (near.path, near.remote, near.checkpoints) == (tmp_path / "b", None, str(tmp_path / "b" / "checkpoints"))
    assert near.set_aside() is None
    aside = []
    for _ in range(3):  # within a second or two: names differ all the same
        near.create()
        assert list(near.path.iterdir()) == []
        assert near.set_aside() is None, "an empty folder holds nothing to keep"
        near.metrics.write_text("")
        aside.append(near.set_aside())
    assert len(set(aside)) == 3 and all(path is not None and Path(path).is_dir() for path in aside)
    assert near.last_attempt() == 0 and near.read_result() is None and near.read_config() is None


def test_every_path_of_a_config_starts_from_the_root() -> None:
    config = config_of(
        "data.train={path: [a, s3://b/c], index: i}",
        "data.eval=null",
        "sharding.plan=p.json",
        "sharding.calibration=c.json",
        "tables.user.init={path: v.parquet, id: user, vector: v}",
        "tables.item.init={path: 's3://b/v', id: item, vector: v}",
        "init_from=s3://old/run",
        "storage.path=s3://new/runs",
    )
    found = resolved(config, Path("/top"))
    assert isinstance(found.data.train, DataSet)
    assert (found.data.train.path, found.data.train.index) == (["/top/a", "s3://b/c"], "/top/i")
    assert [t.vectors and t.vectors.path for t in found.tables] == ["/top/v.parquet", "s3://b/v", None]
    assert found.data.eval is None and found.init_from is not None
    assert (found.sharding.plan, found.sharding.calibration) == ("/top/p.json", "/top/c.json")
    assert (found.storage.path, found.init_from.path) == ("s3://new/runs", "s3://old/run")
    mix = resolved(config_of("data.train=[{path: a}, /b]"), Path("/top")).to_dict()["data"]["train"]
    assert [one["path"] for one in mix] == ["/top/a", "/b"]
    near = resolved(config_of("init_from=old/run"), Path("/top"))
    assert near.init_from is not None and near.init_from.path == "/top/old/run"
    assert near.sharding.plan is None and isinstance(near.data.eval, DataSet) and near.data.eval.path == "/top/eval"


def test_data_of_a_job_must_have_come_with_it_or_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "_ray_pkg_01"
    here.mkdir()
    (here / "part-0.parquet").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert in_job_package(here) and in_job_package(here / "below") and not in_job_package(tmp_path)
    for path in ("/elsewhere", "s3://b/c", "~/data", "part-*.parquet", "[part-0.parquet, /elsewhere]"):
        resolved(config_of(f"data.train={path}", "data.eval=null"))
    for path in ("part-1*.parquet", "[part-0.parquet, gone]"):
        with pytest.raises(TrainError, match=r"data\.train: (part-1\*\.parquet|gone) is not in the job's copy"):
            resolved(config_of(f"data.train={path}", "data.eval=null"))
    vectors = "tables.user.init={path: %s, id: user, vector: v}"
    for path in ("/elsewhere", "part-0.parquet"):
        resolved(config_of("data={train: /a}", vectors % path))
    with pytest.raises(TrainError, match=r"tables\.user\.init\.path: gone is not in the job's copy"):
        resolved(config_of("data={train: /a}", vectors % "gone"))
    resolved(config_of("data.train=gone"), here)  # a root says where it is
    job = resolved(config_of("data={train: /a}", "init_from=runs/old"))
    assert job.init_from is not None and job.init_from.path == str(tmp_path / "home" / "rayrec" / "runs" / "old")
