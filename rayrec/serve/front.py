"""What every protocol passes through: clients, the queue, deadlines; then the batcher and the service behind it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayrec.serve.batching import Batcher
from rayrec.serve.clients import Clients
from rayrec.serve.errors import BadRequest
from rayrec.serve.requests import Query
from rayrec.serve.service import Service
from rayrec.serve.traffic import Answer, Target
from rayrec.serve.versions import Loaded

_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Front:
    """
    Args:
        clients: who may ask; default: everyone.
        together: requests that wait are scored together; False: each alone.
    """

    def __init__(self, service: Service, clients: Clients | None = None, together: bool = True) -> None:
        self.service, self.clients = service, clients or Clients()
        self._batcher = Batcher(service, together)
        self.queued = 0

    def check_queue(self) -> None:
        """
        Raises:
            BadRequest: 503, too many requests wait.
        """
        if self.queued >= self.service.limits.queue:
            raise BadRequest(503, f"{self.queued} requests wait already: ask again after a second, or another replica")

    async def score(self, read: Callable[[Loaded], Query], size: int, target: Target) -> Answer:
        """
        Args:
            read: makes the query.
            size: bytes that it reads.

        Raises:
            BadRequest: the request is wrong, in any way, or too many wait.
        """
        with self.place():
            return await self._batcher.score(await self._batcher.begin(read, size, target))

    @contextmanager
    def place(self) -> Iterator[None]:
        """One in the queue.

        Raises:
            BadRequest: 503, too many requests wait.
        """
        self.check_queue()
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1


def request_id(given: str) -> str:
    """The id that a client gave, where it is short and printable; else a new one."""
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
