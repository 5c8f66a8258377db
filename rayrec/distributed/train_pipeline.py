"""The next batches are on their way before this one is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.sharding.input_dist import PendingInput
from rayrec.sparse import KeyedJaggedTensor

S = TypeVar("S")
T = TypeVar("T")


def sparse_features(batch: Any) -> KeyedJaggedTensor:
    """A batch's `sparse` or `sparse_features`, or the batch itself."""
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    return batch


@dataclass(frozen=True)
class _Started(Generic[T]):
    """A batch on the model's device, when `copied` has happened, and its collections' ids on their way."""

    batch: T
    copied: torch.cuda.Event | None
    ids: dict[str, PendingInput[Any]]


class TrainPipeline(Generic[T]):
    """Trains, or hands out batches, while the next ones are on their way.

        pipeline = TrainPipeline(model, optimizer, device)
        while True:
            output = pipeline.progress(batches)  # an iterator; StopIteration at its end

        for batch in TrainPipeline(model).ahead(batches):
            loss, _ = model(batch)
            ...

    Every step computes what it computes without it, since ids do not depend on weights. On a GPU, while batch i
    computes, the ids of batch i+1 are exchanged on a stream of their own, and batch i+2 is copied and routed on the
    host; copies overlap if their memory is pinned. On a CPU the ids of batch i+1 are on their way.

    A collection knows its input by being the same object: a model that calls one with anything but the batch's own
    features (which the first step shows) sends these ids when it calls, as without a pipeline. All ranks need equally
    many batches.

    Args:
        model: whose collections the batches are for; for `progress` it returns a loss and an output.
        optimizer: of what is not trained inside backward; for `progress`.
        device: the model's, by default.
        features: what a batch's collections are called with.
        move: the batch on the model's device; by default `batch.to(device, non_blocking=True)`.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        *,
        features: Callable[[T], KeyedJaggedTensor] = sparse_features,
        move: Callable[[T], T] | None = None,
    ) -> None:
        device = device or model.device
        self._model, self._optimizer = model, optimizer
        self._collections = model.sharded_modules()
        self._features = features
        self._move: Callable[[Any], T] = move or (lambda batch: batch.to(device, non_blocking=True))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._taking = set(self._collections)  # those that take what was begun for them
        self._source: Iterator[T] | None = None
        self._ready: Iterator[T] = iter(())

    def progress(self, batches: Iterator[T]) -> Any:
        """Trains on the next batch, or looks it up if the model is in evaluation; returns the model's output.

        Raises:
            StopIteration: there is none left.
        """
        if batches is not self._source:
            self._source, self._ready = batches, self.ahead(batches)
        batch = next(self._ready)
        if self._model.training and self._optimizer is not None:
            self._optimizer.zero_grad()
        loss, output = self._model(batch)
        if self._model.training:
            loss.sum().backward()
            if self._optimizer is not None:
                self._optimizer.step()
        return output

    def ahead(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches. An error on the way to the next one, or in it, is raised in its turn, after this one."""
        started = map(self._start, batches) if self._stream is None else _one_ahead(batches, self._start)
        try:
            for item in _one_ahead(started, self._send):
                if item.copied is not None:
                    torch.cuda.current_stream().wait_event(item.copied)
                yield item.batch
                taken = self._collections
                self._taking -= {path for path, each in item.ids.items() if taken[path].ids_ahead.drop(each)}
        finally:
            for collection in self._collections.values():
                collection.ids_ahead.clear()

    def _start(self, batch: T) -> _Started[T]:
        if self._stream is None:
            moved, copied = self._move(batch), None
        else:
            # memory that earlier copies gave back may still be read by what the model has under way
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                moved, copied = self._move(batch), self._stream.record_event()
        ids = {
            path: collection.ids_ahead.begin(self._features(moved))
            for path, collection in self._collections.items()
            if path in self._taking
        }
        return _Started(moved, copied, ids)

    def _send(self, item: _Started[T]) -> _Started[T]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                for ids in item.ids.values():
                    ids.send()
        return item


def _one_ahead(items: Iterable[S], begin: Callable[[S], T]) -> Iterator[T]:
    """What `begin` makes of each item, handed out when it has been called for the next one too."""
    source = iter(items)
    held: list[T] = []
    while True:
        try:
            begun = [begin(item) for item in islice(source, 1)]
        except Exception:
            yield from held
            raise
        yield from held
        if not begun:
            return
        held = begun


def __getattr__(name: str) -> Any:
    """The pipelines with `progress`, under the path where TorchRec's users look for them."""
    from rayrec.distributed import progress_pipelines

    return getattr(progress_pipelines, name)
