"""From item vectors to the best items: exact search, approximate indexes, the folder and its proof, files, commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from rayrec.inference import ExportError, ItemIndex, Search, TuningQueries, write_index
from rayrec.inference.topk import BLOCK_ITEMS, BLOCK_QUERIES, top_k
from rayrec.inference.tower import TOWER, Tower
from rayrec.metrics.ranking import Jagged
from tests.inference.runs import command, refused
from tests.inference.towers import tower_of

ITEMS, DIM = 3000, 8


def drawn(items: int = ITEMS, queries: int = 20, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(items, DIM, generator=generator), torch.randn(queries, DIM, generator=generator)


def corpus(items: int = ITEMS) -> pa.Table:
    return pa.table({"item": [f"i{row}" for row in range(items)], "shop": [row % 5 for row in range(items)]})


def plain(query: torch.Tensor, items: torch.Tensor, k: int, banned: set[int], allowed: Any) -> list[int]:
    scores = (items.double() @ query.double()).tolist()
    rows = [row for row in range(len(items)) if row not in banned and (allowed is None or bool(allowed[row]))]
    return sorted(rows, key=lambda row: -scores[row])[:k]


@pytest.mark.parametrize("items", [7, 500, 2 * BLOCK_ITEMS + 100])
@pytest.mark.parametrize("filtered", [False, True])
def test_exact_search_is_sorting(items: int, filtered: bool) -> None:
    """Blocks of items and queries, and a rest; of the queries, some are compared."""
    vectors, queries = drawn(items, BLOCK_QUERIES + 10)
    banned = [[(7 * query) % items, query % items] for query in range(len(queries))]
    excluded = Jagged(torch.tensor(banned).flatten(), torch.arange(0, 2 * len(queries) + 1, 2)) if filtered else None
    allowed = torch.arange(items) % 3 > 0 if filtered else None
    scores, rows = top_k(queries, vectors, 9, excluded, allowed)
    for query in (*range(5), *range(BLOCK_QUERIES - 2, BLOCK_QUERIES + 10)):
        want = plain(queries[query], vectors, 9, set(banned[query]) if filtered else set(), allowed)
        assert rows[query, : len(want)].tolist() == want
        assert (rows[query, len(want) :] == -1).all() and (scores[query, len(want) :] == -torch.inf).all()
        torch.testing.assert_close(scores[query, : len(want)], vectors[want] @ queries[query], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_approximate_index_is_tuned_to_the_recall_that_was_asked_for(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    vectors, queries = drawn(queries=100)
    reports = {}
    for recall in (0.5, 0.97):
        search = Search(kind=kind, recall=recall, k=10)
        reports[recall] = write_index(tmp_path / str(recall), vectors, corpus(), search=search, queries=queries)
        index = ItemIndex(tmp_path / str(recall))
        _, rows = index.search(queries, 10)
        _, exact = top_k(queries, vectors, 10)
        hits = sum(len(set(a) & set(b)) for a, b in zip(rows.tolist(), exact.tolist(), strict=True)) / exact.numel()
        assert reports[recall].recall == pytest.approx(hits, abs=1e-4) and hits >= recall
        banned = index.ids_of(rows[:, :4])
        _, others = index.search(queries, 10, banned)
        assert not any(set(a) & set(b) for a, b in zip(banned, index.ids_of(others), strict=True))
        _, shop = index.search(queries, 10, where={"shop": [2]})
        assert shop.shape == (100, 10) and (shop % 5 == 2).all()
    assert (reports[0.5].effort or 0) <= (reports[0.97].effort or 0)
    assert reports[0.97].tuned_on == "given queries"


def recall(found: torch.Tensor, exact: torch.Tensor) -> float:
    hits = sum(len(set(a) & set(b) - {-1}) for a, b in zip(found.tolist(), exact.tolist(), strict=True))
    return hits / int((exact >= 0).sum())


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_recall_holds_for_every_k_and_without_what_was_seen(kind: str, tmp_path: Path) -> None:
    """Seen items are the best ones of each query; every third query has none."""
    pytest.importorskip("faiss")
    vectors, queries = drawn(queries=90)
    _, best = top_k(queries, vectors, 200)
    counts = torch.tensor([200 if query % 3 else 0 for query in range(90)])
    seen = Jagged(
        torch.cat([rows[:count] for rows, count in zip(best, counts, strict=True)]), F.pad(counts.cumsum(0), (1, 0))
    )
    ids = [[f"i{row}" for row in rows[:count]] for rows, count in zip(best.tolist(), counts, strict=True)]
    tuning = TuningQueries(queries, seen, "users")
    report = write_index(tmp_path / "index", vectors, corpus(), search=Search(kind=kind, recall=0.95), queries=tuning)
    assert report.tuned_on == "users" and [k for k, _, _ in report.tuned] == [100, 1000]
    assert report.recall == report.tuned[0][2] and all(measured >= 0.95 for _, _, measured in report.tuned)
    index = ItemIndex(tmp_path / "index")
    for k in (10, 100, 300, 1000):
        scores, found = index.search(queries, k, ids)
        exact_scores, exact = top_k(queries, vectors, k, seen)
        assert recall(found, exact) >= 0.94, k
        assert not any(set(rows) & set(row_ids) for rows, row_ids in zip(index.ids_of(found), ids, strict=True))
        assert (scores.diff(dim=1) <= 0).all() and (scores <= exact_scores + 1e-4).all()
        assert recall(index.search(queries, k)[1], top_k(queries, vectors, k)[1]) >= 0.94, k


def test_appending_keeps_the_recall_that_was_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    vectors, queries = drawn(queries=100)
    search = Search(kind="ivf", recall=0.9, k=10, max_k=10)
    first = write_index(
        tmp_path / "0", vectors, corpus(), search=search, queries=TuningQueries(queries, source="users")
    )
    assert first.recall is not None and first.recall > 0.9  # what an extension must not ask for
    for day in range(1, 5):
        more = pa.table({"item": [f"{day}-{row}" for row in range(20)], "shop": [0] * 20})
        report = ItemIndex(tmp_path / str(day - 1)).extended(tmp_path / str(day), drawn(20, seed=day)[0], more)
        assert (report.target_recall, report.tuned_on, report.k) == (0.9, "users", 10)
    assert report.effort == first.effort and (report.recall or 0) >= 0.9


def tower(seed: int = 0) -> Tower:
    torch.manual_seed(seed)
    made = tower_of("sasrec", {"max_length": 6, "normalize": True, "loss": {"kind": "softmax"}}, 50, DIM)
    return made


@pytest.mark.parametrize("rule", ["identity", "vocabulary"])
def test_a_history_asks_as_its_row_does_whatever_the_index_holds(rule: str, tmp_path: Path) -> None:
    """The index has ten items of fifty, the model all but those from 50 on."""
    ids = [str(row) for row in range(50)] if rule == "vocabulary" else list(range(50))
    mapping: dict[str, Any] = {"kind": rule}
    if rule == "vocabulary":
        pq.write_table(pa.table({"id": ids}), tmp_path / "ids.parquet")
        mapping |= {"path": str(tmp_path / "ids.parquet"), "oov_rows": 2}
    raw = {
        "schema": {"sparse": [{"name": "history", "kind": "id_list", "mapping": mapping}]},
        "tables": [{"rows": 52, "features": ["history"]}],
    }
    made = tower_of("sasrec", {"max_length": 6}, 52, DIM, raw)
    write_index(tmp_path / "index", made.vectors(torch.arange(10)), pa.table({"item": ids[:10]}), tower=made)
    index, one = ItemIndex(tmp_path / "index"), type(ids[0])
    histories = [[one(id) for id in history] for history in ([3, 40, 7], [45], [5, 60])]
    assert index.known(histories) == [3, 1, 1]
    known = [*histories[:2], [one(5)]] if rule == "identity" else histories  # a vocabulary has rows for others
    assert torch.equal(index.queries(histories), index.queries_of({"history": known}))
    assert index.queries([[one(60)]]).any() == (rule == "vocabulary") and index.known([[one(60)], []]) == [0, 0]


@pytest.mark.parametrize("family", ["sasrec", "hstu"])
def test_an_index_answers_as_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    made = tower_of(family, {"max_length": 6}, 50, DIM)
    write_index(tmp_path / "index", made.vectors(torch.arange(50)), corpus(50), tower=made)
    index = ItemIndex(tmp_path / "index")
    histories = [["i3", "i7"], [], ["i1", "unknown", "i2"], [f"i{row}" for row in range(20)]]
    found = index.queries(histories)
    assert torch.equal(found, made.queries([[3, 7], [], [1, 2], list(range(20))]))
    scores, rows = index.search(found, 5, histories)
    assert not set(rows[0].tolist()) & {3, 7}
    torch.testing.assert_close(scores[0], made.vectors(torch.arange(50))[rows[0]] @ found[0])


def test_a_tower_that_computes_something_else_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = tower()
    write_index(tmp_path / "index", made.vectors(torch.arange(50)), corpus(50), tower=made)
    saved = torch.load(tmp_path / "index" / TOWER, weights_only=True)
    saved["queries"] += 1e-4  # another processor
    torch.save(saved, tmp_path / TOWER)
    Tower.read(tmp_path)
    assert "queries differ by 0.0001 from those when it was written, as on another processor" in caplog.text
    saved["queries"] += 0.0099
    torch.save(saved, tmp_path / TOWER)
    with pytest.raises(ExportError, match=r"queries differ by 0\.01 from those"):
        Tower.read(tmp_path)
    (tmp_path / TOWER).write_bytes(b"no weights")
    with pytest.raises(ExportError, match="cannot be read"):
        Tower.read(tmp_path)


def test_wrong_or_damaged_indexes_are_named(tmp_path: Path) -> None:
    vectors, queries = drawn(50)
    with pytest.raises(ExportError, match="an id is missing or comes twice"):
        write_index(tmp_path / "a", vectors, pa.table({"item": [1] * 50}))
    with pytest.raises(ExportError, match=r"vectors have shape \[50, 8\], but there are 49 items"):
        write_index(tmp_path / "a", vectors, corpus(49))
    with pytest.raises(ExportError, match="item 'i7': its vector is not finite"):
        write_index(tmp_path / "a", vectors.index_fill(0, torch.tensor([7]), torch.nan), corpus(50))
    with pytest.raises(ExportError, match="is not a complete index"):
        ItemIndex(tmp_path)
    durations = pa.array([(1, 2, 3)] * 50, pa.month_day_nano_interval())  # Parquet has no such type
    with pytest.raises(pa.ArrowNotImplementedError):
        write_index(tmp_path / "a", vectors, corpus(50).append_column("every", durations))
    assert not any(tmp_path.iterdir())
    write_index(tmp_path / "a", vectors, corpus(50))
    with pytest.raises(ExportError, match="already exists"):
        write_index(tmp_path / "a", vectors, corpus(50))
    index = ItemIndex(tmp_path / "a")
    with pytest.raises(ValueError, match="has no query tower"):
        index.queries([["i1"]])
    with pytest.raises(ValueError, match="unknown attribute 'colour'"):
        index.search(queries, 3, where={"colour": [1]})
    with pytest.raises(ValueError, match="the index needs"):
        index.search(queries[:, :3], 3)
    with (tmp_path / "a" / "vectors.bin").open("r+b") as file:
        file.write(b"xxxx")
    with pytest.raises(ExportError, match=r"vectors\.bin is damaged"):
        ItemIndex(tmp_path / "a")
    with pytest.raises(ValueError, match="search 'flat'"):
        Search(kind="flat")


def test_the_commands_index_vectors_and_retrieve_for_files(tmp_path: Path) -> None:
    vectors, queries = drawn(60, 10)
    pq.write_table(corpus(60).append_column("vector", pa.array(vectors.tolist())), tmp_path / "items.parquet")
    said = command("index", tmp_path / "items.parquet", tmp_path / "index")
    assert "60 items of 8 numbers, exact search" in said
    (tmp_path / "asked").mkdir()
    asked = pa.table({"user": range(10), "vector": queries.tolist(), "not": [[f"i{row}"] for row in range(10)]})
    for part in range(2):
        pq.write_table(asked.slice(5 * part, 5), tmp_path / "asked" / f"{part}.parquet")
    words = ["retrieve", tmp_path / "index", tmp_path / "asked", tmp_path / "out", "--k", 4, "--vector", "vector"]
    words += ["--exclude", "not"]
    assert "10 rows in 2 files" in command(*words)
    (tmp_path / "out" / "1.parquet").unlink()  # as if interrupted
    assert "5 rows in 1 files" in command(*words)
    assert "0 rows in 0 files" in command(*words)
    found = pq.read_table(tmp_path / "out").sort_by("user").to_pylist()
    for row in found:
        want = plain(queries[row["user"]], vectors, 4, {row["user"]}, None)
        assert row["items"] == [f"i{one}" for one in want]
        assert row["scores"] == pytest.approx((vectors[want] @ queries[row["user"]]).tolist(), rel=1e-5)
    asked_again = ["retrieve", tmp_path / "index", tmp_path / "asked", tmp_path / "more"]
    assert "no column 'history'" in refused(*asked_again, "--history", "history")
    for folder in "ab":
        (tmp_path / "two" / folder).mkdir(parents=True)
        pq.write_table(asked, tmp_path / "two" / folder / "0.parquet")
    two = refused("retrieve", tmp_path / "index", tmp_path / "two", tmp_path / "none", "--vector", "vector")
    assert "have the same name" in two
    assert "has no query tower: send vectors" in refused(*asked_again)
    assert "not both" in refused(*asked_again, "--vector", "a", "--history", "b")


def test_results_of_something_else_are_not_kept(tmp_path: Path) -> None:
    vectors, queries = drawn(60, 3)
    for name, scale in (("a", 1), ("b", -1)):
        write_index(tmp_path / name, scale * vectors, corpus(60))
    asked = tmp_path / "asked.parquet"
    pq.write_table(pa.table({"vector": queries.tolist()}), asked)
    words = [asked, tmp_path / "out", "--vector", "vector", "--k"]
    command("retrieve", tmp_path / "a", *words, 3)
    assert "of index 20" in refused("retrieve", tmp_path / "b", *words, 3)
    assert "of options" in refused("retrieve", tmp_path / "a", *words, 4)
    pq.write_table(pa.table({"vector": (2 * queries).tolist()}), asked)
    assert "of data" in refused("retrieve", tmp_path / "a", *words, 3)
    result = tmp_path / "out" / "asked.parquet"
    table = pq.read_table(result)
    pq.write_table(table.replace_schema_metadata(), result)  # as earlier releases wrote it
    assert "of an unknown index: give another folder" in refused("retrieve", tmp_path / "a", *words, 3)
    words[1] = tmp_path / "again"
    assert "has a column 'items', which the results have" in refused("retrieve", tmp_path / "a", result, *words[1:], 3)


def test_retrieval_by_history_leaves_out_what_was_seen(tmp_path: Path) -> None:
    made = tower()
    write_index(tmp_path / "index", made.vectors(torch.arange(50)), corpus(50), tower=made)
    pq.write_table(pa.table({"history": [["i1", "i2"], [], None]}), tmp_path / "asked.parquet")
    words = ["retrieve", tmp_path / "index", tmp_path / "asked.parquet"]
    said = command(*words, tmp_path / "out", "--history", "history", "--k", 50)
    assert "2 rows without items: the model knows nothing of their history" in said
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert [len(row["items"]) for row in found] == [48, 0, 0] and not {"i1", "i2"} & set(found[0]["items"])
    command(*words, tmp_path / "seen", "--history", "history", "--k", 50, "--keep-seen")
    assert {"i1", "i2"} <= set(pq.read_table(tmp_path / "seen").to_pylist()[0]["items"])
    assert json.loads((tmp_path / "index" / "index.json").read_text())["search"] == "exact"
