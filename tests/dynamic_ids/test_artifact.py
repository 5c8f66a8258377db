"""Exports of runs with dynamic ids answer as the trainer's evaluation, with the map that the export holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rayrec.data import DataError, Mapping, Schema
from rayrec.dynamic_ids import DynamicIds, ExportedIds, IdMap, export, first_weights, row_seeds
from rayrec.inference import ExportOptions, ItemIndex, Model
from rayrec.serve import App, ModelSpec, Service
from rayrec.train import Trainer, TrainError, export_run, parse_config
from tests.dynamic_ids.test_training import RULES, raw_of, saved
from tests.inference.runs import command, refused
from tests.serve.server import Server
from tests.train.small import USERS, learner_of, make_job, write_all
from tests.train.test_retrieval_run import ITEMS, with_dynamic_ids
from tests.train.test_retrieval_run import raw_config as retriever_config
from tests.train.test_retrieval_run import write as write_histories


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_all(tmp_path_factory.mktemp("exported"), rows=700)
    return Trainer(parse_config(raw_of(folder, folder / "runs"))).fit().folder


def evaluated(run: Path) -> dict[str, Any]:
    """The run's last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == "eval"][-1]


def rows_of(run: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted((run.parent.parent / "eval").iterdir())])


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_an_export_scores_raw_rows_as_the_trainer_evaluates(run: Path, tmp_path: Path, tables: str) -> None:
    folder = export_run(run, tmp_path / "model", ExportOptions(tables=tables)).folder
    model = Model(folder.rename(tmp_path / "moved"))
    mapping, table = Mapping.from_config(model.mapping_config(), labels=False), rows_of(run)
    scores, label = model.score(mapping.to_batch(table)), torch.from_numpy(table["label"].to_numpy()).float()
    logloss = float(torch.nn.functional.binary_cross_entropy_with_logits(scores, label))
    assert logloss == pytest.approx(evaluated(run)["logloss"], abs=1e-6 if tables == "fp32" else 1e-3)
    files = sorted(path.name for path in (tmp_path / "moved" / "ids").iterdir())
    assert files == ["0.bin", "1.bin", "2.bin"]
    rows = [*table.slice(0, 40).to_pylist(), {**table.to_pylist()[0], "user": -7, "item": 2**60, "city": "nowhere"}]
    server = Server(App(Service([ModelSpec(name="ctr", path=tmp_path / "moved")])))
    try:
        status, answer = server.ask("POST", "/score", {"rows": rows})
    finally:
        server.close()
    assert status == 200, answer
    asked = mapping.to_batch(pa.Table.from_pylist(rows, table.schema))
    np.testing.assert_allclose(answer["scores"]["label"], model.score(asked).sigmoid(), rtol=0, atol=2e-6)


def test_ids_without_a_row_are_what_the_config_says(run: Path, tmp_path: Path) -> None:
    """Users that nobody saw have a fallback row; cities, by `unseen: zero`, have none; null and -1 are as other ids."""
    folder = export_run(run, tmp_path / "model").folder
    mapping = Mapping.from_config(Model(folder).mapping_config(), labels=False)
    users, items = [-1, 2**62, 3], [2**63 - 1, -(2**63), 5]
    rows = {"user": users, "item": items, "city": ["city 1", "nowhere", "city 0"], "tags": [[], [1], []]}
    batch = mapping.to_batch(pa.table({**rows, "age": [0.0, 0.0, 0.0]}))
    exported = ExportedIds(folder / "ids" / "0.bin")
    assert batch.sparse["user"].values().tolist() == exported.find(np.array(users)).tolist()
    assert batch.sparse["user"].values()[1] == int(exported.layout.fallback_row([2**62])[0])
    assert batch.sparse["item"].values().max() < 30
    assert batch.sparse["city"].lengths().tolist() in ([1, 0, 1], [0, 0, 1], [1, 0, 0])
    assert Model(folder).score(batch).isfinite().all()


def test_ids_are_listed_with_rows_counts_and_times(run: Path) -> None:
    head, *lines = command("ids", run).splitlines()
    assert head == "table,id,row,count,last_seen"
    listed = [line.split(",") for line in lines]
    assert {line[0] for line in listed} == {"user", "item", "city"}
    users = [[int(number) for number in rest] for table, *rest in listed if table == "user"]
    assert len({user for user, *_ in users}) == len(users) > 3
    assert all(0 <= user < USERS and row < 24 and count >= 1 for user, row, count, _ in users)
    newest = rows_of(run)["at"].to_numpy().max()  # of evaluation rows, which lie in the same three days
    assert all(newest - 4 * 86_400 < seen <= newest + 86_400 for *_, seen in users)


