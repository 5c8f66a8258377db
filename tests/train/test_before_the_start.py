"""What is decided before a run starts: paths, table versions, warm starts, clusters on paper, a search's draws."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayrec.data import DataSet, Vocabulary
from rayrec.data.mapping.vocabulary import vocabulary_checksum
from rayrec.distributed.planner.sharding_groups import Grouped
from rayrec.distributed.replicas.layout import GroupLayout
from rayrec.train import ConfigError, StorageError, TrainConfig, TrainError, parse_config
from rayrec.train.config.file import apply_override, parse_yaml
from rayrec.train.driver.elastic import NEVER_S
from rayrec.train.driver.trackers import tracker
from rayrec.train.errors import is_retryable
from rayrec.train.planning.plan_only import group_words
from rayrec.train.planning.shapes import Shape, compare, shapes_table
from rayrec.train.run.log import Record, handling_records
from rayrec.train.run.paths import in_job_package, resolved
from rayrec.train.run.resolved import ResolvedValues
from rayrec.train.setup.init_from import _same_rows, warm_start
from rayrec.train.tune.search import Search, _Reports
from rayrec.train.tune.space import space_of
from tests.train.small import RAW, raw_config


def config_of(*overrides: str) -> TrainConfig:
    raw = RAW
    for override in overrides:
        raw = apply_override(raw, override)
    return parse_config(raw)


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


def test_a_run_keeps_to_the_table_version_that_it_began_with() -> None:
    def table(path: str, version: int | None = None) -> dict[str, Any]:
        return {"path": path, "table": "delta", "version": version}

    def versions(config: TrainConfig) -> Any:
        train = config.data.train
        of_train = train.version if isinstance(train, DataSet) else [one.version for one in train]
        return of_train, None if config.data.eval is None else config.data.eval.version

    def filled(config: TrainConfig, earlier: dict[str, Any] | None) -> Any:
        return versions(ResolvedValues.of(earlier).fill(config))

    config = config_of("data={train: {path: a, table: delta}, eval: {path: b, table: delta, version: 7}}")
    earlier = {"data": {"train": table("a", 3), "eval": table("b", 5)}}
    assert filled(config, earlier) == (3, 7), "what the config names counts"
    assert filled(config, {"data": {"train": table("a", 0)}}) == (0, 7)
    assert filled(config, {"data": {"train": table("c", 3)}}) == (None, 7), "another table"
    mixed = config_of("data={train: [{path: a, table: delta}, {path: c}, {path: d, table: delta}], eval: null}")
    before = {"data": {"train": [table("d", 4), {"path": "c"}, table("a", 2), table("a", 5)], "eval": None}}
    assert filled(mixed, before) == ([2, None, 4], None)
    assert filled(config_of(), None) == (None, None)


def test_new_ids_at_the_end_of_a_vocabulary_leave_the_first_rows_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("".join(f"id {i}\n" for i in range(5)))
    vocabulary = Vocabulary(path=str(path), oov_rows=2)
    words = {"mapping": "vocabulary", "hash_law": 1, "oov_rows": 2}
    before = {**words, "vocabulary_size": 3, "vocabulary_checksum": vocabulary_checksum(str(path), 3)}
    for size in (3, 5):
        assert _same_rows("w", before, {**before, "vocabulary_size": size, "vocabulary_checksum": "y"}, vocabulary) == 5
    fix = "; use the mapping of that run, or list the table in init_from.fresh"
    for now, text in [
        ({"oov_rows": 1}, f"w: oov_rows was 2 and is 1{fix}"),
        ({"hash_law": 2}, f"w: hash_law was 1 and is 2{fix}"),
        ({"vocabulary_size": 2}, f"w: the first 3 ids of {path} differ from the ids of that run; append new ids "
                                 f"to the end of the vocabulary{fix}"),
    ]:  # fmt: skip
        with pytest.raises(TrainError) as caught:
            _same_rows("w", before, {**before, **now}, vocabulary)
        assert str(caught.value) == text
    with pytest.raises(TrainError, match="w: the first 3 ids of"):
        _same_rows("w", {**before, "vocabulary_checksum": "other"}, {**before, "vocabulary_size": 5}, vocabulary)
    with pytest.raises(TrainError, match="its ids would map to other rows: hash_law was None and is 1"):
        _same_rows("w", {"mapping": "hash"}, before, vocabulary)


def test_the_table_of_clusters_by_hand() -> None:
    fits = Shape(
        world="2x8", ranks=16, batch_size=8192, step_s=0.004096, binds="lookup", memory_bytes=1.5 * 2**30,
        memory_there=8 * 2**30,
    )  # fmt: skip
    short = Shape(world="1x1", ranks=1, batch_size=1024, problem="first line\nsecond")
    assert (fits.samples_per_s, short.samples_per_s) == (2e6, None)
    assert fits.to_dict()["samples_per_s"] == 2e6 and short.to_dict()["problem"] == "first line\nsecond"
    out = io.StringIO()
    Console(file=out, width=150).print(shapes_table([fits, short], "h100"))
    shown = [re.split("[│┃]", line)[1:-1] for line in out.getvalue().splitlines()]
    rows = [[cell.strip() for cell in line] for line in shown if line]
    assert rows == [
        ["world", "rows a step", "step", "rows/s", "fullest rank", "binds"],
        ["2x8", "8,192", "4.10 ms", "2,000,000", "1.5 GiB of 8.0 GiB", "lookup"],
        ["1x1", "1,024", "–", "–", "–", "does not fit: first line"],
    ]


def test_a_cluster_has_a_row_for_each_rank_at_least() -> None:
    config = parse_config(raw_config(Path("/nowhere"), trainer__batch_size=6, trainer__num_workers=4))
    assert [shape.batch_size for shape in compare(config, ["2", "4", "2x4"], "h100")] == [6, 6, 8]
    assert [shape.batch_size for shape in compare(config, ["1", "3", "2x4"], "h100", "weak")] == [2, 4, 12]
    alone = parse_config(raw_config(Path("/nowhere"), trainer__batch_size=6))
    assert [shape.batch_size for shape in compare(alone, ["2"], "h100", "weak")] == [12]


def test_groups_in_words() -> None:
    no_plan: Any = None
    groups = Grouped(layout=GroupLayout(8, 4), result=no_plan, sync_s=0.0015, sync_bytes=2.5 * 2**20)
    assert [group_words(groups, every).partition(":")[0] for every in (1, 2)] == [
        "2 groups of 4 workers, synchronized every step", "2 groups of 4 workers, synchronized every 2 steps"
    ]  # fmt: skip
    assert group_words(groups, 1).partition(": ")[2] == (
        "predicted 1.50 ms and 2.5 MiB per step and worker; the plan of each group:"
    )


def test_a_search_needs_its_figure_in_the_evaluations() -> None:
    reports = _Reports("gauc")
    reports.evaluation({"auc": 0.5, "step": 3, "start": "2026", "gauc": None})
    assert str(reports.problem) == "evaluations have no metric 'gauc'; available: auc, step" and reports.count == 0
    modes = {metric: Search(params=[], metric=metric).mode for metric in ("auc", "ne", "logloss", "rmse", "r2", "mae")}
    assert [metric for metric, mode in modes.items() if mode == "min"] == ["ne", "logloss", "rmse", "mae"]
    with pytest.raises(TrainError, match="track='MLflow' must be one of mlflow, wandb"):
        tracker("MLflow", "x")


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ("uniform(1,1)", "low must be below high"),
        ("log(-1,1)", "low must be below high, and above 0"),
        ("int(2,2)", "low must be below high"),
        ("uniform(0,true)", r"uniform\(…\) takes two numbers"),
        ("int(0,1,2)", r"int\(…\) takes two whole numbers"),
        ("3", "got '3'; expected"),
    ],
)
def test_bounds_that_hold_no_value_are_refused(space: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--param trainer.seed={space[:3]}.*{text}"):
        space_of([f"trainer.seed={space}"])
    with pytest.raises(ConfigError, match="write it as FIELD=SPACE"):
        space_of(["=[1]"])


def test_bounds_are_drawn_too() -> None:
    space = space_of([" trainer.seed = int(0, 1)", "optimizers.dense.weight_decay=uniform(-0.5, 0)"])
    assert {space["trainer.seed"].sample() for _ in range(64)} == {0, 1}
    decay = space["optimizers.dense.weight_decay"]
    assert (decay.lower, decay.upper) == (-0.5, 0) and all(-0.5 <= decay.sample() <= 0 for _ in range(8))


def test_yaml_of_a_config_reads_numbers_as_numbers() -> None:
    given = "[1e-8, 1.e3, +2E+3, -1e2, 0x10, 1_0, 1e, e5, 1.5, '1e-8', =]"
    assert parse_yaml(given) == [1e-8, 1000.0, 2000.0, -100.0, 16, 10, "1e", "e5", 1.5, "1e-8", "="]
    with pytest.raises(ConfigError, match="line 2: key 'a' is given twice; keep one"):
        parse_yaml("a: 1\na: 2")
    for key in ("[1]", "{a: 1}"):
        with pytest.raises(ConfigError, match="not YAML: while constructing a mapping"):
            parse_yaml(f"b: 1\n? {key}\n: 2")


def test_overrides_reach_items_by_number_and_fields_that_are_not_there() -> None:
    raw = apply_override(apply_override(RAW, "tables.2.dim=4"), "tables.0.rows=7")
    assert [table["dim"] for table in raw["tables"]] == [8, 8, 4] and raw["tables"][0]["rows"] == 7
    for wrong in ("3", "-1", "x"):
        with pytest.raises(ConfigError, match=rf"the list has no item '{wrong}' \(items 0 to 2: user, item, tag\)"):
            apply_override(RAW, f"tables.{wrong}.dim=4")
    assert apply_override({"a": None}, "a.b.c=[1, x=2]") == {"a": {"b": {"c": [1, "x=2"]}}}
    assert apply_override({"a": [1, 2]}, "a.1=3") == {"a": [1, 3]}
    assert apply_override({"t": [{"name": "1", "x": 0}, {"name": "b", "x": 0}]}, "t.1.x=9")["t"][0]["x"] == 9


def test_records_that_cannot_be_had_at_the_end_are_an_error() -> None:
    def gone() -> list[Record]:
        raise TimeoutError("the mailbox is gone")

    text = r"mailbox \(TimeoutError: the mailbox is gone\); run the same command again"
    with pytest.raises(TrainError, match=text), handling_records(gone, list, every_s=0.01, last_s=0.1):
        pass
    with pytest.raises(ValueError, match="the run's own"), handling_records(gone, list, every_s=0.01):
        raise ValueError("the run's own")


def test_the_last_records_are_asked_for_until_they_come() -> None:
    answers = iter([TimeoutError("busy"), TimeoutError("busy")])
    handled: list[Record] = []

    def take() -> list[Record]:
        if (error := next(answers, None)) is not None:
            raise error
        return [{"kind": "done"}]

    with handling_records(take, handled.append, every_s=0.01):
        pass
    assert handled[:1] == [{"kind": "done"}]


def test_what_a_new_attempt_cannot_mend() -> None:
    lasting = [FileNotFoundError(), PermissionError(), IsADirectoryError(), NotADirectoryError(), FileExistsError()]
    assert not any(is_retryable(error) for error in [*lasting, ValueError("x"), KeyError("x"), StorageError("x")])
    assert all(is_retryable(error) for error in (OSError("x"), EOFError(), BrokenPipeError(), TimeoutError()))
    assert NEVER_S > 10 * 365 * 86_400


def test_weights_to_begin_with_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("name: old")
    (tmp_path / "old" / "checkpoints").write_text("a file")
    config = parse_config(raw_config(tmp_path) | {"init_from": str(tmp_path / "old")})
    with pytest.raises(StorageError, match=rf"^init_from: {tmp_path}/old cannot be read: Not a directory$"):
        warm_start(config, {})
    assert warm_start(config_of(), {}) is None
