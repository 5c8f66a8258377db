"""Retrieval models named in a config train on Parquet over two ranks, and are evaluated over the whole corpus."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
import yaml
from rich.console import Console

from rayrec.models import RETRIEVERS, Retriever
from rayrec.train import ConfigError, Display, RunFolder, Trainer, TrainError, evaluate_run, load_config, parse_config
from rayrec.train.tune.search import check_metric
from tests.inference.runs import trained_batches
from tests.ranks import on_ranks
from tests.train.small import RAW, fit_job, fit_on_rank, make_job

ROOT = Path(__file__).resolve().parents[2]
ITEMS = 60
ARGS: dict[str, dict[str, Any]] = {
    "sasrec": {"history": "history", "max_length": 6, "dropout": 0.0},
    "hstu": {"history": "history", "max_length": 6, "dropout": 0.0, "times": "past.at", "side": ["action"]},
    "two_tower": {"item": "item", "towers": [16]},
}


def write(folder: Path, rows: int, seed: int) -> None:
    """Users who go on from an item to the one seven further, and a next item that fits."""
    random = np.random.default_rng(seed)
    starts, lengths = random.integers(0, ITEMS, rows), random.integers(0, 9, rows)
    history = [[int(start + 7 * step) % ITEMS for step in range(n)] for start, n in zip(starts, lengths, strict=True)]
    times = [[1_700_000_000 + 60 * step for step in range(n)] for n in lengths]
    actions = [[id % 3 for id in ids] for ids in history]
    item = [(one[-1] + 7) % ITEMS if one else 0 for one in history]
    folder.mkdir(parents=True)
    columns = {"history": history, "action": actions, "at": times, "item": item}
    columns["label"] = [int(bool(one)) for one in history]
    schema = {name: pa.list_(pa.int64()) if name in ("history", "action", "at") else pa.int64() for name in columns}
    for part in range(2):
        rows_of = {name: pa.array(values[part::2], schema[name]) for name, values in columns.items()}
        pq.write_table(pa.table(rows_of), folder / f"{part}.parquet", row_group_size=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    write(folder / "train", 1000, 0)
    write(folder / "eval", 201, 1)
    return folder


def raw_config(data: Path, name: str) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    raw["name"] = name
    raw["data"] = {"train": str(data / "train"), "eval": str(data / "eval"), "read": {"reader": "local"}}
    raw["storage"]["path"] = str(data / "runs")
    raw["schema"] = {
        "label": {"column": "label"},
        "sparse": [
            {"name": "history", "kind": "id_list", "mapping": {"kind": "identity"}},
            {"name": "item", "mapping": {"kind": "identity"}},
        ],
        "sequences": [{"name": "past", "ids": ["history"], "values": [{"name": "at", "kind": "time"}], "length": 8}],
    }
    raw["tables"] = [
        {"name": "history", "rows": ITEMS, "dim": 16, "features": ["history"]},
        {"name": "item", "rows": ITEMS, "dim": 16, "features": ["item"]},
    ]
    if name != "two_tower":
        del raw["schema"]["sparse"][1], raw["tables"][1]
    if name == "hstu":
        raw["schema"]["sparse"].append({"name": "action", "kind": "id_list", "mapping": {"kind": "identity"}})
        raw["schema"]["sequences"][0]["ids"].append("action")
        raw["tables"].append({"name": "action", "rows": 3, "dim": 16, "features": ["action"]})
    raw["model"] = {"name": name, "args": copy.deepcopy(ARGS[name])}
    if name != "two_tower":
        raw["model"]["loss"] = {"kind": "sampled_softmax", "negatives": 40}
    raw["trainer"]["epochs"] = 3
    raw["trainer"]["early_stopping"] = {"metric": "ndcg@10", "patience": 6}
    return raw


def with_dynamic_ids(raw: dict[str, Any], rows: int) -> dict[str, Any]:
    """The same with tables in which ids come and go."""
    for feature in raw["schema"]["sparse"]:
        feature["mapping"] = {"kind": "dynamic"}
    for table in raw["tables"]:
        table["rows"] = rows
    return raw


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(RETRIEVERS))
def test_a_named_retriever_trains_and_is_ranked_over_the_corpus(name: str, data: Path, dynamic: bool) -> None:
    """With dynamic ids, the corpus are the items that have a row at the time."""
    raw = raw_config(data, name) | {"name": f"{name}-{dynamic}"}
    results = on_ranks(2, fit_on_rank, with_dynamic_ids(raw, 4 * ITEMS) if dynamic else raw, timeout_s=350)
    found = results[0]["eval"]
    assert found == results[1]["eval"]
    assert found["recall@10"] > 0.6, found  # chance finds a sixth
    filtered = name != "two_tower"
    assert ("hr@10/unseen" in found) == filtered and found["samples"] > 150 and found["num_items"] == ITEMS
    out = io.StringIO()
    Display(Console(file=out, width=300)).evaluation({**found, "epoch": 0, "step": 1})
    line = out.getvalue()
    assert f"HR@10 {found['recall@10']:.4f}" in line and ("without seen items" in line) == filtered


def test_two_tables_without_towers_are_matrix_factorization(data: Path) -> None:
    raw = raw_config(data, "two_tower")
    raw["name"], raw["model"]["args"]["towers"] = "factorization", []
    raw["optimizers"] = {"sparse": {"kind": "adam", "lr": 0.05}}
    results = on_ranks(2, fit_on_rank, raw, timeout_s=350)
    assert results[0]["eval"] == results[1]["eval"] and results[0]["eval"]["recall@10"] > 0.6, results[0]["eval"]


def hits_of_popular_items(data: Path, name: str) -> float:
    """The part of the evaluation's targets among the ten items that training rows have most, row by row."""
    trained, asked = (pq.read_table(data / part).to_pylist() for part in ("train", "eval"))
    if name == "two_tower":
        counts = Counter(row["item"] for row in trained if row["label"])
        questions = [(row["item"], set()) for row in asked if row["label"]]
    else:
        counts = Counter(item for row in trained for item in row["history"][-4:])  # what training reads
        questions = [(row["history"][-1], set(row["history"][:-1])) for row in asked if row["history"]]
    ranks = [
        sum(counts[item] >= counts[target] for item in range(ITEMS) if item not in seen - {target}) - 1
        for target, seen in questions
    ]
    return sum(rank < 10 for rank in ranks) / len(ranks)


