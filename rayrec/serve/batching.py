"""What every protocol passes through: clients, the queue, and the batches behind it.

Requests that wait are scored together; nobody waits for others to come, and one that is alone is scored at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from rayrec.serve.clients import Clients
from rayrec.serve.errors import RequestError
from rayrec.serve.requests import Query
from rayrec.serve.service import Answer, ScoreRequest, Service, Target
from rayrec.serve.versions import DEADLINE_S, Loaded

_QUIET_PASSES = 8  # of the event loop without a new request: as many as one takes from its socket to here, on Serve
_LARGE_BYTES = 256 << 10  # a body that takes milliseconds to read


class Batcher:
    """Stands between an event loop and a service.

    The loop scores what is expected to take no longer than `DEADLINE_S`; requests that arrive meanwhile wait in their
    sockets. Afterwards it reads all of them, and those of one model and form are scored as one batch, up to the size
    and the time that `Pace` allows. What is expected to take longer is scored in a thread, and the loop goes on.

    Args:
        clients: who may ask; default: everyone.
        together: False scores every request alone.
    """

    def __init__(self, service: Service, clients: Clients | None = None, together: bool = True) -> None:
        self.service, self.clients, self._together = service, clients or Clients(), together
        self.queued = 0
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[Answer]]] = deque()
        self._working: asyncio.Task[None] | None = None
        cores = torch.get_num_threads()  # a thread of its own begins with another number
        self._thread = ThreadPoolExecutor(1, "rayrec-score", initializer=torch.set_num_threads, initargs=(cores,))

    def check_queue(self) -> None:
        """
        Raises:
            RequestError: 503, too many requests wait.
        """
        if self.queued >= self.service.limits.queue:
            raise RequestError(503, f"queue full ({self.queued} requests): retry after 1 s")

    @contextmanager
    def place(self) -> Iterator[None]:
        """One in the queue.

        Raises:
            RequestError: 503, too many requests wait.
        """
        self.check_queue()
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    async def score(self, read: Callable[[Loaded], Query], size: int, target: Target) -> Answer:
        """
        Args:
            read: makes the query.
            size: bytes that it reads; many, which take long, are read by the thread.

        Raises:
            RequestError: the request is wrong, in any way, or too many wait.
        """
        with self.place():
            loop = asyncio.get_running_loop()
            if size < _LARGE_BYTES:
                request = self.service.begin(read, target)
            else:
                request = await loop.run_in_executor(self._thread, self.service.begin, read, target)
            return await self.scored(request)

    async def scored(self, request: ScoreRequest) -> Answer:
        """
        Raises:
            RequestError: what was read cannot be scored.
        """
        if not self._together:
            (alone,) = await self._answers([request])
            if isinstance(alone, RequestError):
                raise alone
            return alone
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        if self._working is None:
            self._working = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Scores until nobody waits."""
        while self._waiting:
            await self._look()
            group = self._take()
            try:
                answers: Sequence[Answer | Exception] = await self._answers([request for request, _ in group])
            except Exception as error:  # nobody may wait for ever, whatever went wrong
                answers = [error] * len(group)
            for (_, future), answer in zip(group, answers, strict=True):
                if future.done():  # its client has gone, or its deadline passed
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._working = None

    async def _look(self) -> None:
        """Lets the loop read what has arrived already."""
        seen, quiet = len(self._waiting), 0
        while quiet < _QUIET_PASSES:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    async def _answers(self, requests: Sequence[ScoreRequest]) -> Sequence[Answer | RequestError]:
        rows = sum(request.query.size for request in requests)
        if not requests or requests[0].loaded.pace.seconds(rows) <= DEADLINE_S:
            return self.service.answers(requests)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.service.answers, requests)

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
