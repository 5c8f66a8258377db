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

from rayrec.inference import (
    ExportError,
    ItemIndex,
    Model,
    RetrieveOptions,
    Scorer,
    Search,
    TuningQueries,
    write_index,
)
from rayrec.inference.retrieve import retrieve
from rayrec.inference.topk import BLOCK_ITEMS, BLOCK_QUERIES, top_k
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
    for recall_wanted in (0.5, 0.97):
        search = Search(kind=kind, recall=recall_wanted, k=10)
        write_index(tmp_path / str(recall_wanted), vectors, corpus(), search=search, queries=queries)
        index = ItemIndex(tmp_path / str(recall_wanted))
        reports[recall_wanted] = index.report
        _, rows = index.search(queries, 10)
        _, exact = top_k(queries, vectors, 10)
        hits = sum(len(set(a) & set(b)) for a, b in zip(rows.tolist(), exact.tolist(), strict=True)) / exact.numel()
        assert reports[recall_wanted].recall == pytest.approx(hits, abs=1e-4) and hits >= recall_wanted
        banned = index.ids_of(rows[:, :4])
        _, others = index.search(queries, 10, banned)
        assert not any(set(a) & set(b) for a, b in zip(banned, index.ids_of(others), strict=True))
        for shops in ([2], [1, 3, 4]):  # few are searched exactly, many approximately
            _, found = index.search(queries, 10, banned, {"shop": shops})
            is_allowed = torch.isin(torch.arange(ITEMS) % 5, torch.tensor(shops))
            assert found.shape == (100, 10) and is_allowed[found].all()
            assert not any(set(a) & set(b) for a, b in zip(banned, index.ids_of(found), strict=True))
            best = top_k(queries, vectors, 10, jagged(rows[:, :4]), is_allowed)[1]
            assert recall(found, best) >= recall_wanted - 0.05
    assert (reports[0.5].effort or 0) <= (reports[0.97].effort or 0)
    assert reports[0.97].tuned_on == "given queries"


def jagged(rows: torch.Tensor) -> Jagged:
    return Jagged(rows.flatten(), torch.arange(len(rows) + 1) * rows.shape[1])


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
    write_index(tmp_path / "index", vectors, corpus(), search=Search(kind=kind, recall=0.95), queries=tuning)
    index = ItemIndex(tmp_path / "index")
    report = index.report
    assert report.tuned_on == "users" and [k for k, _, _ in report.tuned] == [100, 200, 400, 800, 1000]
    assert report.recall == report.tuned[0][2] and all(measured >= 0.95 for _, _, measured in report.tuned)
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
    users = TuningQueries(queries, source="users")
    first = write_index(tmp_path / "0", vectors, corpus(), search=search, queries=users).item_index(tmp_path)
    assert first.recall is not None and first.recall > 0.9  # what an extension must not ask for
    for day in range(1, 5):
        more = pa.table({"item": [f"{day}-{row}" for row in range(20)], "shop": [0] * 20})
        ItemIndex(tmp_path / str(day - 1)).extended(tmp_path / str(day), drawn(20, seed=day)[0], more)
        report = ItemIndex(tmp_path / str(day)).report
        assert (report.target_recall, report.tuned_on, report.k) == (0.9, "users", 10)
    assert report.effort == first.effort and (report.recall or 0) >= 0.9


@pytest.mark.parametrize("rule", ["identity", "vocabulary"])
def test_a_history_asks_as_its_row_does_whatever_the_index_holds(rule: str, tmp_path: Path) -> None:
    """The index has ten items of fifty, the model all but those from 50 on."""
    ids = [str(row) for row in range(50)] if rule == "vocabulary" else list(range(50))
    mapping: dict[str, Any] = {"kind": rule}
    if rule == "vocabulary":
        pq.write_table(pa.table({"id": ids}), tmp_path / "ids.parquet")
        mapping |= {"path": str(tmp_path / "ids.parquet"), "oov_rows": 2}
    made = tower_of("sasrec", {"max_length": 6}, 52 if rule == "vocabulary" else 50, DIM, mapping)
    vectors, tower = made.vectors(torch.arange(10)), made.export(tmp_path / "tower")
    write_index(tmp_path / "index", vectors, pa.table({"item": ids[:10]}), tower=tower)
    index, one = ItemIndex(tmp_path / "index"), type(ids[0])
    histories = [[one(id) for id in history] for history in ([3, 40, 7], [45], [5, 60])]
    assert index.known(histories) == [3, 1, 1]
    known = [*histories[:2], [one(5)]] if rule == "identity" else histories  # a vocabulary has rows for others
    assert torch.equal(index.queries(histories), index.queries_of({"history": known}))
    assert index.queries([[one(60)]]).any() == (rule == "vocabulary") and index.known([[one(60)], []]) == [0, 0]


