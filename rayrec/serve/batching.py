"""Requests that wait are scored together; nobody waits for others to come, and one that is alone is scored at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from rayrec.serve.errors import BadRequest
from rayrec.serve.service import Answer, ScoreRequest, Service

_QUIET_PASSES = 8  # of the event loop without a new request: as many as one takes from its socket to here, on Serve


class Batcher:
    """Stands between an event loop and a service.

    The loop scores, so that requests which arrive meanwhile wait in their sockets. Afterwards it reads all of them, and
    those of one model and form are scored as one batch, up to the size and the time that `Pace` allows.

    Args:
        together: False scores every request alone.
    """

    def __init__(self, service: Service, together: bool = True) -> None:
        self._service, self._together = service, together
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[Answer]]] = deque()
        self._looks = False

    async def score(self, request: ScoreRequest) -> Answer:
        """
        Raises:
            BadRequest: the request is wrong, in any way.
        """
        if not self._together:
            return _or_raise(self._service.answers([request])[0])
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        if not self._looks:
            self._looks = True
            loop.call_soon(self._look, loop, len(self._waiting), _QUIET_PASSES)
        return await answer

    def _look(self, loop: asyncio.AbstractEventLoop, seen: int, passes: int) -> None:
        """Lets the loop read what has arrived already, then scores."""
        if passes:
            now = len(self._waiting)
            loop.call_soon(self._look, loop, now, passes - 1 if now == seen else _QUIET_PASSES)
            return
        self._looks = False
        group = self._take()
        try:
            answers: Sequence[Answer | BadRequest] = self._service.answers([request for request, _ in group])
        except Exception as error:  # nobody may wait for ever, whatever went wrong
            for _, future in group:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), answer in zip(group, answers, strict=True):
                if future.done():  # its client has gone
                    continue
                if isinstance(answer, BadRequest):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        if self._waiting:
            self._looks = True
            loop.call_soon(self._look, loop, len(self._waiting), _QUIET_PASSES)

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
