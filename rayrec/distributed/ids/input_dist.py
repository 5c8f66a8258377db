"""A batch's way from the features to what this rank looks up: routed on the host, then sent, maybe ahead of its step.

On a CPU both happen where `start` is called. For a GPU a thread of the host routes, which includes that ranks tell each
other sizes; `send` then copies what was prepared to the device and starts the exchange of ids there. Nothing on this
way reads a number from the device, unless the features were made there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

import torch

from rayrec.distributed.comm.awaitable import Awaitable
from rayrec.distributed.ids.upload import Staged
from rayrec.sparse import KeyedJaggedTensor

Host = TypeVar("Host")
Routed = TypeVar("Routed")


class InputDist(Generic[Host, Routed]):
    """Starts batches on their way, and keeps those that were begun before `forward` asks for them. Features are known
    by being the same object. All ranks start, send, wait, take and drop in the same order.

    Args:
        device: where tables lie.
        route: what is to be sent, from features on the host; on a GPU it runs in a thread, batch after batch.
        send: sends what `route` gave, whose tensors are on the device then.
    """

    def __init__(
        self,
        device: torch.device,
        route: Callable[[KeyedJaggedTensor], Host],
        send: Callable[[Host], Awaitable[Routed]],
    ) -> None:
        self.device, self.route, self.send = device, route, send
        self._ahead: list[PendingInput[Routed]] = []

    def start(self, features: KeyedJaggedTensor) -> PendingInput[Routed]:
        """Begins a batch."""
        return PendingInput(self, features)

    def begin(self, features: KeyedJaggedTensor) -> PendingInput[Routed]:
        """Begins a batch that `take` will be asked for."""
        self._ahead.append(self.start(features))
        return self._ahead[-1]

    def take(self, features: KeyedJaggedTensor) -> PendingInput[Routed]:
        """What was begun for these features, each time once and the oldest first, or else begun now."""
        for pending in self._ahead:
            if pending.features is features and pending.trained == torch.is_grad_enabled():
                self._ahead.remove(pending)
                return pending
        return self.start(features)

    def drop(self, pending: PendingInput[Routed]) -> bool:
        """Forgets what was begun; whether nobody had taken it."""
        if pending not in self._ahead:
            return False
        self._ahead.remove(pending)
        return True

    def clear(self) -> None:
        """Forgets everything that was begun."""
        self._ahead = []


class PendingInput(Awaitable[Routed]):
    """A batch on its way. Gradients are enabled for it, or not, as they were when it was started."""

    def __init__(self, way: InputDist[Host, Routed], features: KeyedJaggedTensor) -> None:
        self.features, self.trained = features, torch.is_grad_enabled()
        self._device, self._send = way.device, way.send
        self._sent: Awaitable[Routed] | None = None
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None
        if self._device.type == "cpu":
            self._sent = way.send(way.route(features))
            return
        on_host = features.on_host()

        def route() -> Staged[Host]:
            with torch.set_grad_enabled(self.trained):
                return Staged(way.route(on_host))

        self._routed: Future[Staged[Host]] = _router().submit(route)

    def send(self) -> None:
        """Sends what is routed, once, on the current stream; an error is kept for `wait`."""
        if self._sent is not None or self._error is not None:
            return
        try:
            with torch.set_grad_enabled(self.trained):
                self._sent = self._send(self._routed.result().to(self._device))
            self._event = torch.cuda.current_stream(self._device).record_event()
        except Exception as error:
            self._error = error

    def _wait_impl(self) -> Routed:
        self.send()
        if self._error is not None:
            raise self._error
        assert self._sent is not None
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        with torch.set_grad_enabled(self.trained):
            return self._sent.wait()


@cache
def _router() -> ThreadPoolExecutor:
    """One thread a process: batches of all collections are routed in the order in which they were started."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rayrec-router")