@pytest.mark.parametrize("family", ["sasrec", "hstu"])
def test_an_index_answers_as_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    made = tower_of(family, {"max_length": 6}, 50, DIM)
    exported = made.export(tmp_path / "tower")
    backwards = torch.arange(50).flip(0)
    vectors = made.vectors(backwards)
    torch.testing.assert_close(vectors, made.model.items(backwards), rtol=0, atol=1e-6)
    written = write_index(tmp_path / "index", vectors, pa.table({"item": backwards.numpy()}), tower=exported)
    index = ItemIndex(tmp_path / "index")
    assert written.version == index.version
    histories = [[3, 7], [], [1, 99, 2], list(range(20))]
    found = index.queries(histories)
    torch.testing.assert_close(found, made.queries([[3, 7], [], [1, 2], list(range(20))]), rtol=0, atol=1e-6)
    scores, rows = index.search(found, 5, histories)
    assert not {3, 7} & set(index.ids_of(rows)[0])
    torch.testing.assert_close(scores[0], vectors[rows[0]] @ found[0])


def test_files_of_another_version_are_refused_by_name(tmp_path: Path) -> None:
    """An index and its query tower are one export: neither can be exchanged for that of another."""
    for number in range(2):
        made = tower_of("sasrec", {"max_length": 6}, 50, DIM, seed=number)
        tower, vectors = made.export(tmp_path / f"tower{number}"), made.vectors(torch.arange(50))
        write_index(tmp_path / str(number), vectors, pa.table({"item": range(50)}), tower=tower)
    for name in ("vectors.bin", "tables.bin"):
        kept = (tmp_path / "0" / name).read_bytes()
        (tmp_path / "0" / name).unlink()  # the export of the tower may have the same file
        (tmp_path / "0" / name).write_bytes((tmp_path / "1" / name).read_bytes())
        with pytest.raises(ExportError, match=f"0/{name} is damaged"):
            ItemIndex(tmp_path / "0")
        (tmp_path / "0" / name).write_bytes(kept)
    ItemIndex(tmp_path / "0")
    with pytest.raises(ExportError, match=r"tower0 is a query tower without an index of items; make one with"):
        ItemIndex(tmp_path / "tower0")
    with pytest.raises(ExportError, match=r"is a query tower with queries of 8 numbers; an index of vectors of 5"):
        write_index(tmp_path / "a", torch.ones(1, 5), pa.table({"item": [1]}), tower=tmp_path / "tower0")
    with pytest.raises(ExportError, match="is a query tower, which does not score rows: use `rayrec retrieve`"):
        Scorer(Model(tmp_path / "tower0"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "index.json").write_text("{}")
    with pytest.raises(ExportError, match=r"an index of an earlier rayrec.*write it again with `rayrec index RUN OUT`"):
        ItemIndex(tmp_path / "old")


def test_wrong_or_damaged_indexes_are_named(tmp_path: Path) -> None:
    vectors, queries = drawn(50)
    with pytest.raises(ExportError, match="the id 1 comes twice"):
        write_index(tmp_path / "a", vectors, pa.table({"item": [1] * 50}))
    with pytest.raises(ExportError, match="an id is missing"):
        write_index(tmp_path / "a", vectors, pa.table({"item": [None, *range(49)]}))
    with pytest.raises(ExportError, match="column 'item' has type double; ids must be integers or texts"):
        write_index(tmp_path / "a", vectors, pa.table({"item": [0.5] * 50}))
    with pytest.raises(ExportError, match=r"vectors have shape \[50, 8\], but there are 49 items"):
        write_index(tmp_path / "a", vectors, corpus(49))
    with pytest.raises(ExportError, match="item 'i7': its vector is not finite"):
        write_index(tmp_path / "a", vectors.index_fill(0, torch.tensor([7]), torch.nan), corpus(50))
    with pytest.raises(ExportError, match="is not a complete export"):
        ItemIndex(tmp_path)
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
        pq.write_table(asked.slice(5 * part, 5), tmp_path / "asked" / f"{part}.parquet", row_group_size=5)
    words = ["retrieve", tmp_path / "index", tmp_path / "asked", tmp_path / "out", "--k", 4, "--vector", "vector"]
    words += ["--exclude", "not"]
    assert "10 rows in 1 files" in command(*words)
    assert "1 of 1 parts exist already" in command(*words)
    found = pq.read_table(tmp_path / "out").sort_by("user").to_pylist()
    for row in found:
        want = plain(queries[row["user"]], vectors, 4, {row["user"]}, None)
        assert row["items"] == [f"i{one}" for one in want]
        assert row["scores"] == pytest.approx((vectors[want] @ queries[row["user"]]).tolist(), rel=1e-5)
    asked_again = ["retrieve", tmp_path / "index", tmp_path / "asked", tmp_path / "more"]
    assert "no column 'history'" in refused(*asked_again, "--history", "history")
    assert "column 'user' must be a list, not int64" in refused(*asked_again, "--vector", "user")
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
    assert "(different index)" in refused("retrieve", tmp_path / "b", *words, 3)
    assert "(different options)" in refused("retrieve", tmp_path / "a", *words, 4)
    pq.write_table(pa.table({"vector": (2 * queries).tolist()}), asked)
    assert "(different data)" in refused("retrieve", tmp_path / "a", *words, 3)
    (tmp_path / "out" / "_retrieve.json").unlink()
    assert "parts without _retrieve.json; choose another" in refused("retrieve", tmp_path / "a", *words, 3)
    result, again = tmp_path / "out" / "part-000000.parquet", [tmp_path / "again", *words[2:]]
    assert "already has a column 'items'" in refused("retrieve", tmp_path / "a", result, *again, 3)


def test_retrieval_resumes(tmp_path: Path) -> None:
    """Only parts that do not exist are made; `test_predict.py` has workers."""
    vectors, queries = drawn(60, 50)
    write_index(tmp_path / "indexes" / "1", vectors, corpus(60))
    pq.write_table(
        pa.table({"user": range(50), "vector": queries.tolist()}), tmp_path / "asked.parquet", row_group_size=10
    )
    said = list[str]()
    for rows in (50, 20):
        done = retrieve(
            tmp_path / "indexes",
            str(tmp_path / "asked.parquet"),
            tmp_path / "out",
            RetrieveOptions(k=4, vector="vector"),
            rows_per_file=10,
            say=said.append,
        )
        assert done.rows == rows
        for part in (1, 3):
            if rows == 50:
                (tmp_path / "out" / f"part-00000{part}.parquet").unlink()  # as if interrupted
    assert said == ["3 of 5 parts exist already"]
    found = pq.read_table(tmp_path / "out")
    assert found["user"].to_pylist() == list(range(50))
    assert found["items"].to_pylist() == [
        [f"i{row}" for row in plain(query, vectors, 4, set(), None)] for query in queries
    ]


def test_retrieval_by_history_leaves_out_what_was_seen(tmp_path: Path) -> None:
    made = tower_of("sasrec", {"max_length": 6, "normalize": True, "loss": {"kind": "softmax"}}, 50, DIM)
    exported, vectors = made.export(tmp_path / "tower"), made.vectors(torch.arange(50))
    write_index(tmp_path / "index", vectors, pa.table({"item": range(50)}), tower=exported)
    pq.write_table(pa.table({"history": [[1, 2], [], None]}), tmp_path / "asked.parquet")
    words = ["retrieve", tmp_path / "index", tmp_path / "asked.parquet"]
    said = command(*words, tmp_path / "out", "--history", "history", "--k", 50)
    assert "2 rows without items: the model knows nothing of their history" in said
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert [len(row["items"]) for row in found] == [48, 0, 0] and not {1, 2} & set(found[0]["items"])
    command(*words, tmp_path / "seen", "--history", "history", "--k", 50, "--keep-seen")
    assert {1, 2} <= set(pq.read_table(tmp_path / "seen").to_pylist()[0]["items"])
    assert json.loads((tmp_path / "index" / "export.json").read_text())["search"]["search"] == "exact"
