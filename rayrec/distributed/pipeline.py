"""The next batches are on their way before this one is trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed.ids.input_dist import PendingInput
from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.sparse import KeyedJaggedTensor

S = TypeVar("S")
T = TypeVar("T")
Forward = Callable[[Any], tuple[torch.Tensor, Any]]


def sparse_features(batch: Any) -> KeyedJaggedTensor:
    """A batch's `sparse` or `sparse_features`, its first field that is a KeyedJaggedTensor, or the batch itself.

    Raises:
        ValueError: it has none.
    """
    for name in ("sparse", "sparse_features"):
        if hasattr(batch, name):
            return getattr(batch, name)
    fields = batch if isinstance(batch, tuple | list) else getattr(batch, "__dict__", {}).values()
    found = next((field for field in (batch, *fields) if isinstance(field, KeyedJaggedTensor)), None)
    if found is None:
        raise ValueError(f"{type(batch).__name__} has no KeyedJaggedTensor; say which by TrainPipeline(features=…)")
    return found


@dataclass(frozen=True)
class _Started(Generic[T]):
    """A batch on the model's device, when `copied` has happened, and its collections' ids on their way."""

    batch: T
    copied: torch.cuda.Event | None
    ids: dict[str, PendingInput[Any]]


class _Feed(Generic[T]):
    """The batches of an iterator that may be changed for another one, the last `held` of them kept back for it."""

    def __init__(self, held: int = 0) -> None:
        self.source: Iterator[T] = iter(())
        self._held = held
        self._waiting: deque[T] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while len(self._waiting) <= self._held:
            self._waiting.append(next(self.source))
        return self._waiting.popleft()


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
        model: with a DistributedModelParallel in it, or without; for `progress` it returns losses and an output.
        optimizer: of what is not trained inside backward; for `progress`.
        device: the model's, by default.
        features: what a batch's collections are called with.
        move: the batch on the model's device; by default `batch.to(device, non_blocking=True)`.
        forward: called with the batch in place of the model.
        send_ahead: sends the next batch's ids ahead; else its copy alone is ahead.
        held_back: so many batches at an iterator's end wait for another iterator.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        *,
        features: Callable[[T], KeyedJaggedTensor] = sparse_features,
        move: Callable[[T], T] | None = None,
        forward: Forward | None = None,
        send_ahead: bool = True,
        held_back: int = 0,
    ) -> None:
        modules = [] if model is None else model.modules()
        parallel = next((each for each in modules if isinstance(each, DistributedModelParallel)), None)
        device = device or (parallel.device if parallel is not None else torch.device("cpu"))
        self._model: Any = model
        self._optimizer = optimizer
        self._forward: Any = self._model if forward is None else forward
        self._collections = parallel.sharded_modules() if parallel is not None and send_ahead else {}
        self._features = features
        self._move: Callable[[Any], T] = move or (lambda batch: batch.to(device, non_blocking=True))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._taking = set(self._collections)  # those that take what was begun for them
        self._feed: _Feed[T] = _Feed(held_back)
        self._ready: Iterator[T] | None = None

    def progress(self, batches: Iterator[T]) -> Any:
        """Trains on the next batch, or looks it up if the model is in evaluation; returns the model's output.

        Of another iterator than the last time, batches are taken when the next one is due; those that were taken of
        the last one before are trained on first.

        Raises:
            StopIteration: there is none left.
        """
        batch = self._next(batches)
        training = self._model.training
        if training and self._optimizer is not None:
            self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        if training:
            losses.sum().backward()
            if self._optimizer is not None:
                self._optimizer.step()
        return output

    def _next(self, batches: Iterator[T]) -> T:
        self._feed.source = batches
        if self._ready is None:
            self._ready = self.ahead(self._feed)
        try:
            return next(self._ready)
        except BaseException:
            self._ready = None  # the iterator is through, or failed; another one may follow
            raise

    def reset(self) -> None:
        """Forgets the iterator, and what was taken from it ahead."""
        self._feed, self._ready = _Feed(self._feed._held), None

    def sync_embeddings(self, *_: Any) -> None:
        """Ranks are in step at every step."""

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
