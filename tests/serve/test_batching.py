"""Requests that wait are scored together: the answers are those of each alone, and nobody waits for company."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.serve import ARROW, JSON, Answer, App, RequestError, Service
from rayrec.serve.batching import Batcher
from rayrec.serve.versions import MAX_INLINE_S, Pace
from tests.serve.server import GOOD, Server
from tests.serve.test_fuzz import SCHEMA, stream

ROWS = st.fixed_dictionaries(
    {
        "user": st.integers(0, 39),
        "item": st.integers(0, 2**40),
        "tags": st.lists(st.integers(0, 6), max_size=4),
        "age": st.floats(-3, 3, width=32),
        "city": st.sampled_from(["city 1", "city 3", "elsewhere"]),
    }
)
WRONG: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"user": -1}, {"user": None}, {"tags": [9]}, {"tags": [[1]]}, {"age": "x"}, {"city": 7}]
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, str]:
    rows: list[dict[str, Any]] = draw(st.lists(ROWS, min_size=1, max_size=4))
    form = draw(st.sampled_from(["rows", "columns", "context", "arrow"]))
    if form == "arrow":
        return stream(pa.Table.from_pylist(rows, SCHEMA)), ARROW
    if draw(st.integers(0, 5)) == 0:
        rows[0] = {**rows[0], **draw(WRONG)}
    if draw(st.integers(0, 9)) == 0:
        del rows[-1][draw(st.sampled_from(sorted(GOOD)))]
    raw: dict[str, Any] = {"rows": rows}
    if form == "columns":
        raw = {"rows": {name: [row[name] for row in rows if name in row] for name in GOOD}}
    elif form == "context":
        shared = draw(st.sampled_from([["user", "tags"], ["tags", "age"], ["city"], sorted(GOOD)]))
        context = {name: rows[0].get(name) for name in shared}
        raw = {"context": context, "candidates": [{k: v for k, v in row.items() if k not in shared} for row in rows]}
    return json.dumps(raw).encode(), JSON


def together(service: Service, requests: list[Any]) -> list[Answer | Exception]:
    """As a batcher scores them where all of them wait, and there is time for all."""
    answers: dict[int, Answer | Exception] = {}
    while rest := [place for place in range(len(requests)) if place not in answers]:
        form = requests[rest[0]].query.form
        group = [place for place in rest if place == rest[0] or requests[place].query.form == form is not None]
        answers |= dict(zip(group, service.answers([requests[place] for place in group]), strict=True))
    return [answers[place] for place in range(len(requests))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(bodies(), min_size=2, max_size=8))
def test_requests_together_are_answered_as_each_alone(service: Service, drawn: list[tuple[bytes, str]]) -> None:
    requests = []
    for body, kind in drawn:
        try:
            requests.append(service.read(body, kind))
        except RequestError:
            continue
    for one, answer in zip(requests, together(service, requests), strict=True):
        (alone,) = service.answers([one])
        if isinstance(alone, RequestError):
            assert isinstance(answer, RequestError) and answer.to_dict() == alone.to_dict()
        else:
            assert isinstance(answer, Answer) and answer.version == alone.version
            np.testing.assert_allclose(answer.scores["label"], alone.scores["label"], rtol=0, atol=1e-6)


GOOD_BUT_USER = {name: value for name, value in GOOD.items() if name != "user"}


def request_of(service: Service, rows: int, **change: Any) -> Any:
    return service.read(json.dumps({"rows": [{**GOOD, **change}] * rows}).encode(), JSON)


def test_those_that_wait_are_scored_together_and_a_bad_request_spoils_only_itself(service: Service) -> None:
    users = [request_of(service, 1, user=user) for user in (1, 2, 3)]
    other = service.read(json.dumps({"context": {"user": 1}, "candidates": [{**GOOD_BUT_USER}]}).encode(), JSON)
    loaded = replace(other.loaded, pace=Pace(fixed_s=1e-3, row_s=1e-6))
    users = [replace(one, loaded=loaded) for one in users]

    async def ask(*requests: Any) -> list[Any]:
        batcher = Batcher(service)
        return await asyncio.gather(*(batcher.scored(one) for one in requests), return_exceptions=True)

    before = len_of(service)
    answers = asyncio.run(ask(*users, other))
    batches, requests = (after - first for after, first in zip(len_of(service), before, strict=True))
    assert (batches, requests) == (2, 4) and len({float(answer.scores["label"][0]) for answer in answers}) == 3
    bad = replace(request_of(service, 1, user=-1), loaded=loaded)
    answers = asyncio.run(ask(users[0], bad, users[1]))
    assert [isinstance(answer, Answer) for answer in answers] == [True, False, True] and "'user'" in str(answers[1])


@pytest.mark.parametrize("form", ["rows", "context"])
@pytest.mark.parametrize("change", [{"user": -1}, {"user": None}, {"tags": [9]}, {"tags": [[1]]}, {"age": "x"}])
@pytest.mark.parametrize("bad", [(3,), (0, 11), (1, 2, 4, 5, 6, 7, 8, 9)])
def test_bad_requests_cost_the_others_no_batch_of_their_own(
    service: Service, form: str, change: dict[str, Any], bad: tuple[int, ...]
) -> None:
    def body(row: dict[str, Any]) -> bytes:
        shared = {name: row.pop(name) for name in ("user", "tags")} if form == "context" else None
        raw = {"rows": [row] * 2} if shared is None else {"context": shared, "candidates": [row] * 2}
        return json.dumps(raw).encode()

    rows = [{**GOOD, "user": place, **(change if place in bad else {})} for place in range(12)]
    requests = [service.read(body(row), JSON) for row in rows]
    before = len_of(service)
    answers = service.answers(requests)
    batches, scored = (after - first for after, first in zip(len_of(service), before, strict=True))
    assert (batches, scored) == (1, 12 - len(bad))
    assert [place for place, answer in enumerate(answers) if isinstance(answer, RequestError)] == [*bad]
    for place in bad:
        (alone,), answer = service.answers([requests[place]]), answers[place]
        assert isinstance(alone, RequestError) and isinstance(answer, RequestError)
        assert answer.to_dict() == alone.to_dict()


def test_columns_that_the_model_does_not_read_fail_no_other_request(service: Service) -> None:
    columns = {name: [value] for name, value in GOOD.items()}
    raws = [columns, {**columns, "debug": [7]}, {**columns, "trace": [1, 2]}, {**columns, "debug": ["x"]}]
    requests = [service.read(json.dumps({"rows": raw}).encode(), JSON) for raw in raws]
    loaded = replace(requests[0].loaded, pace=Pace(fixed_s=1e-3, row_s=1e-6))

    async def ask() -> list[Any]:
        batcher = Batcher(service)
        waiting = (batcher.scored(replace(one, loaded=loaded)) for one in requests)
        return await asyncio.gather(*waiting, return_exceptions=True)

    before = len_of(service)
    answers = asyncio.run(ask())
    assert len_of(service)[0] - before[0] == 1 and all(isinstance(answer, Answer) for answer in answers), answers
    assert len({answer.scores["label"].tobytes() for answer in answers}) == 1
    with pytest.raises(RequestError, match="missing"):
        service.score(json.dumps({"rows": {"debug": [1, 2]}}).encode(), JSON)


def test_a_request_that_is_alone_waits_for_nobody(service: Service) -> None:
    """Between its coming and its scoring the event loop goes round a few times, and never sleeps."""

    async def ask() -> int:
        loop, times, batcher = asyncio.get_running_loop(), 0, Batcher(service)
        answer = asyncio.ensure_future(batcher.scored(request_of(service, 1)))
        await asyncio.sleep(0)
        while batcher._waiting:
            times += 1
            assert not [handle for handle in loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        await asyncio.wait_for(answer, 30)
        return times

    assert asyncio.run(ask()) < 20


def test_whose_client_has_gone_is_not_scored(service: Service) -> None:
    async def ask() -> Any:
        batcher = Batcher(service)
        gone = asyncio.ensure_future(batcher.scored(request_of(service, 1)))
        here = asyncio.ensure_future(batcher.scored(request_of(service, 1)))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(here, 30)

    assert len(asyncio.run(ask()).scores["label"]) == 1


def test_clients_at_the_same_time_are_scored_together_over_http(service: Service) -> None:
    server, wrong = Server(App(service)), []
    alone = {user: server.ask("POST", "/score", {"rows": [{**GOOD, "user": user}]}) for user in range(8)}
    before = len_of(service)

    def client(user: int) -> None:
        for _ in range(30):
            status, answer = server.ask("POST", "/score", {"rows": [{**GOOD, "user": user}]})
            found, expected = answer["scores"]["label"], alone[user][1]["scores"]["label"]
            if status != 200 or not np.allclose(found, expected, rtol=0, atol=1e-6):
                wrong.append((user, answer))

    threads = [threading.Thread(target=client, args=(user,)) for user in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    batches, requests = (after - first for after, first in zip(len_of(service), before, strict=True))
    assert not wrong and requests == 240 and batches < 240


def len_of(service: Service) -> tuple[float, float]:
    """Batches and requests so far."""
    lines = dict(line.rsplit(" ", 1) for line in service.metrics().decode().splitlines() if line[0] != "#")
    name = f'rayrec_batch_requests_{{}}{{{{model="ctr",replica="{service.stats.replica}"}}}}'
    return float(lines.get(name.format("count"), 0)), float(lines.get(name.format("sum"), 0))


def test_the_pace_says_how_many_rows_are_worth_it() -> None:
    pace = Pace(fixed_s=1e-3, row_s=1e-5)
    assert pace.max_rows() == 900  # then a tenth of the time is fixed
    for _ in range(300):
        pace.observe(10, 5e-3)
    assert pace.max_rows() == round(MAX_INLINE_S / 1e-5)
    for _ in range(300):
        pace.observe(1000, 1e-2)
    assert pace.max_rows() == 1  # nothing is fixed
