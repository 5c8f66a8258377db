"""TorchRec's pipelines with its arguments, subclasses of `rayrec.distributed.TrainPipeline`.

The model returns (losses, output). rayrec does not trace the model or replace its forward: it sends the ids of the next
batch during the current step if the model calls its collections with the KeyedJaggedTensor of the batch. Arguments
without a description control tracing, copies and memory in TorchRec and are ignored here; they do not affect results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rayrec.torchrec.distributed.train_pipeline.base import TrainPipelineBase
from rayrec.torchrec.distributed.train_pipeline.compiled import TorchCompileConfig, TrainPipelinePT2
from rayrec.torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext, check_context
from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
)
from rayrec.torchrec.distributed.train_pipeline.progress import Forward, In, Out, TrainPipeline
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TorchCompileConfig",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelineSparseDistLite",
]

# TorchRec reads this many batches in advance; without execute_all_batches it does not train on them at the end.
IN_FLIGHT = 2


class _HeldBack:
    """The batches of an iterator that may be replaced; the last two wait for the next iterator."""

    def __init__(self) -> None:
        self.source: Iterator[Any] = iter(())
        self._waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while len(self._waiting) <= IN_FLIGHT:
            self._waiting.append(next(self.source))
        return self._waiting.popleft()


class TrainPipelineSparseDist(TrainPipeline[In, Out]):
    """Sends the ids of the next batch during the current step.

    Args:
        model: DistributedModelParallel, or a module that contains one.
        optimizer, device, custom_model_fwd: see `TrainPipelineBase`.
        execute_all_batches: False keeps the last two batches of an iterator until another iterator follows.
        context_type: must be `TrainPipelineContext`.
        dmp_collection_sync_interval_batches: steps between two averages over the replicas of a DMPCollection, starting
            with the first step; None: only when you call its `sync`.

    Raises:
        ValueError: a custom context type.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        check_context(context_type)
        super().__init__(model, optimizer, device, forward=custom_model_fwd)
        self._held_back = None if execute_all_batches else _HeldBack()
        self._sync_interval, self._context = dmp_collection_sync_interval_batches, TrainPipelineContext(index=0)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        output = super().progress(dataloader_iter)
        if self._model.training:
            self.sync_embeddings(self._model, self._sync_interval, self._context)
        self._context = TrainPipelineContext(index=(self._context.index or 0) + 1)
        return output

    def _next(self, batches: Iterator[Any]) -> Any:
        if self._held_back is None:
            return super()._next(batches)
        self._held_back.source = batches
        return super()._next(self._held_back)

    def reset(self) -> None:
        super().reset()
        self._held_back = self._held_back and _HeldBack()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Replaces the model, unless it is None."""
        if model is not None:
            self._model = model

    def detach(self) -> nn.Module:
        """Returns the model."""
        return self._model

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Does nothing; the first `progress` fills the pipeline."""


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`. Lookups follow the update of the previous step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd=custom_model_fwd)


class TrainPipelineSemiSync(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`. Vectors always include the update of the previous step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            custom_model_fwd=custom_model_fwd,
            dmp_collection_sync_interval_batches=dmp_collection_sync_interval_batches,
        )


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`. The lookup fetches rows into a device cache."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd=custom_model_fwd)


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, context_type=context_type, custom_model_fwd=custom_model_fwd)


class TrainPipelineSparseDistCompAutograd(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`. Compile the dense part yourself with torch.compile."""


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` without training. After the end of an iterator, call `reset` before you use another."""

    _ended = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device)

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Returns the model's output for the next batch.

        Raises:
            StopIteration: no batch is left.
        """
        if self._ended:
            raise StopIteration
        with torch.no_grad():
            try:
                batch = self._next(dataloader_iter)
            except StopIteration:
                self._ended = True
                raise
            return self._forward(batch)[1]

    def reset(self) -> None:
        super().reset()
        self._ended = False


class EvalPipelineFusedSparseDist(EvalPipelineSparseDist[In, Out]):
    """`EvalPipelineSparseDist`."""
