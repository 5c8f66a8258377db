"""Work behind the answers, as of versions that answer nobody: a request neither waits nor fails because of it."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import numpy as np

from rayrec.serve.measures import Measures
from rayrec.serve.traffic import Answer, ScoreRequest, place_of
from rayrec.serve.versions import Versions

T = TypeVar("T")
_QUEUE = 64  # items that may wait
_logger = logging.getLogger(__name__)
_Item = tuple[ScoreRequest, Answer, Versions]


class Behind(Generic[T]):
    """A thread of the lowest priority, and a short queue.

    Args:
        work: is called with each item, and with None at the end and whenever none came for a second.
    """

    def __init__(self, name: str, work: Callable[[T | None], None]) -> None:
        self._work, self._items, self._closing = work, queue.Queue[T](_QUEUE), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rayrec-{name}", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> bool:
        """False where the queue is full: the item is dropped."""
        with suppress(queue.Full):
            self._items.put_nowait(item)
            return True
        return False

    def close(self) -> None:
        """Does what waits, and ends."""
        self._closing.set()
        self._thread.join(30)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        ended = False
        while not ended:
            item: T | None = None
            try:
                item = self._items.get(timeout=0.01 if self._closing.is_set() else 1.0)
            except queue.Empty:
                ended = self._closing.is_set()
            try:
                self._work(item)
            except Exception as error:  # the next item may be a better one
                _logger.warning("%s failed", threading.current_thread().name, exc_info=error)


class Shadows:
    """
    Args:
        shadows: by model: (share of the requests, version).
    """

    def __init__(self, shadows: Mapping[str, Sequence[tuple[float, Versions]]], measures: Measures) -> None:
        self._shadows, self._measures = shadows, measures
        self._behind = Behind[_Item]("shadow", lambda item: None if item is None else self._score(*item))

    def offer(self, requests: Sequence[ScoreRequest], answers: Sequence[Answer]) -> None:
        """What does not fit the queue is not scored, and counted."""
        for request, answer in zip(requests, answers, strict=True):
            for share, versions in self._shadows.get(request.name, ()):
                if place_of(f"shadow {request.id}") < share and not self._behind.offer((request, answer, versions)):
                    self._measures.shadow(request.name, versions.active.version, "dropped")

    def close(self) -> None:
        """Scores what waits, and ends."""
        self._behind.close()

    def _score(self, request: ScoreRequest, answer: Answer, versions: Versions) -> None:
        loaded = versions.active
        try:
            batch, context = loaded.reader.batch([request.query])
            outputs = loaded.model.outputs(batch, context)
        except Exception as error:  # another schema may refuse what the answering version takes
            _logger.warning("shadow %s, request %s: %s", loaded.version, request.id, type(error).__name__)
            self._measures.shadow(request.name, loaded.version, "failed")
            return
        differences = [
            float(np.abs(outputs[label] - values).max()) for label, values in answer.scores.items() if label in outputs
        ]
        self._measures.shadow(request.name, loaded.version, "scored", max(differences, default=0.0))