def test_weights_in_one_file_come_with_the_ids_of_their_rows(run: Path, tmp_path: Path) -> None:
    command("checkpoint", "convert", run, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name in tensors if name.startswith("dynamic_ids.")} == {
        f"dynamic_ids.{name}" for name in ("user", "item", "city")
    }
    ids = tensors["dynamic_ids.user"]
    listed = [line.split(",") for line in command("ids", run).splitlines() if line.startswith("user")]
    assert all(ids[int(row)] == int(key) for _, key, row, *_ in listed)


def test_another_run_starts_with_the_ids_and_rows_of_a_run(run: Path, tmp_path: Path) -> None:
    """It trains on one row, so that each map takes in at most one id; untrained rows keep their weights.

    A map keeps its filter or none, also where a new feature shares its rows.
    """
    source, row = run.parent.parent, rows_of(run).slice(0, 1)
    (tmp_path / "train").mkdir()
    pq.write_table(row.append_column("friend", row["user"]), tmp_path / "train" / "one.parquet")
    init = {"path": str(run), "fresh": ["over_arch"]}
    raw = raw_of(source, tmp_path / "runs", name="next", init_from=init, trainer__epochs=1, data__eval=None)
    user, item = [{key: value for key, value in RULES[name].items() if key != "admit"} for name in ("user", "item")]
    for feature, rule in zip(raw["schema"]["sparse"], (user, item), strict=False):
        feature["mapping"] = rule
    raw["schema"]["sparse"].insert(0, {"name": "friend", "mapping": user})
    raw["tables"][0]["features"] = ["friend", "user"]
    raw["data"]["train"], raw["optimizers"]["sparse"]["lr"] = str(tmp_path / "train"), 1e-30
    began, now = saved(raw_of(source, run.parent)), Trainer(parse_config(raw)).fit().folder
    then = saved(raw)
    for name in ("user", "item", "city"):
        same = then[f"map/{name}/identity"] == began[f"map/{name}/identity"]
        assert int((~same).sum()) <= 1, name
        (key,) = (key for key in then if key.startswith("table/") and key.endswith(f".{name}"))
        assert torch.equal(then[key][: len(same)][same], began[key][: len(same)][same]), name
    assert then["map/user/clock"] >= began["map/user/clock"] and then["map/item/clock"] == 1
    assert "loaded 4 tables" in (now / "metrics.jsonl").read_text()
    kept = parse_config(yaml.safe_load((now / "config.yaml").read_text())).data_schema.dynamic
    counts = {name: rule.admit and rule.admit.min_count for name, rule in kept.items()}
    assert counts == {"friend": 1, "user": 1, "item": 2, "city": 2}
    raw["name"] = "hashed"
    for feature in raw["schema"]["sparse"][:2]:
        feature["mapping"] = {"kind": "hash"}
    with pytest.raises(TrainError, match="mapping was dynamic and is hash"):
        Trainer(parse_config(raw)).fit()


def test_ids_of_a_vocabulary_and_of_a_hash_take_their_rows_along(tmp_path: Path) -> None:
    """With room for all, each id has the vector that it had, whatever row that was in."""
    folder = write_all(tmp_path, rows=700)
    for name in ("user", "item"):
        command("data", "vocabulary", folder / "train", "--column", name, "--out", tmp_path / f"{name}.parquet")
    raw, runs = raw_of(folder, tmp_path / "runs", name="earlier"), tmp_path / "runs"
    user, item, city, _ = raw["schema"]["sparse"]
    user["mapping"] = {"kind": "vocabulary", "path": str(tmp_path / "user.parquet"), "oov_rows": 2}
    item["mapping"], city["mapping"] = {"kind": "hash"}, {"kind": "hash"}
    raw["tables"][0]["rows"], raw["tables"][1]["rows"] = 50, 40
    earlier = Trainer(parse_config(raw)).fit().folder
    began, rows = saved(raw), pa.concat_tables([pq.read_table(path) for path in (folder / "train").iterdir()])
    old = Mapping.from_config(earlier / "config.yaml").to_batch(rows).sparse

    raw = raw_of(folder, runs, name="dynamic", init_from={"path": str(earlier), "fresh": ["city"]})
    raw["schema"]["sparse"][0]["mapping"] = {"kind": "dynamic", "admit": {"min_count": 1}}
    raw["tables"][0]["rows"] = raw["tables"][1]["rows"] = 256
    raw["optimizers"]["sparse"]["lr"] = 1e-30
    with pytest.raises(TrainError, match=r"'item' was hashed.*`rayrec data vocabulary`.*init_from.ids.item"):
        Trainer(parse_config(raw)).fit()
    raw["init_from"]["ids"] = {"itme": str(tmp_path / "item.parquet")}
    with pytest.raises(TrainError, match=r"init_from.ids.itme: no feature .* \(these have: user, item, city\)"):
        Trainer(parse_config(raw)).fit()
    raw["init_from"]["ids"] = {"item": str(tmp_path / "item.parquet")}
    now = Trainer(parse_config(raw)).fit().folder
    then, listed = saved(raw), [line.split(",") for line in command("ids", now).splitlines()[1:]]
    for name in ("user", "item"):
        new = {int(key): int(row) for table, key, row, *_ in listed if table == name}
        assert new.keys() == {*rows[name].to_pylist()}
        (key,) = (key for key in then if key.startswith("table/") and key.endswith(f".{name}"))
        found = then[key][[new[one] for one in rows[name].to_pylist()]]
        assert torch.equal(found, began[key][old[name].values().long()]), name