def fit_beside_popularity(group: dist.ProcessGroup, raw: dict[str, Any]) -> dict[str, Any]:
    return fit_job(replace(make_job(raw), popular=True), group)


@pytest.mark.parametrize("name", ["sasrec", "two_tower"])
def test_popularity_stands_beside_the_figures(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = raw_config(data, name)
    raw["trainer"] |= {"epochs": 3, "num_workers": 0}
    raw["schema"]["sequences"][0]["length"] = 4  # the ranking leaves out the items before these, too
    raw["storage"]["path"] = str(tmp_path)
    done = Trainer(parse_config(raw)).fit()
    assert done.eval is not None
    popular, expected = done.eval["popularity"], hits_of_popular_items(data, name)
    assert popular["recall@10"] == pytest.approx(expected) and 0 < expected < done.eval["recall@10"]
    assert popular["samples"] == done.eval["samples"]
    told = " ".join(capsys.readouterr().out.split())
    assert f"popularity {expected:.4f}" in told and f"evaluation HR@10 {done.eval['recall@10']:.4f}" in told
    page = (done.folder / "report.html").read_text()
    assert "Beside popularity" in page and f"{expected:.4f}" in page
    assert evaluate_run(done.folder)["popularity"] == popular
    if name == "two_tower":
        both = on_ranks(2, fit_beside_popularity, {**raw, "name": "two-ranks"}, timeout_s=350)
        assert both[0]["eval"]["popularity"] == both[1]["eval"]["popularity"] == pytest.approx(popular)
    (data / "train").rename(data / "elsewhere")
    try:
        assert "popularity" not in evaluate_run(done.folder)
        assert "popularity metrics are not computed" in capsys.readouterr().err
    finally:
        (data / "elsewhere").rename(data / "train")


def test_unknown_items_are_no_targets_and_no_candidates(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, raw = 45, raw_config(data, "sasrec")
    (tmp_path / "known.txt").write_text("".join(f"{item}\n" for item in range(known)))
    raw["schema"]["sparse"][0]["mapping"] = {"kind": "vocabulary", "path": str(tmp_path / "known.txt"), "oov_rows": 2}
    raw["tables"][0]["rows"] = known + 30  # the last 28 rows belong to no item
    raw["trainer"] |= {"epochs": 1, "num_workers": 0, "early_stopping": None, "log_every": 1}
    f1 = {"name": "f1", "factory": "torchmetrics.classification:BinaryF1Score", "training": True}
    raw["trainer"]["metrics"] = [f1]  # of rows with logits, which a retriever has not
    raw["storage"] |= {"path": str(tmp_path), "keep_best": "hr@20"}
    raw["data"]["test"] = str(data / "eval")
    done = Trainer(parse_config(raw)).fit()
    targets = [row["history"][-1] for row in pq.read_table(data / "eval").to_pylist() if row["history"]]
    unknown = sum(target >= known for target in targets)
    assert done.eval is not None and unknown > 10
    assert (done.eval["num_items"], done.eval["unknown_targets"]) == (known, unknown)
    assert done.eval["samples"] == len(targets) - unknown
    assert done.eval["hr@200/unseen"] == 1.0, "there are fewer items"
    lines = RunFolder(done.folder).read_metrics()
    for line in lines:
        assert line["kind"] == "event" or not line.keys() & {"auc", "ne", "logloss", "calibration", "rmse", "f1"}, line
    assert f"test set: hr@10/unseen {done.eval['hr@10/unseen']:.4f}, ndcg@10/unseen " in capsys.readouterr().out


def test_a_retriever_is_measured_by_value_and_time_with_weights(data: Path, tmp_path: Path) -> None:
    raw = raw_config(data, "two_tower")
    for part in ("train", "eval"):
        table = pq.read_table(data / part)
        table = table.append_column("day", pa.array(np.arange(len(table)) % 3 * 86_400))
        table = table.append_column("weight", pa.array(np.arange(len(table)) % 3 * 0.5))
        (tmp_path / part).mkdir()
        pq.write_table(table, tmp_path / part / "rows.parquet")
        raw["data"][part] = str(tmp_path / part)
    raw["schema"] |= {"timestamp": {"column": "day"}, "sample_weight": {"column": "weight"}}
    raw["trainer"] |= {"epochs": 1, "num_workers": 0, "slices": ["item"]}
    raw["storage"]["path"] = str(tmp_path)
    found = Trainer(parse_config(raw)).fit().eval
    assert found is not None
    days = found["by_time"]
    assert [day["start"] for day in days] == ["1970-01-01", "1970-01-02", "1970-01-03"]
    assert sum(day["samples"] for day in days) == found["samples"]
    assert days[0]["mrr"] is None, "its rows have no weight"
    weight = [0.5 * day["samples"] * number for number, day in enumerate(days)]
    assert found["mrr"] == pytest.approx((weight[1] * days[1]["mrr"] + weight[2] * days[2]["mrr"]) / sum(weight))
    values = found["by_value"]["item"]
    assert sum(value["samples"] for value in values) == found["samples"] and len(values) > 30


def targets_by_hand(data: Path, ranks: dict[tuple[int, int], int], k: int) -> dict[str, float]:
    """Means over users of recall@k and precision@k, from the rank of each (user, item)."""
    users: dict[int, list[int]] = {}
    for (user, _), rank in ranks.items():
        users.setdefault(user, []).append(rank)
    hits = {user: sum(rank < k for rank in of) for user, of in users.items()}
    recall = sum(hits[user] / len(of) for user, of in users.items()) / len(users)
    return {f"recall@{k}": recall, f"precision@{k}": sum(hits.values()) / k / len(users)}


def grouped_raw(data: Path, folder: Path) -> dict[str, Any]:
    """Rows of 25 users, each with several targets, and a file of the items that a user has seen."""
    raw = raw_config(data, "two_tower")
    for part in ("train", "eval"):
        table = pq.read_table(data / part)
        table = table.append_column("user", pa.array(np.arange(len(table)) % 25))
        (folder / part).mkdir()
        pq.write_table(table, folder / part / "rows.parquet", row_group_size=64)
        raw["data"][part] = str(folder / part)
    seen = [[user, (user * 7 + step) % ITEMS] for user in range(25) for step in range(user % 4)]
    users, items = zip(*seen, strict=True)
    pq.write_table(pa.table({"who": users, "item": items}), folder / "seen.parquet")
    raw["schema"]["group"] = {"column": "user"}
    raw["schema"]["sparse"].append({"name": "user", "mapping": {"kind": "identity"}})
    raw["tables"].append({"name": "user", "rows": 25, "dim": 16, "features": ["user"]})
    raw["model"]["loss"] = {"kind": "mixed", "negatives": 20, "sampler": "popularity", "power": 0.5, "counts": "data",
                            "hard_negatives": True}  # fmt: skip
    seen_file = {"path": str(folder / "seen.parquet"), "user": "user", "user_column": "who"}
    ranking = {"ks": [5, 20], "targets": "group", "seen": ["history"], "seen_file": seen_file, "coverage": 5}
    raw["trainer"] |= {"ranking": ranking, "epochs": 1, "num_workers": 0, "slices": ["user"],
                       "early_stopping": {"metric": "map@5", "patience": 3}}  # fmt: skip
    raw["storage"] |= {"path": str(folder), "keep_best": "precision@20"}
    return raw


def test_a_published_protocol_is_ranked_from_a_config(data: Path, tmp_path: Path) -> None:
    raw = grouped_raw(data, tmp_path)
    done = Trainer(parse_config(raw)).fit()
    found = done.eval
    assert found is not None
    by_row = {**raw["trainer"]["ranking"], "targets": "row"}
    rows = pq.read_table(tmp_path / "eval").to_pylist()
    positive = [row for row in rows if row["label"]]
    assert (found["groups"], found["samples"]) == (len({row["user"] for row in positive}), len(positive))
    seen = {(row["who"], row["item"]) for row in pq.read_table(tmp_path / "seen.parquet").to_pylist()}
    popular = Counter(row["item"] for row in pq.read_table(tmp_path / "train").to_pylist() if row["label"])
    ranks = {}
    for row in positive:
        left = {i for i in range(ITEMS) if i not in row["history"] and (row["user"], i) not in seen} - {row["item"]}
        rank = sum(popular[i] >= popular[row["item"]] for i in left)
        pair = row["user"], row["item"]
        ranks[pair] = min(rank, ranks.get(pair, ITEMS))
    for k in (5, 20):
        for name, value in targets_by_hand(data, ranks, k).items():
            assert found["popularity"][name] == pytest.approx(value), name
    assert 0.05 < found["coverage@5"] <= 1 and found["recall@20"] == found["recall@20/unseen"] > found["recall@5"]
    users = found["by_value"]["user"]
    assert sum(user["recall@5"] for user in users) / len(users) == pytest.approx(found["recall@5"])
    page = (done.folder / "report.html").read_text()
    assert "Recall@5" in page and "Normalized entropy" not in page and ">AUC<" not in page
    two = on_ranks(2, fit_on_rank, {**raw, "name": "two"}, timeout_s=350)
    assert two[0]["eval"] == two[1]["eval"]
    assert two[0]["eval"]["recall@20"] == pytest.approx(found["recall@20"], abs=0.02)
    raw["trainer"] |= {"ranking": by_row, "early_stopping": None}
    raw["storage"]["keep_best"], raw["name"] = "hr@5", "rows"
    assert parse_config(raw).trainer.ranking.names == [
        "mrr", "hr@5", "hr@20", "recall@5", "recall@20", "ndcg@5", "ndcg@20", "coverage@5"
    ]  # fmt: skip
    # A run that starts from the weights of another counts the items of its own rows.
    later = pq.read_table(tmp_path / "train").slice(0, 100)
    (tmp_path / "later").mkdir()
    pq.write_table(later, tmp_path / "later" / "rows.parquet")
    raw["data"]["train"], raw["init_from"], raw["name"] = str(tmp_path / "later"), str(done.folder), "later"
    model, _ = trained_batches(Trainer(parse_config(raw)).fit().folder)
    assert isinstance(model, Retriever) and float(model.loss.counted["frequency"].total) == 100


def test_metrics_to_watch_and_rankings_that_do_not_fit_are_refused(data: Path, tmp_path: Path) -> None:
    grouped = grouped_raw(data, tmp_path)
    ranker = {**RAW, "storage": {**RAW["storage"], "keep_best": "mrr"}}
    wrong = {"path": "seen.parquet", "user": "history"}
    for raw, text in [
        (ranker, r"storage.keep_best: got 'mrr'.*; evaluations of model dlrm have auc, gauc, ne"),
        ({**RAW, "trainer": {**RAW["trainer"], "ranking": {"ks": [5]}}}, "model dlrm scores rows and ranks no items"),
        (
            {**grouped, "storage": {**grouped["storage"], "keep_best": "hr@10"}},
            "model two_tower have mrr",
        ),
        ({**grouped, "schema": {**grouped["schema"], "group": None}}, r"ranking.targets: group needs schema.group"),
        (with_ranking(grouped, seen=["films"]), r"ranking.seen.0: no sparse feature is named 'films'"),
        (with_ranking(grouped, seen_file=wrong), r"no sparse feature of kind id is named 'history'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            parse_config(raw)
    raw = raw_config(data, "two_tower")
    check_metric("ndcg@10", parse_config(raw))
    with pytest.raises(TrainError, match="metric=auc: not computed"):
        check_metric("auc", parse_config(raw))


def with_ranking(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    trainer = raw["trainer"]
    return {**raw, "trainer": {**trainer, "ranking": {**trainer["ranking"], **changes}}}


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_what_a_model_of_histories_does_not_read_is_refused(name: str, data: Path, tmp_path: Path) -> None:
    raw = raw_config(data, name)
    raw["trainer"]["num_workers"] = 0
    raw["storage"]["path"] = str(tmp_path)
    item = {"name": "item", "mapping": {"kind": "identity"}}
    raw["schema"]["sparse"].append(item)
    apart = {"name": "item", "rows": ITEMS, "dim": 16, "features": ["item"]}
    shared = {**raw["tables"][0], "features": ["history", "item"]}
    side = " and the side features 'action'" if name == "hstu" else ""
    subject = f"model {name} reads only the history 'history'{side}; remove"
    for tables, text in [
        ([*raw["tables"], apart], f"tables.item: {subject} this table and its features: item"),
        ([shared, *raw["tables"][1:]], f"tables.history.features: {subject} item here and from schema.sparse"),
    ]:
        with pytest.raises(TrainError, match=text):
            Trainer(parse_config({**raw, "tables": tables})).fit()
    raw["schema"]["sparse"].remove(item)
    raw["schema"]["dense"] = [{"name": "label"}]
    with pytest.raises(TrainError, match=f"schema.dense: {subject} this section"):
        Trainer(parse_config(raw)).fit()


def test_a_run_with_the_loss_in_model_args_is_resumed(data: Path, tmp_path: Path) -> None:
    """Earlier configs had a retriever's loss there, and in `model.loss` the fields of all losses of rankers."""
    raw = raw_config(data, "sasrec")
    raw["trainer"] |= {"epochs": 1, "num_workers": 0, "early_stopping": None}
    raw["storage"]["path"] = str(tmp_path)
    first = Trainer(parse_config(raw)).fit()
    earlier = {**raw["model"], "args": {**raw["model"]["args"], "loss": raw["model"]["loss"]}}
    earlier["loss"] = {"kind": "bce", "label_smoothing": 0.0, "gamma": 2.0, "alpha": None}
    for file in (first.folder / "config.yaml", first.folder / "given.yaml"):
        written = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**written, "model": earlier}))
    assert evaluate_run(first.folder)["mrr"] == pytest.approx(first.eval["mrr"])  # type: ignore[index]
    raw["trainer"]["epochs"] = 2
    text = r"model.args.loss: this option moved: write model.loss: \{kind: sampled_softmax, negatives: 40\}"
    with pytest.raises(ConfigError, match=text):
        parse_config({**raw, "model": earlier})
    assert Trainer(parse_config(raw)).fit().steps == 2 * first.steps
    with pytest.raises(TrainError, match=r"model\.loss\.negatives: 40 → 41"):
        Trainer(parse_config({**raw, "model": {**raw["model"], "loss": {"negatives": 41}}})).fit()


def test_a_retrievers_batch_is_not_worked_through_in_parts(data: Path) -> None:
    raw = raw_config(data, "two_tower")
    raw["trainer"]["micro_batches"] = 2
    with pytest.raises(ConfigError, match="compares all rows"):
        parse_config(raw)


def test_beautys_files_are_leave_one_out_and_its_config_holds(tmp_path: Path) -> None:
    (tmp_path / "Beauty.txt").write_text("1 4 2 9\n2 5 6\n3 1 2 3 4 5\n")
    words = [sys.executable, ROOT / "data/beauty/prepare.py", tmp_path / "Beauty.txt", "--out", tmp_path / "parquet"]
    subprocess.run(words, check=True, capture_output=True, timeout=180)
    for part, want in [
        ("train", [[1, 2, 3], [4]]),
        ("validation", [[1, 2, 3, 4], [4, 2]]),
        ("test", [[1, 2, 3, 4, 5], [4, 2, 9]]),
    ]:
        found = pq.read_table(tmp_path / "parquet" / part).column("history").to_pylist()
        assert sorted(found) == want  # a user of two items has nothing to learn from
    config = load_config(ROOT / "data/beauty/train.yaml", [f"data.train={tmp_path}/parquet/train", "data.eval=null"])
    assert config.model.name == "sasrec"
