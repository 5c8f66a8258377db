"""Copies the next batches and exchanges their ids while the model trains on this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed.ids.input_dist import PendingInput
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.sparse import KeyedJaggedTensor

T = TypeVar("T")


def sparse_features(batch: Any) -> KeyedJaggedTensor:
    """A batch's `sparse` or `sparse_features`, its first field that is a KeyedJaggedTensor, or the batch itself.

    Raises:
        ValueError: the batch has no KeyedJaggedTensor.
    """
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    fields = batch if isinstance(batch, tuple | list) else getattr(batch, "__dict__", {}).values()
    found = next((field for field in (batch, *fields) if isinstance(field, KeyedJaggedTensor)), None)
    if found is None:
        raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor; give TrainPipeline(features=…)")
    return found


@dataclass(frozen=True)
class _Started(Generic[T]):
    """A batch on the model's device (after the event `copied`), and what its collections have begun with its ids."""

    batch: T
    copied: torch.cuda.Event | None
    ids: dict[str, PendingInput]


class TrainPipeline(Generic[T]):
    """Yields batches, with the next ones under way.

        for batch in TrainPipeline(model).ahead(batches):
            loss, _ = model(batch)
            ...

    Results are those of a plain loop, since ids do not depend on weights. On a GPU, while batch i computes, the ids of
    batch i+1 are exchanged on a stream of their own, and batch i+2 is copied on another and routed on the host; copies
    overlap if their memory is pinned. On a CPU the ids of batch i+1 are under way.

    A collection recognizes its input by identity. One that is called with another object than the batch's features in
    the first step sends its ids when it is called, as without a pipeline. All ranks need equally many batches.

    Args:
        model: may contain a DistributedModelParallel.
        device: the model's by default.
        features: returns the object that the model calls its collections with.
        move: returns the batch on the model's device; by default `batch.to(device, non_blocking=True)`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        device: torch.device | None = None,
        features: Callable[[T], KeyedJaggedTensor] = sparse_features,
        move: Callable[[T], T] | None = None,
    ) -> None:
        modules = [] if model is None else model.modules()
        parallel = next((each for each in modules if isinstance(each, DistributedModelParallel)), None)
        device = device or (parallel.device if parallel is not None else torch.device("cpu"))
        self._collections = parallel.sharded_modules() if parallel is not None else {}
        self._features = features
        self._move: Callable[[Any], T] = move or (lambda batch: batch.to(device, non_blocking=True))
        self._device = device
        self._copies, self._ids = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._begun_for = set(self._collections)  # without those that took nothing in their first step
        self._have_taken: set[str] = set()

    def ahead(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches. An error in preparing a batch is raised when it is due, after the batches before it."""
        source = iter(batches)
        started: deque[_Started[T] | Exception] = deque()
        sent: deque[_Started[T] | Exception] = deque()

        def start_next() -> None:
            try:
                started.extend(self._start(batch) for batch in islice(source, 1))
            except Exception as error:  # raised when this batch is due
                started.append(error)

        def send_next() -> None:
            if sent and isinstance(sent[-1], Exception):
                return
            if not started:
                start_next()
            if started:
                sent.append(started.popleft())
                if not isinstance(item := sent[-1], Exception):
                    self._send(item)
                    if self._copies is not None:
                        start_next()  # after the ids are sent, which are needed first

        try:
            send_next()
            while sent:
                send_next()
                item = sent.popleft()
                if isinstance(item, Exception):
                    raise item
                if item.copied is not None:
                    torch.cuda.current_stream(self._device).wait_event(item.copied)
                yield item.batch
                self._drop_untaken(item)
        finally:
            for collection in self._collections.values():
                collection.ids_ahead.clear()

    def _drop_untaken(self, item: _Started[T]) -> None:
        untaken = {path for path, ids in item.ids.items() if self._collections[path].ids_ahead.drop(ids)}
        self._have_taken |= item.ids.keys() - untaken
        self._begun_for -= untaken - self._have_taken

    def _start(self, batch: T) -> _Started[T]:
        with self._on(self._copies):
            moved = self._move(batch)
            copied = None if self._copies is None else self._copies.record_event()
            ids = {
                path: collection.ids_ahead.begin(self._features(moved))
                for path, collection in self._collections.items()
                if path in self._begun_for
            }
        return _Started(moved, copied, ids)

    def _send(self, item: _Started[T]) -> None:
        if self._ids is not None:
            with self._on(self._ids):
                for ids in item.ids.values():
                    ids.send()

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Inside, `stream` is current. It waits for the model's stream, which may still read memory that `stream` gave
        to it earlier and gets back."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
