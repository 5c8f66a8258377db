"""The config: what is refused and how it is told, overrides, and the reference made from it."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayrec.train import ConfigError, TrainConfig, load_config, parse_config
from rayrec.train.config.file import apply_override, parse_yaml
from rayrec.train.config.reference import config_reference
from rayrec.train.config.removed import without_removed
from tests.train.small import RAW, raw_config

INTERVAL = "must be a number of steps, e.g. 500, or a duration, e.g. 10s, 15min or 1.5h"
NO_INTERVALS = (
    *("0", "-1", "1.5", "true", "'15'", "''", "[15]", "{s: 15}", "min", "0s", "0.0h", "-5min", "+5min", ".5h", "5.h"),
    *("1e3s", "15m", "15Min", "15  min", " 15min x", "'15min '", "1h30min", "inf s", "٣s", f"{'9' * 400}h"),
)


def problem(*overrides: str) -> str:
    raw = RAW
    with pytest.raises(ConfigError) as caught:
        for override in overrides:
            raw = apply_override(raw, override)
        parse_config(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.num_worker=4", ["trainer.num_worker: unknown field", "did you mean 'num_workers'?", "batch_size"]),
        ("trainr.epochs=4", ["trainr: unknown field", "did you mean 'trainer'?"]),
        ("data.read.reder=ray", ["data.read.reder: unknown field", "'reader'"]),
        ("trainer.epochs=many", ["trainer.epochs: got 'many' (str)", "valid integer"]),
        *((f"trainer.log_every={value}", ["trainer.log_every: got", INTERVAL]) for value in NO_INTERVALS),
        ("trainer.log_every=null", ["trainer.log_every: got None (NoneType)", INTERVAL]),
        ("trainer.checkpoint_every=15 bananas", ["trainer.checkpoint_every: got '15 bananas' (str)", INTERVAL]),
        ("trainer.eval_every=0", ["trainer.eval_every: got 0 (int)", INTERVAL]),
        (
            "trainer.wait_for_resources_s=600",
            ["trainer.wait_for_resources_s: this option was removed", "trainer.wait_for_room_s"],
        ),
        ("trainer.log_every_s=5", ["trainer.log_every_s: this option was removed", "trainer.log_every: 10s"]),
        (
            "trainer.checkpoint_every_minutes=5",
            ["trainer.checkpoint_every_minutes: this option was removed", "trainer.checkpoint_every: 15min"],
        ),
        ("trainer.eval_every_minutes=5", ["trainer.eval_every_minutes: this", "write e.g. trainer.eval_every: 15min"]),
        ("trainer.epochs=0", ["trainer.epochs: got 0", "greater than or equal to 1"]),
        ("trainer.seed=1.5", ["trainer.seed: got 1.5 (float)"]),
        ("trainer.use_gpu=maybe", ["trainer.use_gpu: got 'maybe'", "`true` or `false` or `auto`"]),
        ("trainer.cpus_per_worker=lots", ["trainer.cpus_per_worker: got 'lots'", "number > 0 or `auto`"]),
        ("optimizers.sparse.kind=adamm", ["optimizers.sparse.kind: got 'adamm'", "'rowwise_adagrad'"]),
        ("optimizers.dense.lr=-1", ["optimizers.dense.lr: got -1", "greater than 0"]),
        ("optimizers.dense.lr=.nan", ["optimizers.dense.lr", "finite number"]),
        ("tables.user.dim=0", ["tables.user.dim"]),
        ("tables.user.dim=16", ["tables: model dlrm needs one dim for all tables"]),
        ("tables.user.rows=0", ["tables.user.rows: got 0"]),
        ("tables.user.pooling=max", ["tables.user.pooling: got 'max'; allowed: 'sum' or 'mean'"]),
        ("tables.user.name=item", ["tables: table name 'item' is used twice"]),
        ("tables.user.features=[usr]", ["'usr' is not a sparse feature", "did you mean 'user'?"]),
        ("tables.user.features=[user, user]", ["tables.user.features: table 'user': feature 'user' is listed twice"]),
        ("tables.user.features=[item]", ["schema.sparse.user: no table reads feature 'user'"]),
        ("schema.sparse.item.mapping.kind=hsh", ["schema.sparse.item.mapping.kind: got 'hsh'", "'hash'"]),
        ("schema.sparse.item.mapping.sed=1", ["schema.sparse.item.mapping.sed: unknown field", "'seed'"]),
        ("schema.sparse.item.name=user", ["schema: feature names must be unique"]),
        ("sharding.constraints.usr={}", ["sharding.constraints.usr: no table is named 'usr'; did you mean 'user'?"]),
        (
            "sharding.constraints.user.sharding_types=[rowwise]",
            ["sharding.constraints.user.sharding_types: 'rowwise' is not a sharding type", "row_wise"],
        ),
        (
            "sharding.constraints.user.compute_kernels=[fast]",
            ["sharding.constraints.user.compute_kernels: 'fast' is not a compute kernel", "fused"],
        ),
        ("model.args.dense_arch=[16, 4]", ["model.args.dense_arch: [16, 4] must end with the dim of the tables, 8"]),
        ("model.args.over_arch=[16]", ["model.args.over_arch: [16] must end with 1"]),
        ("schema.labels=[{name: a}]", ["schema: give `label` (one) or `labels` (several), not both"]),
        ("schema={label: null, dense: [{name: age}]}", ["schema: no label: give `label`"]),
        ("schema={labels: [{name: a}, {name: a}], dense: [{name: age}]}", ["appear more than once: ['a']"]),
        ("data.negative_rate=0", ["data.negative_rate: got 0"]),
        ("model.factory=a.b:c", ["model: set `name`", "or `factory`", "not both"]),
        ("storage.path=s3://user:secret@bucket/runs", ["storage.path: s3://", "was given with credentials"]),
        ("name=../up", ["name: got '../up'"]),
        ("name=null", ["name: got None"]),
        ("data=3", ["data: got 3 (int); it is a section with the fields train, eval, eval_sets, test, ", "read"]),
        ("data.train=[{path: a, weight: 3}, {path: b, weight: 0}]", ["data.train.1.weight: got 0", "greater than 0"]),
        ("data.train=[{path: a}, {path: b, wait: 3}]", ["data.train.1.wait: unknown field; did you mean 'weight'?"]),
        ("data.train=[{path: a}, {weight: 3}]", ["data.train.1.path: is missing"]),
        ("data.eval=[{path: a}, {path: b}]", ["data.eval: ", "is not a path, a list of paths, or a section"]),
        ("tables=[]", ["tables: got []", "at least 1 item"]),
        ("tables.user.name=''", ["tables..name: got ''", "at least 1 character"]),
        ("tables.user.init=0", ["tables.user.init: got 0", "greater than 0"]),
        (
            "tables.user.init=v.parquet",
            ["tables.user.init: got 'v.parquet'", "section with the fields path, id, vector"],
        ),
        ("tables.user.init={path: v, id: user}", ["tables.user.init.vector: is missing"]),
        ("tables.user.init={path: v, id: user, vectors: v}", ["init.vectors: unknown field; did you mean 'vector'?"]),
        (
            "tables.user.init={path: v, id: user, vector: v, feature: usr}",
            ["tables.user.init.feature: table 'user' does not have feature 'usr'", "(features: user)"],
        ),
        ("tables.user.features=[]", ["tables.user.features: got []", "at least 1 item"]),
        ("sharding.constraints.user.sharding_types=[]", ["sharding_types: got []", "at least 1 item"]),
        ("sharding.constraints.user.compute_kernels=[]", ["compute_kernels: got []", "at least 1 item"]),
        ("storage.path=''", ["storage.path: got ''", "at least 1 character"]),
        ("init_from=''", ["init_from: got ''", "at least 1 character"]),
        ("model={factory: 'a.b'}", ["model.factory: got 'a.b'", "match pattern"]),
        ("trainer.use_gpu=true", ["trainer.use_gpu: num_workers: 0 trains in this process, on CPU"]),
        ("optimizers.dense.schedule.kind=step", ["optimizers.dense.schedule: kind 'step' needs `decay_steps`"]),
        ("data.progressive=day", ["data: progressive needs one data set in train and none in eval"]),
        ("data={train: [a, {path: b}], progressive: day}", ["data: progressive needs one data set in train"]),
        ("data={train: [a, {path: b}], shuffle: none}", ["data.shuffle: `none` keeps the order of one data set"]),
        ("sharding.replicas=2", ["0 workers (trainer.num_workers) cannot be split into 2 groups", "allowed: 1"]),
        ("data.train=7", ["data.train: 7 is not a path, a list of paths, or a section with path and filters"]),
    ],
)
def test_a_wrong_field_is_named_with_the_fix(override: str, parts: list[str]) -> None:
    text = problem(override)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("workers", "replicas", "fit"), [(4, 3, "1, 2, 4"), (6, 4, "1, 2, 3, 6"), (2, 4, "1, 2"), (1, 2, "1")]
)
def test_groups_that_do_not_divide_the_workers_are_refused(workers: int, replicas: int, fit: str) -> None:
    text = problem(f"sharding.replicas={replicas}", f"trainer.num_workers={workers}")
    assert text.strip() == (
        f"sharding.replicas: {workers} workers (trainer.num_workers) cannot be split into {replicas} groups of equal "
        f"size; allowed: {fit}"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["sharding.replicas=2", "trainer.num_workers=4"],
        ["sharding.replicas=3", "trainer.num_workers=[1, 4]"],
        ["sharding.replicas=auto", "trainer.num_workers=3"],
        ["trainer.batch_size=4", "trainer.num_workers=4"],
        ["trainer.use_gpu=true", "trainer.num_workers=1"],
        ["trainer.use_gpu=false"],
        ["data.shuffle=none"],
        ["data.negative_rate=0.5"],
        ["data.eval=null", "data.progressive=day"],
        ["data.train=[{path: a}, b]", "data.negative_rate=1"],
        ["tables.user.features=[user, item]"],
        ["optimizers.dense.schedule={kind: step, decay_steps: 1}"],
        ["model={factory: 'a_1.b:_c'}"],
        ["name=A", "init_from=there"],
    ],
)
def test_what_just_fits_is_taken(overrides: list[str]) -> None:
    raw = RAW
    for override in overrides:
        raw = apply_override(raw, override)
    config = parse_config(raw)
    assert parse_config(config.to_dict()) == config
    assert config.init_from is None or config.init_from.path == "there"


@pytest.mark.parametrize(
    ("text", "interval", "plain"),
    [
        ("500", (500, None), 500),
        ("10s", (None, 10), "10s"),
        ("15min", (None, 900), "15min"),
        ("15 min", (None, 900), "15min"),
        ("1.5h", (None, 5400), "90min"),
        ("1.1h", (None, 3960), "66min"),
        ("120min", (None, 7200), "2h"),
        ("90s", (None, 90), "90s"),
        ("0.5s", (None, 0.5), "0.5s"),
        ("0.0000001min", (None, 6e-6), "0.000006s"),
    ],
)
def test_an_interval_is_steps_or_a_duration(
    text: str, interval: tuple[int | None, float | None], plain: int | str
) -> None:
    config = parse_config(apply_override(RAW, f"trainer.checkpoint_every={text}"))
    every: Any = config.trainer.checkpoint_every
    assert (every.steps, every.seconds) == interval and str(every) == str(plain)
    assert config.to_dict()["trainer"]["checkpoint_every"] == plain
    assert parse_config(parse_yaml(yaml.safe_dump(config.to_dict()))) == config
    assert parse_config(raw_config(Path(), trainer__eval_every=every)).trainer.eval_every == every


@given(st.integers(min_value=1) | st.floats(1e-9, 1e30))
def test_an_interval_comes_back_from_its_plain_value(value: float) -> None:
    given = value if isinstance(value, int) else f"{Decimal(repr(value)):f}s"
    config = parse_config(raw_config(Path(), trainer__eval_every=given))
    assert parse_config(config.to_dict()).trainer.eval_every == config.trainer.eval_every


def test_intervals_of_the_trainer_by_default() -> None:
    trainer = TrainConfig(**{**RAW, "trainer": {}}).trainer
    assert [str(every) for every in (trainer.log_every, trainer.checkpoint_every, trainer.eval_every)] == [
        "10s", "15min", "None"
    ]  # fmt: skip


MINUTES = "checkpoint_every_minutes"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"log_every": None, "log_every_s": 10.0}, {"log_every": "10s"}),
        ({"log_every": 5, "log_every_s": 10.0}, {"log_every": 5}),
        ({"log_every_s": 0.5}, {"log_every": "0.5s"}),
        ({"checkpoint_every": None, MINUTES: 15.0}, {"checkpoint_every": "15min"}),
        ({"checkpoint_every": None, MINUTES: 1e-9}, {"checkpoint_every": "0.00000006s"}),
        ({"checkpoint_every": None, MINUTES: None}, {"checkpoint_every": None}),
        ({MINUTES: None}, {"checkpoint_every": None}),
        ({"checkpoint_every": 100, MINUTES: 5.0}, {"checkpoint_every": 100}),
        ({"eval_every": None, "eval_every_minutes": None}, {"eval_every": None}),
        ({"eval_every": None, "eval_every_minutes": 90}, {"eval_every": "90min"}),
        ({"checkpoint_every": None}, {"checkpoint_every": None}),
    ],
)
def test_pairs_of_options_in_configs_of_runs_become_one(before: dict[str, Any], now: dict[str, Any]) -> None:
    raw = without_removed({"trainer": {"epochs": 2, **before}}, of_run=True)
    assert raw == {"trainer": {"epochs": 2, **now}}


def test_old_defaults_are_taken_from_any_config() -> None:
    old = {"log_every": None, "log_every_s": 10.0, "checkpoint_every": None, MINUTES: 15.0, "eval_every_minutes": None}
    assert TrainConfig(**{**RAW, "trainer": old}) == TrainConfig(**{**RAW, "trainer": {}})


def test_negatives_of_several_labels_are_refused() -> None:
    text = problem(
        "data.negative_rate=0.5",
        "schema.label=null",
        "schema.labels=[{name: a}, {name: b}]",
        "model.args.over_arch=[16, 2]",
    )
    assert "data.negative_rate: works with one label" in text


def test_the_last_layer_has_an_output_for_each_label() -> None:
    one = problem("model.args.over_arch=[16]").strip()
    assert one == "model.args.over_arch: [16] must end with 1: the model gives one logit a row"
    two = problem("schema.label=null", "schema.labels=[{name: a}, {name: b}]").strip()
    assert two == "model.args.over_arch: [16, 1] must end with 2: the model gives one logit a row for each label"


def test_negatives_of_a_mix_are_refused() -> None:
    text = problem("data.negative_rate=0.5", "data.train=[{path: a, weight: 3}, {path: b}]")
    assert "data.negative_rate: works with one data set" in text
    assert "with `positive` or `at_least`, set it to 1" in problem(
        "data.negative_rate=0.5", "schema.label={column: y, at_least: 4}"
    )


def test_every_problem_is_told_at_once() -> None:
    text = problem("trainer.epochs=0", "storage.keep=0", "optimizers.dense.lr=x")
    assert [line.split(":")[0].strip() for line in text.splitlines()] == [
        "optimizers.dense.lr",
        "trainer.epochs",
        "storage.keep",
    ]


def test_a_missing_field_is_named() -> None:
    raw = {name: value for name, value in RAW.items() if name != "tables"}
    with pytest.raises(ConfigError, match="tables: is missing"):
        parse_config(raw)


def test_fewer_rows_than_workers_are_refused() -> None:
    text = problem("trainer.batch_size=3", "trainer.num_workers=4")
    assert "trainer.batch_size: 3 rows a step cannot be dealt to 4 workers" in text


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("trainer.epochs", "write it as field.path=value"),
        ("=3", "write it as field.path=value"),
        ("trainer..epochs=3", "write it as field.path=value"),
        ("trainer.epochs=[1", "the value is not YAML"),
        ("tables.nobody.dim=8", "the list has no item 'nobody'"),
        ("tables.9.dim=8", "items 0 to 2: user, item, tag"),
        ("name.x=8", "'small' has no field 'x'"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override(RAW, override)
    assert part in str(caught.value)
    assert override in str(caught.value)


def test_overrides_are_yaml_and_leave_the_original_alone() -> None:
    before = yaml.safe_dump(RAW)
    raw = apply_override(RAW, "trainer.num_workers=4")
    raw = apply_override(raw, "optimizers.sparse.eps=1e-6")
    raw = apply_override(raw, "tables.user.rows=50")
    raw = apply_override(raw, "sharding.constraints.user.sharding_types=[row_wise, table_wise]")
    config = parse_config(raw)
    assert config.trainer.num_workers == 4
    assert config.optimizers.sparse.eps == 1e-6
    assert config.tables[0].rows == 50
    assert config.sharding.constraints["user"].sharding_types == ["row_wise", "table_wise"]
    assert yaml.safe_dump(RAW) == before


def test_a_config_comes_back_from_its_own_values() -> None:
    config = parse_config(RAW)
    assert parse_config(config.to_dict()) == config
    assert TrainConfig(**yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_a_mix_comes_back_from_its_own_values() -> None:
    config = parse_config(apply_override(RAW, "data.train=[{path: a, weight: 3}, {path: b, filters: [[x, <, 3]]}, c]"))
    weights = [3.0, 1.0, 1.0]
    assert isinstance(config.data.train, list) and [one.weight for one in config.data.train] == weights
    assert parse_config(config.to_dict()) == config


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match=r"c\.yaml does not exist"):
        load_config(file)
    for text, part in [
        ("a: [1", "not YAML"),
        ("- 1", "a mapping with the fields name, data"),
        ("name: a\ndata: {}\nname: b", "line 3: key 'name' is given twice"),
        ("\x00", "not YAML"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(file)
        assert part in str(caught.value)
        assert str(file) in str(caught.value)


def test_the_file_is_named_with_the_field(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(RAW))
    assert load_config(file, ["trainer.epochs=5"]).trainer.epochs == 5
    with pytest.raises(ConfigError, match=r"c\.yaml:\n  trainer\.epochs"):
        load_config(file, ["trainer.epochs=x"])


def test_the_reference_has_every_field_with_its_meaning() -> None:
    rows = [line for line in config_reference().splitlines() if line.startswith("| `")]
    lines = [line for line in rows if line.count("|") >= 5 and "`model.args." not in line]  # that repeat by model
    fields = {line.split("|")[1].strip().strip("`"): [cell.strip() for cell in line.split("|")[2:]] for line in lines}
    assert len(fields) == len(lines)
    for path in ("name", "schema.sparse[].mapping.kind", "tables[].dim", "sharding.constraints.<name>.min_partition"):
        assert path in fields
    assert fields["trainer.batch_size"][:2] == ["integer ≥ 1", "`1024`"]
    own = {path: cells for path, cells in fields.items() if not path.startswith("schema.")}
    assert not [path for path, cells in own.items() if not cells[2]]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            {"dense_arc": [8], "over_arch": [1]},
            r"model\.args\.dense_arc: model dlrm does not accept it; did you mean 'dense_arch'",
        ),
        ({"over_arch": [1]}, r"model\.args\.dense_arch: model dlrm requires it"),
        (
            {"dense_arch": [8], "over_arch": [1], "dropout": "much"},
            r"model\.args\.dropout: model dlrm: input should be a valid number",
        ),
        ({"dense_arch": 8, "over_arch": [1]}, r"model\.args\.dense_arch: model dlrm: .*valid list"),
    ],
)
def test_arguments_of_a_built_in_model_are_checked_by_name_and_type(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config(raw_config(Path("/nowhere"), model={"name": "dlrm", "args": args}))


def test_the_reference_lists_the_models_own_arguments() -> None:
    chapters = dict(
        chapter.split("\n", 1) for chapter in re.split(r"^###? ", config_reference(), flags=re.MULTILINE)[1:]
    )
    assert "| `model.args.cross_layers` | integer | `3` |" in chapters["model.args of dcn"]
    assert "| `model.args.dense_arch` | list of integer | required |" in chapters["model.args of dlrm"]
    assert "cross_layers" not in chapters["model.args of dlrm"]
    assert "| `adam` | `beta1`, `beta2`, `eps` |" in chapters["optimizers.sparse by kind"]


@pytest.mark.parametrize(
    ("text", "number"), [("01234", 668), ("12:30", 750), ("-007", -7), ("0b11", 3), ("1:30.5", 90.5)]
)
def test_numbers_that_yaml_reads_as_others_are_refused(text: str, number: float) -> None:
    with pytest.raises(ConfigError, match=rf"YAML reads {text} as {number}: write '{text}' for a text, .*in line 2"):
        parse_yaml(f"a: 1\npositive: {text}\n")
    assert parse_yaml(f"a: '{text}'\nb: {number}") == {"a": text, "b": number}


def test_other_numbers_of_yaml_are_numbers() -> None:
    assert parse_yaml("[0, 0.5, -0, 0x1f, 1_000, 1e-8]") == [0, 0.5, 0, 31, 1000, 1e-8]


def test_an_error_of_yaml_shows_the_line_and_the_place() -> None:
    with pytest.raises(ConfigError, match=r"mapping values are not allowed here, in line 2:\n  b: c: d\n      \^$"):
        parse_yaml("a: 1\nb: c: d\n")
    with pytest.raises(ConfigError, match=r"end of stream, in line 1:\n  a: 'x\n       \^$"):
        parse_yaml("a: 'x\n")
    with pytest.raises(ConfigError, match=r"in line 1:\n  …x{56} : \[}\n {63}\^$"):
        parse_yaml("x" * 90 + " : [}")


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