def test_forgotten_ids_leave_with_their_state_and_come_back_as_new(run: Path, tmp_path: Path) -> None:
    copy, file = Path(shutil.copytree(run, tmp_path / "runs" / run.name)), tmp_path / "ids.txt"
    raw = raw_of(run.parent.parent, copy.parent)
    before, listed = (
        saved(raw),
        [line.split(",") for line in command("ids", run).splitlines() if line.startswith("user")],
    )
    keys, rows = zip(*((int(key), int(row)) for _, key, row, *_ in listed[:3]), strict=True)
    file.write_text("\n".join(map(str, [*keys, 2**62])))
    assert "several tables have dynamic ids: choose one of user, item, city" in refused(
        "ids", "forget", copy, "--ids", file
    )
    assert "removed 3 ids; 1 have no row" in command("ids", "forget", copy, "--ids", file, "--table", "user")
    after, gone = saved(raw), torch.zeros(24, dtype=torch.bool)
    gone[list(rows)] = True
    for name, tensor in before.items():
        if ".user" in name:
            assert (after[name][gone] == 0).all() and torch.equal(after[name][~gone], tensor[~gone]), name
        elif not name.startswith("map/user/"):
            assert torch.equal(after[name], tensor), name
    assert {int(line.split(",")[1]) for line in command("ids", copy).splitlines() if line.startswith("user")} == {
        int(key) for _, key, *_ in listed[3:]
    }
    # Neither needs the code of the run's model.
    written = (copy / "config.yaml").read_text()
    with_code = yaml.safe_load(written)
    with_code["model"] = {"name": None, "factory": "nowhere:model"}
    (copy / "config.yaml").write_text(yaml.safe_dump(with_code))
    assert len(command("ids", copy).splitlines()) > 1
    assert "removed 0 ids" in command("ids", "forget", copy, "--ids", file, "--table", "user")
    (copy / "config.yaml").write_text(written)
    # The run goes on, with tables that no longer train: ids that come again have the first weights of their seeds.
    raw["trainer"]["epochs"], raw["optimizers"]["sparse"]["lr"] = 3, 1e-30
    # A default that is another one in a later release changes nothing in a run: it recorded what it began with.
    for name in ("given.yaml", "config.yaml"):
        config = yaml.safe_load((copy / name).read_text())
        city = config["schema"]["sparse"][2]["mapping"]
        assert city["admit"] == ({"min_count": 2, "probability": 1.0} if name == "config.yaml" else None)
        city["evict"] = "lfu"
        (copy / name).write_text(yaml.safe_dump(config))
    Trainer(parse_config(raw)).fit()
    assert yaml.safe_load((copy / "config.yaml").read_text())["schema"]["sparse"][2]["mapping"]["evict"] == "lfu"
    tensors, (path,) = saved(raw), [name for name in before if name.startswith("table/") and name.endswith(".user")]
    table = learner_of(make_job(raw)).model.tables()[path.removeprefix("table/")]
    back = [
        row for row in range(24) if tensors["map/user/score"][row] and int(tensors["map/user/identity"][row]) in keys
    ]
    ids = tensors["map/user/identity"][back].numpy()
    fresh = first_weights(ids, 8, table="user", seed=table.seed, low=-(24**-0.5), high=24**-0.5)
    assert back and torch.equal(tensors[path][back], torch.from_numpy(fresh))
    file.write_text("7\nseven")
    assert "line 2: 'seven' is not an integer id" in refused("ids", "forget", copy, "--ids", file, "--table", "user")


