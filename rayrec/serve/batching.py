"""Requests that wait are scored together; nobody waits for others to come, and one that is alone is scored at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from rayrec.serve.errors import BadRequest
from rayrec.serve.service import Answer, ScoreRequest, Service

_QUIET_PASSES = 8  # of the event loop without a new request: as many as one takes from its socket to here, on Serve
_LARGE_BYTES = 256 << 10  # a body that takes milliseconds to read


class Batcher:
    """Stands between an event loop and a service.

    One thread scores, a batch at a time; the loop goes on reading requests. Those of one model and form that wait when
    the thread is free are scored as one batch, up to the size and the time that `Pace` allows.

    Args:
        together: False scores every request alone.
    """

    def __init__(self, service: Service, together: bool = True) -> None:
        self._service, self._together = service, together
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[Answer]]] = deque()
        self._busy = False  # a look or a batch is on its way
        cores = torch.get_num_threads()  # a thread of its own begins with another number
        self._thread = ThreadPoolExecutor(1, "rayrec-score", initializer=torch.set_num_threads, initargs=(cores,))

    async def read(self, body: bytes, content_type: str, model: str | None) -> ScoreRequest:
        """As `Service.read`; a body that takes long is read in the thread.

        Raises:
            BadRequest: as there.
        """
        if len(body) < _LARGE_BYTES:
            return self._service.read(body, content_type, model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._service.read, body, content_type, model)

    async def score(self, request: ScoreRequest) -> Answer:
        """
        Raises:
            BadRequest: the request is wrong, in any way.
        """
        loop = asyncio.get_running_loop()
        if not self._together:
            return _or_raise((await loop.run_in_executor(self._thread, self._service.answers, [request]))[0])
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        if not self._busy:
            self._look_soon(loop)
        return await answer

    def _look_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = True
        loop.call_soon(self._look, loop, len(self._waiting), _QUIET_PASSES)

    def _look(self, loop: asyncio.AbstractEventLoop, seen: int, passes: int) -> None:
        """Lets the loop read what has arrived already, then has the thread score."""
        if passes:
            now = len(self._waiting)
            loop.call_soon(self._look, loop, now, passes - 1 if now == seen else _QUIET_PASSES)
            return
        group = self._take()
        scored = loop.run_in_executor(self._thread, self._service.answers, [request for request, _ in group])
        scored.add_done_callback(partial(self._answer, loop, [future for _, future in group]))

    def _answer(
        self,
        loop: asyncio.AbstractEventLoop,
        futures: Sequence[asyncio.Future[Answer]],
        scored: asyncio.Future[list[Answer | BadRequest]],
    ) -> None:
        error = scored.exception()  # nobody may wait for ever, whatever went wrong
        answers = scored.result() if error is None else [error] * len(futures)
        for future, answer in zip(futures, answers, strict=True):
            if future.done():  # its client has gone, or its deadline passed
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        if self._waiting:
            self._look_soon(loop)
        else:
            self._busy = False

    def _take(self) -> list[tuple[ScoreRequest, asyncio.Future[Answer]]]:
        """The first that waits, and those that can be scored with it; whose client has gone is left out."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if not self._waiting:
            return []
        first = self._waiting[0][0]
        rows, most = 0, first.loaded.pace.most_rows()
        group, others = [], deque[tuple[ScoreRequest, asyncio.Future[Answer]]]()
        for request, future in self._waiting:
            alike = request.loaded is first.loaded and request.query.form == first.query.form is not None
            if request is first or (alike and rows + request.query.size <= most and not future.done()):
                rows += request.query.size
                group.append((request, future))
            else:
                others.append((request, future))
        self._waiting = others
        return group


def _or_raise(answer: Answer | BadRequest) -> Answer:
    if isinstance(answer, BadRequest):
        raise answer
    return answer
