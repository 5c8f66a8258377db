"""Retrievers from Parquet to a service: a run is trained, evaluated, indexed, and answers files and requests alike."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.inference import ExportError, ExportOptions, ItemIndex, Search, TuningQueries
from rayrec.models import RETRIEVERS, Retriever
from rayrec.models.next_item import NextItem
from rayrec.serve import App, RequestError, Retrieval, Service
from rayrec.train import ConfigError, Trainer, TrainError, evaluate_run, export_run, index_run, parse_config
from tests.inference.runs import command, trained_batches
from tests.serve.server import Server
from tests.serve.test_retrieval import values
from tests.train.test_retrieval_run import ITEMS, raw_config, write


@pytest.fixture(scope="module", params=list(RETRIEVERS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    write(root / "train", 600, 0)
    write(root / "eval", 61, 1)
    pq.write_table(
        pa.table({"sku": range(ITEMS - 1, -1, -1), "shop": [n % 3 for n in range(ITEMS)]}), root / "c.parquet"
    )
    raw = raw_config(root, request.param)
    raw["trainer"]["epochs"] = 4
    if "history" in raw["model"]["args"]:
        raw["model"]["args"]["blocks"] = 1  # a compiler takes as long for each
    return Path(Trainer(parse_config(raw)).fit().folder)


@pytest.fixture(scope="module")
def indexed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the items in a file, for tests that only read it, or take its query tower."""
    folder = tmp_path_factory.mktemp("indexed") / "index"
    said = command("index", trained, folder, "--items", trained.parents[1] / "c.parquet", "--id", "sku")
    assert "100.0% of the 10 best items are the same" in said
    return folder


