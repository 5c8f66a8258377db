"""`POST /retrieve`: answers, filters, wrong requests, drawn nonsense."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.inference import ExportError, ItemIndex, write_index
from rayrec.serve import (
    JSON,
    App,
    ClientConfig,
    Clients,
    Limits,
    LogConfig,
    ModelSpec,
    RequestError,
    Retrieval,
    Service,
    parse_config,
)
from rayrec.serve.versions import switch
from tests.inference.runs import command
from tests.inference.towers import tower_of
from tests.serve.server import Server, clients_of
from tests.serve.test_service import version_of

ITEMS, DIM = 40, 4


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Retrieval:
    tower = tower_of("sasrec", {"max_length": 5, "normalize": True}, 100 + ITEMS, DIM)
    items = pa.table(
        {"item": [100 + row for row in range(ITEMS)], "shop": ["a" if row % 4 else "b" for row in range(ITEMS)]}
    )
    root = tmp_path_factory.mktemp("retrieval")
    folder = root / "indexes" / "index"
    write_index(folder, tower.vectors(100 + torch.arange(ITEMS)), items, tower=tower.export(root / "tower"))
    return Retrieval(folder, Limits(rows=8, ids=60))


def ask(retrieval: Retrieval, **asked: Any) -> list[dict[str, Any]]:
    answer = json.loads(retrieval.answer(json.dumps(asked).encode()))
    assert answer["version"] == retrieval.index.version
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_the_best_items_come_back_with_their_scores(retrieval: Retrieval) -> None:
    index = retrieval.index
    query = index.queries([[101, 105]])[0]
    scores = (index.vectors @ query).tolist()
    order = sorted(range(ITEMS), key=lambda row: -scores[row])
    unseen = [row for row in order if row not in (1, 5)]
    (found,) = ask(retrieval, queries=[{"history": [101, 105]}], k=6)
    assert found["ids"] == [100 + row for row in unseen[:6]]
    assert found["scores"] == pytest.approx([scores[row] for row in unseen[:6]], rel=1e-5)
    (kept,) = ask(retrieval, queries=[{"history": [101, 105]}], k=6, keep_seen=True)
    assert kept["ids"] == [100 + row for row in order[:6]]
    (left,) = ask(retrieval, queries=[{"vector": query.tolist(), "exclude": [100 + order[0]]}], k=6)
    assert left["ids"] == [100 + row for row in order[1:7]]
    shop = [row for row in unseen if row % 4 == 0]
    (filtered,) = ask(retrieval, queries=[{"history": [101, 105]}], k=1000, filter={"shop": ["b"]})
    assert filtered["ids"] == [100 + row for row in shop]


def test_a_query_of_which_nothing_is_known_gets_no_items(retrieval: Retrieval) -> None:
    results = ask(retrieval, queries=[{"history": ids} for ids in ([], [170], [101, 170, 105], [101, 105])], k=3)
    assert [result["known"] for result in results] == [0, 0, 2, 2]
    assert [len(result["ids"]) for result in results] == [0, 0, 3, 3] and results[2] == results[3]
    assert "known" not in ask(retrieval, queries=[{"vector": [1.0] * DIM}])[0]


@pytest.fixture(scope="module")
def ranked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Retrieval:
    """An index of which the ranker `model` scores the items."""
    root, items = tmp_path_factory.mktemp("ranked"), torch.arange(50)
    tower = tower_of("sasrec", {"max_length": 5, "normalize": True}, 50, DIM)
    table = pa.table({"item": items.numpy(), "city": [f"city {item % 9}" for item in items], "shop": ["a", "b"] * 25})
    write_index(root / "index" / "1", tower.vectors(items), table, tower=tower.export(root / "tower"), ranker=model)
    return Retrieval(root / "index", Limits(rows=60))


CONTEXTS: list[dict[str, Any]] = [{"user": 3, "tags": [1, 2], "age": 0.5}, {"user": 7, "tags": [], "age": -1.0}]


def test_items_found_are_ranked_as_by_hand(ranked: Retrieval, service: Service) -> None:
    histories = [[3, 9], [12]]
    queries = [{"history": history} for history in histories]
    found = ask(ranked, queries=queries, k=20)
    want = [{**one, "context": context} for one, context in zip(queries, CONTEXTS, strict=True)]
    answers = {k: ask(ranked, queries=want, k=20, rank={"by": "label", "k": k}) for k in (20, 6)}
    for before, context, *after in zip(found, CONTEXTS, *answers.values(), strict=True):
        candidates = [{"item": item, "city": f"city {item % 9}"} for item in before["ids"]]
        body = json.dumps({"context": context, "candidates": candidates}).encode()
        scores = service.score(body, JSON).scores["label"].tolist()
        order = sorted(range(20), key=lambda place: -scores[place])
        for answer, k in zip(after, answers, strict=True):
            assert answer["ids"] == [before["ids"][place] for place in order[:k]]
            assert answer["scores"] == [before["scores"][place] for place in order[:k]]
            assert answer["ranking"]["label"] == pytest.approx([scores[place] for place in order[:k]], rel=1e-6)
    assert answers[20][0]["ids"] != found[0]["ids"], "the ranker changes the order"
    # A query of which nothing is known has no items to rank, whatever its context.
    mixed = ask(ranked, queries=[{"history": []}, want[1]], k=20, rank={})
    assert mixed == [{"ids": [], "scores": [], "known": 0, "ranking": {"label": []}}, answers[20][1]]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"context": CONTEXTS[0], "rank": None}, "`context` is for the ranker: send `rank` too"),
        ({"context": {"user": 3, "age": 0.5}}, "query 0: ranking its items: column 'tags' is missing; send it in .*"),
        ({"context": {**CONTEXTS[0], "user": -1}}, "query 0: ranking its items: .*user"),
        ({"context": {**CONTEXTS[0], "city": "x"}}, "column 'city' is in the query and in the items of the index"),
        ({"context": {**CONTEXTS[0], "history": [1]}}, "column 'history' is in the context and in the query"),
        ({"context": CONTEXTS[0], "rank": {"by": "like"}}, "rank.by: unknown label 'like'; the ranker has label"),
        ({"context": CONTEXTS[0], "rank": {"k": 0}}, "rank.k: .* greater than or equal to 1"),
        ({"context": CONTEXTS[0], "k": 31, "more": 1}, "62 rows exceed the limit of 60"),
    ],
)
def test_wrong_rankings_are_told_what_is_wrong(ranked: Retrieval, asked: dict[str, Any], text: str) -> None:
    query = {"history": [3], "context": asked.pop("context")}
    more = [{"history": [4], "context": CONTEXTS[1]}] * asked.pop("more", 0)
    body = {"queries": [query, *more], "k": 10, "rank": {}, **asked}
    with pytest.raises(RequestError, match=text):
        ranked.answer(json.dumps(body).encode())


def test_a_ranker_is_part_of_the_version(ranked: Retrieval, retrieval: Retrieval, model: Path, tmp_path: Path) -> None:
    """Another ranker is another version of the export, which has copies of its files; an index keeps its ranker."""
    index, other = ranked.index, version_of(model, tmp_path / "ctr", 0.5)
    command("index", index.folder, index.folder.parent / "2", "--ranker", other)
    old = index.version
    assert ranked.versions.refresh() and ranked.index.version != old
    own, old_ranker = (json.loads((folder / "export.json").read_text())["version"] for folder in (other, model))
    assert ranked.index.export.ranker == own != old_ranker
    assert ranked.health()["ranker"] == ranked.index.export.ranker
    query = ranked.index.queries([[3]])
    pq.write_table(pa.table({"item": [99], "city": "x", "shop": "a", "vector": query.tolist()}), tmp_path / "more")
    command("index", tmp_path / "more", tmp_path / "3", "--extend", ranked.index.folder)
    longer = Retrieval(tmp_path / "3")
    assert longer.index.export.ranker == own
    (found,) = ask(longer, queries=[{"history": [3], "context": CONTEXTS[0]}], k=51, rank={})
    assert 99 in found["ids"] and len(found["ranking"]["label"]) == 50
    # Neither the ranker's files nor the tower's are those that they were copied from.
    for source in (other, index.folder.parents[1] / "tower"):
        for file in (file for file in source.rglob("*") if file.is_file()):
            file.write_bytes(bytes(file.stat().st_size))
    ItemIndex(longer.index.folder)  # compares the checksums
    with pytest.raises(RequestError, match="the index has no ranker: write it with `rayrec index … --ranker EXPORT`"):
        ask(retrieval, queries=[{"history": [101]}], rank={})
    for items, ranker, why in (
        ({"sku": [1]}, model, r"reads \[.*\], but the items have \['sku'\]: index the items with the columns"),
        ({"item": [1]}, index.folder, "is a query tower, which does not score rows; give the export of a ranker"),
    ):
        with pytest.raises(ExportError, match=why):
            write_index(tmp_path / "4", torch.ones(1, DIM), pa.table(items), ranker=ranker)
    write_index(tmp_path / "4", torch.ones(1, DIM), pa.table({"item": [1], "city": [1.5]}), ranker=model)
    with pytest.raises(ExportError, match=r"the ranker cannot read the items: .*'city'"):
        Retrieval(tmp_path / "4")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("[", 400, "not valid JSON"),
        ("[]", 422, "an object"),
        ('{"queries": 3}', 422, "queries: .* array"),
        ('{"queries": []}', 422, "no rows"),
        ('{"queries": [{}]}', 422, "queries.0: a query must have one of: history, vector"),
        ('{"queries": [{"history": [1.5]}]}', 422, "queries.0.history.0"),
        ('{"queries": [{"history": [], "user": 3}]}', 422, "queries.0.user"),
        ('{"queries": [{"vector": [1, 2, 3]}]}', 422, "vector must be 4 finite numbers"),
        ('{"queries": [{"vector": [1, 2, 3, NaN]}]}', 422, "queries.0.vector.3"),
        ('{"queries": [{"vector": [1, 2, 3, 4]}, {"history": []}]}', 422, "all histories, all vectors"),
        ('{"queries": [{"history": []}], "k": 0}', 422, "k: .* greater than or equal to 1"),
        ('{"queries": [{"history": []}], "k": true}', 422, "k: .* integer"),
        ('{"queries": [{"history": []}], "keep_seen": 1}', 422, "keep_seen"),
        ('{"queries": [{"history": []}], "filter": {"colour": ["red"]}}', 422, "unknown attribute 'colour'"),
        ('{"queries": [{"history": []}], "filter": {"shop": [3]}}', 422, "filter 'shop'"),
        ('{"queries": [{"history": []}], "filter": {"shop": "b"}}', 422, "filter.shop: .* array"),
        (
            '{"queries": [{"history": [101]}, {"history": ["105"]}]}',
            422,
            "query 1: `history` has the id '105'; .* integers",
        ),
        ('{"queries": [{"history": [101], "exclude": ["x"]}]}', 422, "query 0: `exclude` has the id 'x'; .* integers"),
        (json.dumps({"queries": [{"history": []}] * 9}), 413, "9 rows exceed the limit of 8"),
        (json.dumps({"queries": [{"history": [1] * 31}]}), 413, "62 ids exceed the limit of 60"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(retrieval: Retrieval, body: str, status: int, text: str) -> None:
    with pytest.raises(RequestError, match=text) as error:
        retrieval.answer(body.encode())
    assert error.value.status == status


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["queries", "history", "vector", "exclude", "k", "filter", "shop"]), inner)
    ),
    max_leaves=12,
)


requests = st.fixed_dictionaries(
    {"queries": values | st.lists(st.fixed_dictionaries({"history": values}), max_size=3)},
    optional={"k": values, "filter": values, "keep_seen": values},
)


@settings(max_examples=150)
@given(asked=requests)
def test_whatever_is_sent_is_answered_or_refused(retrieval: Retrieval, asked: dict[str, Any]) -> None:
    try:
        answer = json.loads(retrieval.answer(json.dumps(asked).encode()))
    except RequestError as error:
        assert 400 <= error.status < 500 and error.text
    else:
        assert len(answer["results"]) == len(asked["queries"])


def test_the_size_of_an_answer_is_limited(retrieval: Retrieval) -> None:
    wide = Retrieval(retrieval.index.folder, Limits(rows=100_000))
    for queries, k, vectors in ((1001, 1000, False), (99_000, 8, True)):
        body = json.dumps({"queries": [{"history": []}] * queries, "k": k, "vectors": vectors})
        with pytest.raises(RequestError, match=r"exceed the limit of 1,000,000 per request; split") as error:
            wide.answer(body.encode())
        assert error.value.status == 413


def test_a_service_with_an_index_answers_over_http(retrieval: Retrieval, service: Service, tmp_path: Path) -> None:
    server = Server(App(service, clients_of(tmp_path, one="s3cret"), retrieval=retrieval))
    good: dict[str, Any] = {"queries": [{"history": [101]}], "k": 3}
    key = "Bearer s3cret"
    try:
        status, answer = server.ask("POST", "/retrieve", good, authorization=key)
        assert status == 200 and answer["results"] == ask(retrieval, **good)
        assert server.ask("POST", "/retrieve", good)[0] == 401
        assert server.ask("GET", "/retrieve", authorization=key)[0] == 405
        assert server.ask("POST", "/retrieve", {"queries": [{}]}, authorization=key)[0] == 422
    finally:
        server.close()
    server = Server(App(service))
    try:
        assert server.ask("POST", "/retrieve", good)[0] == 404
    finally:
        server.close()


def test_a_deadline_holds_for_items_too_and_a_thread_that_works_on_keeps_its_place(
    retrieval: Retrieval, service: Service
) -> None:
    begun, may_answer = threading.Event(), threading.Event()

    class Slow(Retrieval):
        def answer(self, *given: Any) -> bytes:
            begun.set()
            may_answer.wait(120)
            return super().answer(*given)

    app = App(service, retrieval=Slow(retrieval.index.folder))
    server, body = Server(app), {"queries": [{"history": [101]}]}
    status, answer = server.ask("POST", "/retrieve", body, x_deadline_ms="500")
    assert status == 504 and "X-Deadline-Ms" in answer["error"]
    assert app.batcher.queued == begun.is_set()
    may_answer.set()
    assert server.ask("POST", "/retrieve", body, x_deadline_ms="30000")[0] == 200
    assert server.ask("POST", "/retrieve", body, x_deadline_ms="soon")[0] == 400
    until = time.monotonic() + 120
    while app.batcher.queued:
        assert time.monotonic() < until
        time.sleep(0.01)
    server.close()


def test_items_that_were_ranked_are_logged(ranked: Retrieval, tmp_path: Path) -> None:
    service = Service([], index=ranked.index.folder, log=LogConfig(folder=tmp_path, share=1.0))
    server = Server(App(service))
    queries = [{"history": [3 + place], "context": context} for place, context in enumerate(CONTEXTS)]
    sent = {"queries": [*queries, {"history": []}], "k": 20, "rank": {"k": 6}}
    status, answer = server.ask("POST", "/retrieve", sent, x_request_id="r1")
    assert status == 200 and server.ask("POST", "/retrieve", {"queries": queries[:1], "rank": {"by": "x"}})[0] == 422
    server.close()
    service.close()
    (file,) = (tmp_path / "_retrieve").iterdir()
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 40 and {row["_request"] for row in rows} == {"r1"}
    assert {row["_version"] for row in rows} == {answer["version"]}
    for place, (context, result) in enumerate(zip(CONTEXTS, answer["results"], strict=False)):
        own = {row["_item"]: row for row in rows if row["_query"] == place}
        assert len(own) == 20 and [row["_row"] for row in own.values()] == list(range(20))
        assert all(row["city"] == f"city {item % 9}" and row["user"] == context["user"] for item, row in own.items())
        logged = [own[item]["_score"] for item in result["ids"]]
        assert logged == pytest.approx(result["ranking"]["label"], rel=1e-6)


@pytest.mark.parametrize(
    ("client", "status"),
    [({}, 200), ({"models": ["ctr"]}, 403), ({"models": [], "index": True}, 200), ({"index": False}, 403)],
)
def test_a_client_that_is_limited_to_models_needs_leave_for_the_index(
    retrieval: Retrieval, service: Service, tmp_path: Path, client: dict[str, Any], status: int
) -> None:
    (tmp_path / "token").write_text("s3cret")
    clients = Clients([ClientConfig(name="one", token_file=str(tmp_path / "token"), **client)])
    server = Server(App(service, clients, retrieval=retrieval))
    try:
        code, answer = server.ask("POST", "/retrieve", {"queries": [{"history": [101]}]}, authorization="Bearer s3cret")
        assert code == status
        assert status == 200 or "client 'one' may not use /retrieve" in answer["error"]
    finally:
        server.close()


def test_a_service_may_have_an_index_alone(retrieval: Retrieval) -> None:
    config = parse_config({"index": str(retrieval.index.folder)})
    server = Server(App(Service(config.models, index=config.index)))
    try:
        status, answer = server.ask("POST", "/retrieve", {"queries": [{"history": [101]}]})
        assert status == 200 and len(answer["results"]) == 1
        assert server.ask("GET", "/healthz")[1]["models"] == []
        for method, path, body in (
            ("POST", "/score", {"rows": []}),
            ("GET", "/schema", None),
            ("GET", "/v2/models/x", None),
        ):
            status, answer = server.ask(method, path, body)
            assert status == 404 and "no ranking model; use POST /retrieve" in str(answer), (path, answer)
        assert server.ask("GET", "/metrics")[0] == 200
    finally:
        server.close()


def test_versions_of_an_index_change_while_it_answers(retrieval: Retrieval, tmp_path: Path) -> None:
    """Numbers in names count as numbers, `current` names another version, and no request fails meanwhile."""
    folder = retrieval.index.folder
    with pytest.raises(ExportError, match=r"has no export \(export.json\)"):
        Retrieval(tmp_path)
    for name in ("8", "9"):
        shutil.copytree(folder, tmp_path / name)
    service = Service([], watch_s=0.02, index=tmp_path)
    server = Server(App(service))
    old = retrieval.index.version
    statuses, versions, stop = Counter[int](), list[str](), threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            status, answer = server.ask("POST", "/retrieve", {"queries": [{"history": [101, 105]}], "k": 3})
            statuses[status] += 1
            versions.append(answer["version"])

    clients = [threading.Thread(target=ask_on) for _ in range(2)]
    try:
        for client in clients:
            client.start()
        query = retrieval.index.queries([[101, 105]])
        more = pa.table({"item": [500], "shop": ["c"]})
        new = retrieval.index.extended(tmp_path / "10", 100 * query, more).version
        wait_for(lambda: versions[-1:] == [new])
        _, answer = server.ask("POST", "/retrieve", {"queries": [{"history": [101, 105]}], "k": 1})
        assert answer["results"][0]["ids"] == [500] and answer["version"] == new
        assert switch(tmp_path) == ("10", "9")
        wait_for(lambda: versions[-1:] == [old])
        (tmp_path / "11").mkdir()
        (tmp_path / "11" / "export.json").write_text("{}")
        (tmp_path / "current").write_text("11")
        wait_for(lambda: bool(service.health()["index"]["refused"]))
        assert server.ask("POST", "/retrieve", {"queries": [{"history": [101]}]})[1]["version"] == old
        assert server.ask("GET", "/healthz")[1]["index"]["version"] == old
    finally:
        stop.set()
        for client in clients:
            client.join()
        server.close()
        service.close()
    assert set(statuses) == {200} and set(versions) == {old, new}
    assert [(name, outcome) for name, outcome, _, _ in service.events][:2] == [("/retrieve", "loaded")] * 2


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_served_must_fit(retrieval: Retrieval) -> None:
    tower = retrieval.index.folder.parents[1] / "tower"
    with pytest.raises(ExportError, match="is a query tower without an index of items; make one with `rayrec index`"):
        Retrieval(tower)
    for path in (tower, retrieval.index.folder):
        with pytest.raises(ExportError, match="is a query tower, which does not score rows: serve it with --index"):
            Service([ModelSpec(path=path)])
