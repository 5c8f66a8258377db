"""A service with more to do than it can: it answers about itself, keeps deadlines, and refuses the rest."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayrec.serve import JSON, Answer, App, Limits, ModelSpec, RequestError, Service
from tests.serve.server import GOOD, Server

BODY = {"rows": [GOOD]}


class Slow(Service):
    """Scores when it is let, and is known to take long."""

    def __init__(self, model: Path) -> None:
        super().__init__([ModelSpec(name="ctr", path=model)], limits=Limits(queue=2))
        self.begun, self.may_score = threading.Event(), threading.Event()
        self.read(json.dumps(BODY).encode(), JSON).loaded.pace.observe(1, 1000.0)

    def answers(self, requests: Sequence[Any]) -> list[Answer | RequestError]:
        self.begun.set()
        assert self.may_score.wait(120)
        return super().answers(requests)


class Asked(threading.Thread):
    """A request on its way, and its answer."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        super().__init__()
        self._ask = ask
        self.start()

    def run(self) -> None:
        self.answer = self._ask()

    def result(self) -> Any:
        self.join(120)
        return self.answer


@pytest.fixture(scope="module")
def slow(model: Path) -> Slow:
    return Slow(model)


@pytest.fixture
def app(slow: Slow) -> App:
    return App(slow)


@pytest.fixture
def busy(slow: Slow, app: App) -> Iterator[tuple[Server, Asked]]:
    """The server, and a request that is being scored."""
    slow.begun.clear()
    slow.may_score.clear()
    server = Server(app)
    asked = Asked(lambda: server.ask("POST", "/score", BODY))
    assert slow.begun.wait(120)
    yield server, asked
    slow.may_score.set()
    asked.join(120)
    server.close()


def test_health_metrics_and_schema_answer_while_a_request_is_scored(busy: tuple[Server, Asked], slow: Slow) -> None:
    server, asked = busy
    for path in ("/healthz", "/metrics", "/schema"):
        assert server.ask("GET", path)[0] == 200
    assert server.ask("POST", "/score", b"{")[0] == 400
    assert asked.is_alive()
    slow.may_score.set()
    assert asked.result()[0] == 200


def test_requests_beyond_the_queue_are_refused_at_once(busy: tuple[Server, Asked], slow: Slow, app: App) -> None:
    server, asked = busy
    waiting = Asked(lambda: server.ask("POST", "/score", b" " * (1 << 20) + b'{"rows": []}'))  # read by the thread
    until = time.monotonic() + 120
    while app.batcher.queued < 2:  # else one of the next requests would have its place
        assert time.monotonic() < until
        time.sleep(0.01)
    status, refused, headers = server.ask_all("POST", "/score", BODY)
    assert status == 503
    assert "queue full (2 requests)" in refused["error"] and headers["retry-after"] == "1"
    assert asked.is_alive() and waiting.is_alive()
    slow.may_score.set()
    assert asked.result()[0] == 200 and waiting.result()[0] == 422
    assert server.ask("POST", "/score", BODY)[0] == 200, "the queue is empty again"


def test_a_deadline_is_kept_and_what_missed_it_is_not_scored(busy: tuple[Server, Asked], slow: Slow) -> None:
    server, asked = busy
    begin = time.monotonic()
    status, answer = server.ask("POST", "/score", BODY, x_deadline_ms="50")
    assert status == 504 and "X-Deadline-Ms" in answer["error"] and asked.is_alive()
    assert 0.05 <= time.monotonic() - begin < 10
    before = scored(slow)
    slow.may_score.set()
    assert asked.result()[0] == 200
    assert server.ask("POST", "/score", BODY, x_deadline_ms="30000")[0] == 200
    assert scored(slow) == before + 2, "the first one and the last one"


def test_scores_never_come_after_the_deadline(model: Path) -> None:
    """Not where the event loop itself scores, either."""

    class Late(Service):
        def answers(self, requests: Sequence[Any]) -> list[Answer | RequestError]:
            time.sleep(0.5)
            return super().answers(requests)

    server = Server(App(Late([ModelSpec(name="ctr", path=model)])))
    assert server.ask("POST", "/score", BODY, x_deadline_ms="400")[0] == 504
    assert server.ask("POST", "/score", BODY, x_deadline_ms="30000")[0] == 200
    server.close()


def scored(service: Service) -> float:
    name = "rayrec_rows_total{"
    return sum(float(line.split()[-1]) for line in service.metrics().decode().splitlines() if line.startswith(name))


@pytest.mark.parametrize("deadline", ["0", "-1", "soon", "inf", "nan"])
def test_a_deadline_is_a_number_of_milliseconds(server: Server, deadline: str) -> None:
    status, answer = server.ask("POST", "/score", BODY, x_deadline_ms=deadline)
    assert status == 400 and f"X-Deadline-Ms must be milliseconds above 0, not {deadline!r}" in answer["error"]
