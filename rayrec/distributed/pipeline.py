"""Copies the next batches and exchanges their ids while the model trains on the current batch."""

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
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

T = TypeVar("T")


def sparse_features(batch: Any) -> KeyedJaggedTensor:
    """The `sparse` or `sparse_features` of a batch, its first field that is a KeyedJaggedTensor, or the batch itself.

    Raises:
        ValueError: the batch has no KeyedJaggedTensor.
    """
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    fields = batch if isinstance(batch, tuple | list) else getattr(batch, "__dict__", {}).values()
    kjt = next((field for field in (batch, *fields) if isinstance(field, KeyedJaggedTensor)), None)
    if kjt is None:
        raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor; set TrainPipeline(features=…)")
    return kjt


@dataclass(frozen=True)
class _Started(Generic[T]):
    """A batch on the model's device (after the event `copied`), and the exchange of its ids by collection."""

    batch: T
    copied: torch.cuda.Event | None
    ids: dict[str, PendingInput]


class TrainPipeline(Generic[T]):
    """Yields batches while the next batches are copied and their ids exchanged.

        for batch in TrainPipeline(model).ahead(batches):
            loss, _ = model(batch)
            ...

    Results equal those of a plain loop, since ids do not depend on weights. On a GPU, while batch i computes, the ids
    of batch i+1 are exchanged on a separate stream, and batch i+2 is copied on another stream and routed on the host.
    Copies overlap if their memory is pinned. On a CPU the ids of batch i+1 are exchanged while batch i computes.

    A collection recognizes its input by identity. If a collection is called with another object than the batch's
    features in the first step, it sends its ids when it is called, as without a pipeline. All ranks need the same
    number of batches.

    Args:
        model: may contain a DistributedModelParallel.
        device: the model's by default.
        features: returns the object that the model passes to its collections.
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
        parallel = next((module for module in modules if isinstance(module, DistributedModelParallel)), None)
        device = device or (parallel.device if parallel is not None else torch.device("cpu"))
        self._collections = parallel.sharded_modules() if parallel is not None else {}
        self._features = features
        self._move: Callable[[Any], T] = move or (lambda batch: batch.to(device, non_blocking=True))
        self._device = device
        self._copies, self._ids = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        # Paths of the collections to send ids for: all except collections that ignored the ids in their first step.
        self._active = set(self._collections)
        self._consumers: set[str] = set()

    def ahead(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches. An error in preparing a batch is raised when its turn comes."""
        source = iter(batches)
        started: deque[_Started[T] | Exception] = deque()
        sent: deque[_Started[T] | Exception] = deque()

        def start_next() -> None:
            try:
                started.extend(self._start(batch) for batch in islice(source, 1))
            except Exception as error:  # raised when the batch's turn comes
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
                        start_next()  # after sending the ids, which are needed earlier

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
                del item  # the batch's memory is free before the next but one is copied
        finally:
            for collection in self._collections.values():
                collection.ids_ahead.clear()

    def _drop_untaken(self, item: _Started[T]) -> None:
        untaken = {path for path, ids in item.ids.items() if self._collections[path].ids_ahead.drop(ids)}
        self._consumers |= item.ids.keys() - untaken
        self._active -= untaken - self._consumers

    def _start(self, batch: T) -> _Started[T]:
        with self._on(self._copies):
            moved = self._move(batch)
            copied = None if self._copies is None else self._copies.record_event()
            ids = {
                path: collection.ids_ahead.begin(self._features(moved))
                for path, collection in self._collections.items()
                if path in self._active
            }
        return _Started(moved, copied, ids)

    def _send(self, item: _Started[T]) -> None:
        if self._ids is not None:
            with self._on(self._ids):
                for ids in item.ids.values():
                    ids.send()

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Makes `stream` current. It first waits for the model's stream, which may still read memory that `stream`
        allocated and is about to reuse."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
