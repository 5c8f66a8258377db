"""The queue of a replica, and the batches that its requests are scored in.

Requests that wait are scored in one batch. A request never waits for others to arrive; a single one is scored at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rayrec.serve.clients import Clients
from rayrec.serve.errors import RequestError
from rayrec.serve.requests import Query
from rayrec.serve.service import Answer, ScoreRequest, Service, Target
from rayrec.serve.versions import MAX_INLINE_S, Loaded

T = TypeVar("T")
# Passes of the event loop without a new request after which none is expected: on Ray Serve, a request takes as many
# passes from its socket to the queue.
_QUIET_PASSES = 8
_LARGE_BYTES = 256 << 10  # parsing a larger body takes milliseconds, so a thread does it


class Batcher:
    """Scores the requests of all protocols, in batches.

    The event loop itself scores batches with an expected duration of at most `MAX_INLINE_S`; requests that arrive
    meanwhile wait in their sockets. The loop then reads all of them and scores those with the same model and form as
    one batch, up to the size and duration that `Pace` allows. A thread scores longer batches, so that the loop stays
    responsive.

    Args:
        clients: Clients that may send requests; default: anyone.
        batching: False scores each request separately.
    """

    def __init__(self, service: Service, clients: Clients | None = None, batching: bool = True) -> None:
        self.service, self.clients, self._batching = service, clients or Clients(), batching
        self.queued = 0
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[Answer]]] = deque()
        self._task: asyncio.Task[None] | None = None
        cores = torch.get_num_threads()  # torch gives a new thread another number
        self._thread, self._threads = (
            ThreadPoolExecutor(count, name, initializer=torch.set_num_threads, initargs=(cores,))
            for count, name in ((1, "rayrec-score"), (None, "rayrec-retrieve"))
        )

    def check_queue(self) -> None:
        """
        Raises:
            RequestError: 503, the queue is full.
        """
        if self.queued >= self.service.limits.queue:
            raise RequestError(503, f"queue full ({self.queued} requests): retry after 1 s")

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Holds a slot of the queue.

        Raises:
            RequestError: 503, the queue is full.
        """
        self.check_queue()
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function in a thread of its own, with a slot of the queue until the thread has ended: a deadline ends
        the wait for it, and the call only if it has not begun.

        Raises:
            RequestError: 503, the queue is full.
        """
        loop = asyncio.get_running_loop()
        self.check_queue()
        self.queued += 1
        work = self._threads.submit(function, *args)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release))
        return await asyncio.wrap_future(work)

    def _release(self) -> None:
        self.queued -= 1

    async def score(self, read: Callable[[Loaded], Query], size: int, target: Target) -> Answer:
        """
        Args:
            read: Parses the request.
            size: Bytes to parse; a thread parses large requests.

        Raises:
            RequestError: The request is wrong, or the queue is full.
        """
        with self.slot():
            loop = asyncio.get_running_loop()
            if size < _LARGE_BYTES:
                request = self.service.begin(read, target)
            else:
                request = await loop.run_in_executor(self._thread, self.service.begin, read, target)
            return await self.scored(request)

    async def scored(self, request: ScoreRequest) -> Answer:
        """
        Raises:
            RequestError: The request cannot be scored.
        """
        if not self._batching:
            (answer,) = await self._answers([request])
            if isinstance(answer, Exception):
                raise answer
            return answer
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, future))
        if self._task is None:
            self._task = loop.create_task(self._score_waiting())
        return await future

    async def _score_waiting(self) -> None:
        while self._waiting:
            await self._read_arrived()
            batch = self._next_batch()
            try:
                answers: Sequence[Answer | Exception] = await self._answers([request for request, _ in batch])
            except Exception as error:  # whatever went wrong, every request must get an answer
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the client disconnected, or the deadline passed
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._task = None

    async def _read_arrived(self) -> None:
        """Lets the event loop read the requests that have already arrived."""
        count, quiet_passes = len(self._waiting), 0
        while quiet_passes < _QUIET_PASSES:
            await asyncio.sleep(0)
            quiet_passes = quiet_passes + 1 if len(self._waiting) == count else 0
            count = len(self._waiting)

    async def _answers(self, requests: Sequence[ScoreRequest]) -> Sequence[Answer | Exception]:
        rows = sum(request.query.size for request in requests)
        if not requests or requests[0].loaded.pace.seconds(rows) <= MAX_INLINE_S:
            return self.service.answers(requests)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.service.answers, requests)

    def _next_batch(self) -> list[tuple[ScoreRequest, asyncio.Future[Answer]]]:
        """Takes the first waiting request and all that can be scored with it; drops disconnected clients."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if not self._waiting:
            return []
        head = self._waiting[0][0]
        rows, max_rows = 0, head.loaded.pace.max_rows()
        batch, remaining = [], deque[tuple[ScoreRequest, asyncio.Future[Answer]]]()
        for request, future in self._waiting:
            same_form = request.loaded is head.loaded and request.query.form == head.query.form is not None
            if request is head or (same_form and rows + request.query.size <= max_rows and not future.done()):
                rows += request.query.size
                batch.append((request, future))
            else:
                remaining.append((request, future))
        self._waiting = remaining
        return batch