def test_a_run_tells_bytes_and_use_of_its_maps(run: Path) -> None:
    configs = [DynamicIds(rows=24), DynamicIds(rows=30, min_count=2), DynamicIds(rows=8, min_count=2)]
    (memory,) = json.loads((run / "plan.json").read_text())["memory"]
    assert memory["map_bytes"] == sum(IdMap(config).nbytes for config in configs)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [line["dynamic_ids"] for line in lines if line.get("kind") == "train"]
    assert all(tables.keys() == {"user", "item", "city"} for tables in told)
    assert all(0 < table["rows_used"] <= table["rows"] for tables in told for table in tables.values())
    assert all(0 < table["own_share"] <= 1 for tables in told[1:] for table in tables.values())
    assert sum(tables["user"]["expired"] + tables["user"]["evicted"] for tables in told) > 0
    assert sum(tables["item"]["waiting"] for tables in told) > 0
    assert all(0 <= table["full_share"] <= 1 for tables in told for table in tables.values())
    report, last = (run / "report.html").read_text(), told[-1]["user"]
    cells = [f"{last['rows_used']:,}", f"{last['rows']:,}", f"{last['full_share']:.1%}", f"{last['own_share']:.1%}"]
    assert "</td><td class='num'>".join(["user", *cells]) in report


@pytest.mark.parametrize("unseen", ["hashed", "zero"])
def test_nulls_defaults_and_unsigned_ids(tmp_path: Path, unseen: str) -> None:
    """A default id without a row is left out by `unseen: zero`, as any other; 2⁶⁴ - 1 is the id -1."""
    own = IdMap(DynamicIds(rows=64))
    own.step(np.array([7, 8, -1]), 1)
    export(own, tmp_path / "ids.bin")
    rule = {"kind": "dynamic", "path": str(tmp_path / "ids.bin"), "unseen": unseen}
    sparse = [{"name": "one", "mapping": rule, "default": 999}, {"name": "list", "kind": "id_list", "mapping": rule}]
    sparse[1] |= {"on_null": "empty"}
    schema = Schema.model_validate({"sparse": sparse})
    mapping = Mapping(schema, {"one": 64, "list": 64}, labels=False)
    lists = pa.array([[2**64 - 1, 5], None, [7, None]], pa.list_(pa.uint64()))
    batch = mapping.to_batch(pa.table({"one": pa.array([8, None, 7]), "list": lists}))
    zero = unseen == "zero"
    assert batch.sparse["one"].lengths().tolist() == [1, 0 if zero else 1, 1]
    assert batch.sparse["list"].lengths().tolist() == [1 if zero else 2, 0, 1]
    known = own.find(np.array([8, 7, -1, 7])).tolist()
    rows = batch.sparse["one"].values().tolist() + batch.sparse["list"].values().tolist()
    assert (rows if zero else [rows[0], rows[2], rows[3], rows[5]]) == known


def test_a_mapping_without_the_map_is_refused(run: Path) -> None:
    with pytest.raises(DataError, match=r"'user', 'item', 'city'.* have dynamic ids.*export the run"):
        Mapping.from_config(run / "config.yaml")


def test_an_index_has_the_items_that_have_a_row_and_a_query_finds_them(tmp_path: Path) -> None:
    """Tables are not trained, so each row has the first weights of its id: normal ones, drawn from its own seed."""
    for part, rows in (("train", 400), ("eval", 60)):
        write_histories(tmp_path / part, rows, seed=len(part))
    raw = with_dynamic_ids(retriever_config(tmp_path, "sasrec"), rows=32)  # for 60 items
    raw["trainer"] |= {"epochs": 1, "early_stopping": None}
    raw["optimizers"]["sparse"] = {"kind": "adam", "lr": 1e-30}
    run = Trainer(parse_config(raw)).fit().folder
    tensors, ((path, table),) = saved(raw), learner_of(make_job(raw)).model.tables().items()
    used = tensors["map/history/score"] > 0
    for vector, seed in zip(
        tensors[f"table/{path}"][: len(used)][used],
        row_seeds(tensors["map/history/identity"][used].numpy(), "history", table.seed).tolist(),
        strict=True,
    ):
        first = torch.empty(1, 16).normal_(std=0.02, generator=torch.Generator().manual_seed(seed >> 1))
        torch.testing.assert_close(vector[None], first, rtol=0, atol=0)
    items = pa.table({"item": np.arange(ITEMS), "name": [f"film {number}" for number in range(ITEMS)]})
    pq.write_table(items, tmp_path / "items.parquet")
    said = command("index", run, tmp_path / "index", "--items", tmp_path / "items.parquet")
    listed = sorted(int(line.split(",")[1]) for line in command("ids", run).splitlines()[1:])
    index = ItemIndex(tmp_path / "index")
    assert sorted(index.items["item"].to_pylist()) == listed and 20 < len(listed) < ITEMS, said
    command("retrieve", tmp_path / "index", tmp_path / "eval", tmp_path / "out", "--k", 5)
    found = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))])
    answers = [one for row in found["items"].to_pylist() for one in row]
    assert answers and {*answers} <= {*listed}
