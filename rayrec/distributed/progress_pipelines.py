"""Training loops that are driven by `progress(iterator)`, one batch a call, over rayrec's `TrainPipeline`.

The model returns (losses, output). Nothing is traced, and no forward is overwritten: ids of the next batch's features
are sent while this one is trained on, if the model's collections are called with the batch's own KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rayrec.distributed.model_parallel import DistributedModelParallel
from rayrec.distributed.train_pipeline import TrainPipeline
from rayrec.sparse import KeyedJaggedTensor

Forward = Callable[[Any], tuple[torch.Tensor, Any]]


class TrainPipelineBase:
    """One batch after the other: moved to the device, trained on if the model is in training mode.

    Args:
        model: takes a batch; returns (losses, output).
        optimizer: of what is not trained inside backward.
        device: where batches are moved.
        custom_model_fwd: called with the batch instead of the model.
        enable_inplace_copy_batch: taken and not needed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._forward: Forward = custom_model_fwd or model
        self._source: Iterator[Any] | None = None
        self._batches: Iterator[Any] = iter(())

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Trains on the next batch; returns the model's output.

        Raises:
            StopIteration: there is none.
        """
        if dataloader_iter is not self._source:
            self._source, self._batches = dataloader_iter, self._moved(dataloader_iter)
        batch = next(self._batches)
        if not self._model.training:
            return self._evaluated(batch)
        self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        torch.sum(losses, dim=0).backward()
        self._optimizer.step()
        return output

    def _evaluated(self, batch: Any) -> Any:
        return self._forward(batch)[1]

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch.to(self._device, non_blocking=True)

    def reset(self) -> None:
        """Forgets the iterator, and what was taken from it ahead."""
        self._source, self._batches = None, iter(())

    def sync_embeddings(self, *_: Any) -> None:
        """Ranks are in step at every step."""


class TrainPipelineSparseDist(TrainPipelineBase):
    """`TrainPipelineBase` with the next batch's ids on their way while this one is trained on.

    Args:
        model: DistributedModelParallel, or a module that holds one.
        optimizer, device, custom_model_fwd: as there.
        execute_all_batches: must be True: every batch is trained on.
        The others: taken and not needed.

    Raises:
        ValueError: `execute_all_batches=False`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd)
        if not execute_all_batches:
            raise ValueError(
                "execute_all_batches=False would leave the last batches untrained; end the iterator instead"
            )
        found = [module for module in model.modules() if isinstance(module, DistributedModelParallel)]
        self._sharded = found[0] if found else None

    def _moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._sharded is None:
            return super()._moved(batches)
        move = lambda batch: batch.to(self._device, non_blocking=True)  # noqa: E731
        return TrainPipeline(self._sharded, features=sparse_features_of, move=move).ahead(batches)

    def attach(self, model: nn.Module | None = None) -> None:
        """Nothing was taken off the model."""

    def detach(self) -> nn.Module:
        """The model, which is as it was given."""
        return self._model

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """The first `progress` does."""


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`: rows of tables behind a device cache are fetched when they are looked up."""


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` without training, whatever the model's mode."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """The model's output for the next batch.

        Raises:
            StopIteration: there is none.
        """
        if dataloader_iter is not self._source:
            self._source, self._batches = dataloader_iter, self._moved(dataloader_iter)
        batch = next(self._batches)
        with torch.no_grad() if not self._model.training else nullcontext():
            return self._evaluated(batch)


def sparse_features_of(batch: Any) -> KeyedJaggedTensor:
    """The KeyedJaggedTensor of a batch: itself, or its first field of that type.

    Raises:
        ValueError: it has none.
    """
    fields = [batch, *(batch if isinstance(batch, tuple | list) else vars(batch).values())]
    found = next((field for field in fields if isinstance(field, KeyedJaggedTensor)), None)
    if found is None:
        raise ValueError(f"{type(batch).__name__} has no field of type KeyedJaggedTensor")
    return found
