"""`TrainPipeline`: rayrec's pipeline with TorchRec's `progress`, one batch per call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed import pipeline
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.pipeline import sparse_features
from rayrec.sparse import KeyedJaggedTensor

In = TypeVar("In")  # a batch
Out = TypeVar("Out")  # the model's output
Forward = Callable[[Any], tuple[torch.Tensor, Any]]


class _Feed(Generic[In]):
    """The batches of an iterator that may be replaced."""

    source: Iterator[In] = iter(())

    def __iter__(self) -> Iterator[In]:
        return self

    def __next__(self) -> In:
        return next(self.source)


class TrainPipeline(pipeline.TrainPipeline[In], Generic[In, Out]):
    """`rayrec.distributed.TrainPipeline` that trains step by step; `Out` is the model's output.

        pipeline = TrainPipeline(model, optimizer, device)
        while True:
            output = pipeline.progress(batches)  # an iterator; StopIteration at its end

    Args:
        model: may contain a DistributedModelParallel; returns losses and an output.
        optimizer: optimizer of the parameters that are not updated in the backward pass.
        device, features, move: see `rayrec.distributed.TrainPipeline`.
        forward: called with the batch instead of the model.
        send_ahead: send the ids of the next batch in advance; otherwise only copy the batch in advance.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        *,
        features: Callable[[In], KeyedJaggedTensor] = sparse_features,
        move: Callable[[In], In] | None = None,
        forward: Forward | None = None,
        send_ahead: bool = True,
    ) -> None:
        super().__init__(model, device=device, features=features, move=move)
        if not send_ahead:
            self._collections, self._active = {}, set()
        self._model: Any = model
        self._optimizer = optimizer
        self._forward: Any = self._model if forward is None else forward
        self._feed: _Feed[In] = _Feed()
        self._ready: Iterator[In] | None = None

    def progress(self, dataloader_iter: Iterator[In]) -> Any:
        """Trains on the next batch, or only runs forward if the model is in eval mode; returns the model's output.

        If you pass another iterator, the batches already read from the previous one come first.

        Raises:
            StopIteration: no batch is left.
        """
        batch = self._next(dataloader_iter)
        training = self._model.training
        if training and self._optimizer is not None:
            self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        if training:
            losses.sum().backward()
            if self._optimizer is not None:
                self._optimizer.step()
        return output

    def _next(self, batches: Iterator[In]) -> In:
        self._feed.source = batches
        if self._ready is None:
            self._ready = self.ahead(self._feed)
        try:
            return next(self._ready)
        except BaseException:
            self._ready = None  # the iterator has ended or failed; the caller may pass another one
            raise

    def reset(self) -> None:
        """Drops the iterator, and the batches read in advance."""
        self._feed, self._ready = _Feed(), None

    def sync_embeddings(self, model: nn.Module, interval_batches: int | None, context: Any = None) -> None:
        """Averages the replicas of a DMPCollection in every `interval_batches`-th batch, or always if `context` is
        None."""
        index = getattr(context, "index", 0)
        due = interval_batches and index is not None and index % interval_batches == 0
        if due and isinstance(model, DMPCollection):
            model.sync()
