"""The next batch's copy and id exchange begin before this batch is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.sharding.ahead import Begun
from rayrec.sparse import KeyedJaggedTensor

S = TypeVar("S")
T = TypeVar("T")
Copied = tuple[T, "torch.cuda.Event | None"]


class TrainPipeline(Generic[T]):
    """Hands out batches in order, on the model's device, each when the ids of the next one are on their way.

        for batch in TrainPipeline(model).ahead(batches):
            loss, _ = model(batch)
            ...

    Every step computes what it computes without it, since ids do not depend on weights. A collection knows its input by
    being the same object: a model that calls one with anything but the batch's own features (which the first step
    shows) sends these ids when it calls, as without a pipeline. All ranks need equally many batches.

    On a GPU the copy runs one batch further ahead, on a stream of its own; it overlaps if the memory is pinned.

    Args:
        model: whose collections the batches are for.
        features: what a batch's collections are called with.
        move: the batch on the model's device; by default `batch.to(device, non_blocking=True)`.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        features: Callable[[T], KeyedJaggedTensor] = attrgetter("sparse"),
        move: Callable[[T], T] | None = None,
    ) -> None:
        device = model.device
        self._collections = model.sharded_modules()
        self._features = features
        self._move: Callable[[Any], T] = move or (lambda batch: batch.to(device, non_blocking=True))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._taking = set(self._collections)  # those that take what was begun for them

    def ahead(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches. An error on the way to the next one, or in it, is raised in its turn, after this one."""
        copied = map(self._copy, batches) if self._stream is None else _one_ahead(batches, self._copy)
        try:
            for batch, begun in _one_ahead(copied, self._begin):
                yield batch
                self._taking -= {path for path, each in begun.items() if self._collections[path].ids_ahead.drop(each)}
        finally:
            for collection in self._collections.values():
                collection.ids_ahead.clear()

    def _copy(self, batch: T) -> Copied[T]:
        if self._stream is None:
            return self._move(batch), None
        # memory that earlier copies gave back may still be read by what the model has under way
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return self._move(batch), self._stream.record_event()

    def _begin(self, copied: Copied[T]) -> tuple[T, dict[str, Begun[Any]]]:
        batch, event = copied
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return batch, {
            path: collection.ids_ahead.begin(self._features(batch), collection.input_dist)
            for path, collection in self._collections.items()
            if path in self._taking
        }


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