def queries_as_trained(trained: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the trainer's own model: queries of the evaluation rows, in the files' order, and vectors of all items."""
    model, batches = trained_batches(trained)
    assert isinstance(model, Retriever)
    with torch.no_grad():
        return torch.cat([model.query(batch) for batch in batches]), model.items(torch.arange(ITEMS))


def test_trained_evaluated_indexed_retrieved_and_served(
    trained: Path, indexed: Path, service: Service, tmp_path: Path
) -> None:
    assert evaluate_run(trained)["recall@10"] > 0.4  # chance finds a sixth
    queries, vectors = queries_as_trained(trained)
    root, index = trained.parents[1], ItemIndex(indexed)
    torch.testing.assert_close(index.vectors, vectors.flip(0), rtol=0, atol=1e-6)
    command("retrieve", index.folder, root / "eval", tmp_path / "out", "--k", 5, "--keep-seen", "--vectors")
    found = pq.read_table(tmp_path / "out")
    torch.testing.assert_close(torch.tensor(found["vector"].to_pylist()), queries, rtol=0, atol=1e-6)
    want = (queries @ vectors.T).topk(5)
    asks = queries.any(1)  # the query of an empty history is zero, and finds nothing
    assert [bool(ids) for ids in found["items"].to_pylist()] == asks.tolist() and asks.any()
    scores = torch.tensor([scores for scores in found["scores"].to_pylist() if scores])
    torch.testing.assert_close(scores, want.values[asks], rtol=1e-5, atol=1e-6)
    rows = pq.read_table(root / "eval").drop_columns(["item", "label"]).to_pylist()
    server = Server(App(service, retrieval=Retrieval(index.folder)))
    try:
        asked = {"queries": [{"row": row} for row in rows], "k": 5, "keep_seen": True}
        status, answer = server.ask("POST", "/retrieve", asked)
        assert status == 200, answer
        assert [one["ids"] for one in answer["results"]] == found["items"].to_pylist()
        assert "vector" not in answer["results"][0]
        _, answer = server.ask("POST", "/retrieve", {**asked, "vectors": True})
        served = torch.tensor([one["vector"] for one in answer["results"]])
        torch.testing.assert_close(served, queries, rtol=0, atol=1e-6)
        asked |= {"keep_seen": False, "filter": {"shop": [1]}}
        _, answer = server.ask("POST", "/retrieve", asked)
        seen = [row["history"] if index.seen_column else [] for row in rows]
        for history, one in zip(seen, answer["results"], strict=True):
            assert len(one["ids"]) == (5 if history or not index.seen_column else 0) and not set(one["ids"]) & set(
                history
            )
            assert all((ITEMS - 1 - sku) % 3 == 1 for sku in one["ids"])
        for wrong, text in [({"row": {}}, "missing"), ({"row": {**rows[0], "history": [ITEMS]}}, "query 0")]:
            status, answer = server.ask("POST", "/retrieve", {"queries": [wrong]})
            assert status == 422 and text in str(answer), answer
    finally:
        server.close()


# What is the same for each retriever is shown with the one that takes the least time.
one_retriever = pytest.mark.parametrize("trained", ["two_tower"], indirect=True)


@one_retriever
def test_a_checkpoint_is_indexed_as_its_run_and_options_of_the_other_form_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = max((trained / "checkpoints").glob("step_*"))
    command("index", checkpoint, tmp_path / "index", "--items", trained.parents[1] / "c.parquet", "--id", "sku")
    index = ItemIndex(tmp_path / "index")
    pq.write_table(pa.table({"item": [1], "vector": index.vectors[:1].tolist()}), tmp_path / "one.parquet")
    one, out = str(tmp_path / "one.parquet"), str(tmp_path / "out")
    for source, option, value, why in [
        (one, "--tower", str(index.folder), "holds item vectors, not a run: remove --tower"),
        (str(trained), "--queries", one, "is a run: remove --queries"),
        (str(checkpoint), "--extend", str(index.folder), "is a run: remove --extend"),
        (one, "--items", one, "holds item vectors, not a run: remove --items"),
        (one, "--tables", "int8", "holds item vectors, not a run: remove --tables"),
    ]:
        assert run(["index", source, out, option, value]) == 1
        assert why in capsys.readouterr().err and not Path(out).exists()
    assert run(["index", one, out, "--extend", str(index.folder), "--search", "hnsw"]) == 1
    assert f"the index has the search of {index.folder}: remove --search" in capsys.readouterr().err


NARROW: list[dict[str, Any]] = [{"tables": "fp16", "dense": "bf16"}, {"tables": "int8"}, {"tables": "int4"}]


def test_narrow_numbers_ask_nearly_the_same(trained: Path, tmp_path: Path) -> None:
    """An export of the query tower, whose index is made later. Tables are stored alike for each retriever."""
    queries, vectors = queries_as_trained(trained)
    best = [set(one.tolist()) for one in (queries @ vectors.T).topk(10).indices]
    rows = pq.read_table(trained.parents[1] / "eval").drop_columns(["item", "label"])
    read = ["history", "action"] if trained.name == "hstu" else ["history"]
    for number, options in enumerate(NARROW if trained.name == "two_tower" else NARROW[:1]):
        tower, index = tmp_path / f"tower{number}", tmp_path / f"index{number}"
        exported = export_run(trained, tower, ExportOptions(**options, force=True))
        parity = exported.parity
        assert 0 < parity.logit_max < 1 and parity.overlap is not None
        assert [place.table for place in exported.index.places] == read, "the query reads no other table"
        indexed = index_run(trained, index, tower=tower)
        assert indexed.parity is None and indexed.index.places == exported.index.places
        found = ItemIndex(index).queries_of(rows)
        assert float((found - queries).abs().max()) == pytest.approx(parity.logit_max, abs=1e-6)
        again = [set(one.tolist()) for one in (found @ vectors.T).topk(10).indices]
        shares = torch.tensor([len(a & b) / 10 for a, b in zip(best, again, strict=True)])[queries.any(1)]
        assert parity.overlap == pytest.approx(float(shares.mean()), abs=1e-4) and parity.overlap > 0.7


@pytest.mark.parametrize(
    "trained",
    # To compile an encoder takes long; `inference/test_cpp.py` has SASRec's.
    ["two_tower", pytest.param("hstu", marks=pytest.mark.long)],
    indirect=True,
)
def test_a_query_tower_runs_compiled_and_for_any_number_of_rows(trained: Path, tmp_path: Path) -> None:
    index_run(trained, tmp_path / "index", options=ExportOptions(target="aoti"))
    compiled = ItemIndex(tmp_path / "index")
    assert compiled.model is not None and compiled.model.target == "aoti"
    rows = pq.read_table(trained.parents[1] / "eval").drop_columns(["item", "label"])
    queries, _ = queries_as_trained(trained)
    for count in (len(rows), 1, 0):
        found = compiled.queries_of(rows.slice(0, count))
        torch.testing.assert_close(found, queries[:count], rtol=0, atol=1e-5)


@one_retriever
def test_a_tower_of_another_checkpoint_is_refused(trained: Path, indexed: Path, tmp_path: Path) -> None:
    shutil.copytree(indexed, tmp_path / "tower")
    path = tmp_path / "tower" / "export.json"
    path.write_text(path.read_text().replace("step_", "other_"))
    with pytest.raises(TrainError, match=r"is an export of .*other_.*its queries would not fit the items"):
        index_run(trained, tmp_path / "index", tower=tmp_path / "tower")
    with pytest.raises(ExportError, match=r"--tables AUTO: .* a retriever has none"):
        export_run(trained, tmp_path / "auto", ExportOptions(tables="AUTO"))


def test_a_request_may_say_its_time(trained: Path, indexed: Path) -> None:
    """A model with times asks for the item at that time, as training does for each position."""
    retrieval = Retrieval(indexed)
    start = 1_700_000_000
    row = {"history": [3, 10], "action": [0, 1], "at": [start, start + 60]}
    asked = [{"row": row, "time": time} for time in (start + 60, start + 86_460, "2023-11-15T22:14:20", None)]
    body = json.dumps({"queries": asked, "vectors": True}).encode()
    if trained.name != "hstu":
        with pytest.raises(RequestError, match="the model reads no times: leave out `time`"):
            retrieval.answer(body)
        return
    now, later, text, default = (torch.tensor(one["vector"]) for one in json.loads(retrieval.answer(body))["results"])
    torch.testing.assert_close(now, default, rtol=0, atol=0)
    torch.testing.assert_close(later, text, rtol=0, atol=0)
    assert not torch.allclose(now, later)
    model, _ = trained_batches(trained)
    longer = {"history": [[3, 10, 17]], "action": [[0, 1, 2]], "at": [[start, start + 60, start + 86_460]]}
    mapping = retrieval.index.mapping
    assert isinstance(model, NextItem) and mapping is not None
    with torch.no_grad():  # training's query for the third item
        pairs = model.pairs(mapping.to_batch(longer), torch.tensor([0]))
    torch.testing.assert_close(later, pairs.query[1], rtol=0, atol=1e-5)


@one_retriever
def test_the_next_command_of_a_retrievers_run_is_index(trained: Path, tmp_path: Path) -> None:
    raw = yaml.safe_load((trained / "config.yaml").read_text())
    raw["trainer"]["epochs"], raw["storage"]["path"] = 1, str(tmp_path / "runs")
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(raw))
    for words in (["train", tmp_path / "train.yaml"], ["evaluate", trained]):
        told = command(*words)
        assert "next: rayrec index " in told and "rayrec export" not in told


def test_items_that_the_model_does_not_know_are_left_out_and_counted(
    trained: Path, indexed: Path, tmp_path: Path
) -> None:
    skus = [3, ITEMS + 1, 5, ITEMS, 4]
    pq.write_table(pa.table({"shop": range(5), "sku": skus}), tmp_path / "items.parquet")
    words = ["index", trained, tmp_path / "index", "--items", tmp_path / "items.parquet", "--id", "sku"]
    assert "left out: 2 items that the model does not know" in command(*words, "--tower", indexed)
    index = ItemIndex(tmp_path / "index")
    assert index.items.to_pydict() == {"sku": [3, 5, 4], "shop": [0, 2, 4]} and index.report.left_out == 2
    torch.testing.assert_close(index.vectors, queries_as_trained(trained)[1][[3, 5, 4]], rtol=0, atol=1e-6)
    pq.write_table(pa.table({"sku": [ITEMS]}), tmp_path / "none.parquet")
    with pytest.raises(TrainError, match="the model knows no item of column 'sku'"):
        index_run(trained, tmp_path / "none", str(tmp_path / "none.parquet"), "sku")


def test_an_approximate_index_is_tuned_with_what_users_ask(trained: Path, indexed: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    search = Search(kind="ivf", recall=0.9, k=5)
    report = index_run(trained, tmp_path / "index", search=search, tower=indexed).index.search
    assert report is not None
    tuning = TuningQueries.read(tmp_path / "index" / "tuning.pt")
    queries, _ = queries_as_trained(trained)
    asked = queries[queries.any(1)]
    assert len(tuning.vectors) == len(asked)
    # Each set has the other's queries; the graph rounds in another order.
    distances = torch.cdist(tuning.vectors, asked, compute_mode="donot_use_mm_for_euclid_dist")
    assert (distances.min(0).values < 1e-4).all() and (distances.min(1).values < 1e-4).all()
    sequences = trained.name != "two_tower"
    assert (tuning.seen is not None) == sequences
    assert report.tuned_on == f"evaluation rows{' without the items that they have seen' if sequences else ''}"


@one_retriever
def test_items_are_appended_without_training(trained: Path, indexed: Path, tmp_path: Path) -> None:
    old = ItemIndex(indexed)
    vectors = torch.eye(old.report.dim)[:2] * 100
    more = pa.table({"sku": [1000, 1001], "shop": [1, 2], "vector": vectors.tolist()})
    pq.write_table(more, tmp_path / "more.parquet")
    words = ["index", tmp_path / "more.parquet", tmp_path / "longer", "--id", "sku", "--extend", indexed]
    assert f"{ITEMS + 2} items" in command(*words)
    new = ItemIndex(tmp_path / "longer")
    rows = pq.read_table(trained.parents[1] / "eval").drop_columns(["item", "label"])
    assert torch.equal(old.queries_of(rows), new.queries_of(rows))
    assert old.version != new.version
    _, found = new.search(vectors[:1], 1)
    assert new.ids_of(found) == [[1000]]
    with pytest.raises(ExportError, match="comes twice"):
        new.extended(tmp_path / "twice", vectors, more.select(["sku", "shop"]))


KINDS, KNOWN, NEW = 8, 32, 8


def catalog(numbers: range, key: str) -> pa.Table:
    """Items with a category, which users have a taste for, and a price."""
    rows = {
        key: [f"film-{n}" for n in numbers],
        "category": [n % KINDS for n in numbers],
        "cost": [n / 9 for n in numbers],
    }
    return pa.table(rows | {"shop": [n % 3 for n in numbers]})


def config_with_features(root: Path, name: str = "two_tower") -> dict[str, Any]:
    """A retriever with features of the items, in `items/`; the vocabulary lacks the new ones."""
    raw = raw_config(root, name)
    raw["data"]["entities"] = {"movie": {"path": str(root / "items"), "key": "id", "valid_from": "since", "at": "time"}}
    vocabulary = {"kind": "vocabulary", "path": str(root / "vocabulary.parquet")}
    raw["schema"] = {
        "label": {"column": "label"},
        "dense": [{"name": "cost", "from": "movie.cost", "by": "film"}, {"name": "age"}],
        "sparse": [
            {"name": "taste"},
            {"name": "film", "mapping": vocabulary},
            {"name": "category", "from": "movie.category", "by": "film"},
        ],
    }
    rows = {"taste": KINDS, "film": KNOWN + 1, "category": KINDS}
    args: dict[str, Any] = {"item": "film", "towers": [16]}
    if name != "two_tower":  # rows have lists of films, and no feature of a film
        raw["schema"]["dense"].pop()
        raw["schema"]["sparse"].pop(0)
        raw["schema"]["sparse"][0] |= {"kind": "id_list", "column": "films"}
        del rows["taste"]
        args = {"history": "film", "max_length": 6, "blocks": 1, "dropout": 0.0, "normalize": True}
    raw["tables"] = [{"name": name, "rows": count, "dim": 8, "features": [name]} for name, count in rows.items()]
    raw["model"] = {"name": name, "args": args | {"item_features": ["category", "cost"]}}
    raw["model"]["loss"] = {"kind": "mixed", "negatives": 16}
    raw["trainer"]["epochs"] = 6 if name == "two_tower" else 12
    return raw


def versions(numbers: range) -> pa.Table:
    """The catalog as a table of entities, which had other prices before."""
    newest = catalog(numbers, "id").append_column("since", pa.array([500] * len(numbers)))
    older = newest.to_pydict() | {"cost": [9.0] * len(numbers), "since": [0] * len(numbers)}
    return pa.concat_tables([newest, pa.table(older)])


@pytest.fixture(scope="module", params=list(RETRIEVERS))
def with_features(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("with_features")
    (root / "items").mkdir()
    pq.write_table(versions(range(KNOWN)), root / "items" / "0.parquet")
    pq.write_table(pa.table({"id": [f"film-{n}" for n in range(KNOWN)]}), root / "vocabulary.parquet")
    for part, rows, seed in (("train", 600, 0), ("eval", 64, 1)):
        random = np.random.default_rng(seed)
        taste = random.integers(0, KINDS, rows)
        films = taste + KINDS * random.integers(0, KNOWN // KINDS, rows)
        alike = taste[:, None] + KINDS * random.integers(0, KNOWN // KINDS, (rows, 4))
        histories = [[f"film-{n}" for n in one] for one in alike]
        columns = {
            "taste": taste,
            "film": [f"film-{n}" for n in films],
            "films": histories,
            "age": random.random(rows),
            "time": [900] * rows,
            "label": [1] * rows,
        }
        (root / part).mkdir()
        pq.write_table(pa.table(columns), root / part / "0.parquet", row_group_size=64)
    return Path(Trainer(parse_config(config_with_features(root, request.param))).fit().folder)


def test_an_item_that_training_never_saw_is_found_by_its_features(with_features: Path, tmp_path: Path) -> None:
    root = with_features.parents[1]
    items = pa.concat_tables(
        [catalog(range(KNOWN + NEW), "sku"), pa.table({"sku": ["film-x"]})], promote_options="default"
    )
    pq.write_table(catalog(range(KNOWN + NEW), "sku"), tmp_path / "items.parquet")
    said = command("index", with_features, tmp_path / "index", "--items", tmp_path / "items.parquet", "--id", "sku")
    assert "100.0% of the 10 best items are the same" in said and "left out" not in said
    asked: list[dict[str, Any]] = [{"row": {"taste": taste, "age": 0.5}} for taste in range(KINDS)]
    if with_features.name != "two_tower":
        asked = [{"history": [f"film-{taste + KINDS * n}" for n in range(3)]} for taste in range(KINDS)]
    body = {"queries": asked, "k": KNOWN // KINDS + (1 if with_features.name == "two_tower" else 4)}
    results = json.loads(Retrieval(tmp_path / "index").answer(json.dumps(body).encode()))["results"]
    for taste, result in enumerate(results):
        assert f"film-{KNOWN + taste}" in result["ids"], results

    # The features may also come from the run's table, to which they were added; of other items, nothing is known.
    pq.write_table(versions(range(KNOWN, KNOWN + NEW)), root / "items" / "new.parquet")
    try:
        pq.write_table(items.select(["sku", "shop"]), tmp_path / "ids.parquet")
        again = index_run(
            with_features, tmp_path / "again", str(tmp_path / "ids.parquet"), "sku", tower=tmp_path / "index"
        )
    finally:
        (root / "items" / "new.parquet").unlink()
    assert again.index.search is not None and again.index.search.left_out == 1
    torch.testing.assert_close(ItemIndex(tmp_path / "again").vectors, ItemIndex(tmp_path / "index").vectors)
    with pytest.raises(TrainError, match="has the features category, cost"):
        pq.write_table(pa.table({"sku": ["film-x"]}), tmp_path / "x.parquet")
        index_run(with_features, tmp_path / "x", str(tmp_path / "x.parquet"), "sku", tower=tmp_path / "index")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"item_features": ["categry"]}, "no feature is named 'categry'.*did you mean 'category'"),
        ({"item_features": ["age"]}, "'age' reads the column 'age' of the rows.*`from: TABLE.COLUMN` and `by: film`"),
        ({"item_features": ["category"], "mapping": {"kind": "dynamic"}}, "item 'film' has dynamic ids"),
        ({"item_features": ["again"]}, "'again' reads the item 'film' itself.*remove it"),
        (
            {"name": "sasrec", "item_features": ["category"], "side": ["category"]},
            "'category' is a list of the rows, in `side`.*of another name.*`by: films`",
        ),
        ({"name": "hstu", "item_features": ["categry"]}, "no feature is named 'categry'.*did you mean 'category'"),
    ],
)
def test_features_that_an_item_has_only_in_rows_are_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    raw = config_with_features(tmp_path, changes.get("name", "two_tower"))
    raw["model"]["args"] |= {name: changes[name] for name in ("item_features", "side") if name in changes}
    film = next(feature for feature in raw["schema"]["sparse"] if feature["name"] == "film")
    film["mapping"] = changes.get("mapping", {"kind": "identity"})
    if "again" in changes["item_features"]:
        raw["schema"]["sparse"].append({"name": "again", "column": "film", "mapping": {"kind": "hash"}})
        raw["tables"].append({"name": "again", "rows": 9, "dim": 8, "features": ["again"]})
    with pytest.raises(ConfigError, match=f"model.args.item_features: {problem}"):
        parse_config(raw)


def test_a_query_does_not_read_the_item(tmp_path: Path) -> None:
    raw = config_with_features(tmp_path)
    raw["model"]["args"]["item_features"] = ["cost"]
    raw["schema"]["sparse"][1]["mapping"] = {"kind": "identity"}
    with pytest.raises(TrainError, match="feature 'category' reads the item's column 'film', which the query"):
        Trainer(parse_config(raw)).fit()


@pytest.fixture(scope="module")
def answering(indexed: Path) -> Retrieval:
    return Retrieval(indexed)


@settings(max_examples=50)
@given(
    changed=st.dictionaries(
        st.integers(0, 9), values | st.integers(-(2**70), 2**70) | st.lists(st.integers(), max_size=3)
    )
)
def test_whatever_row_is_sent_is_answered_or_refused(
    answering: Retrieval, trained: Path, changed: dict[int, Any]
) -> None:
    row = pq.read_table(trained.parents[1] / "eval").drop_columns(["item", "label"]).slice(0, 1).to_pylist()[0]
    names = list(row)
    row |= {names[place % len(names)] if place < 8 else "other": value for place, value in changed.items()}
    try:
        answer = json.loads(answering.answer(json.dumps({"queries": [{"row": row}], "k": 3}).encode()))
    except RequestError as error:
        assert 400 <= error.status < 500 and error.text
    else:
        (one,) = answer["results"]
        assert len(one["ids"]) == len(one["scores"]) <= 3 and all(map(math.isfinite, one["scores"]))
