"""TorchRec's pipelines with its arguments, subclasses of `rayrec.distributed.TrainPipeline`.

The model returns (losses, output). Nothing is traced and no forward is replaced: the ids of the next batch are sent
during the current step if the model calls its collections with the batch's own KeyedJaggedTensor. Arguments without a
description are accepted for compatibility and ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.pipeline import Forward
from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipeline,
)

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

IN_FLIGHT = 2  # batches that TorchRec has taken when it trains on one; without execute_all_batches they stay untrained


class _HeldBack:
    """The batches of an iterator, which may be replaced; the last two wait for the next iterator."""

    def __init__(self) -> None:
        self.source: Iterator[Any] = iter(())
        self._waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while len(self._waiting) <= IN_FLIGHT:
            self._waiting.append(next(self.source))
        return self._waiting.popleft()


class TrainPipelineBase(TrainPipeline):
    """Trains batch after batch, and copies the next one ahead. At the end of an iterator, call `reset` to use another.

    Args:
        model: takes a batch; returns (losses, output).
        optimizer: of what is not trained inside backward.
        device: where batches are moved.
        custom_model_fwd: called with the batch instead of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Forward | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd, send_ahead=False)
        self._ended = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return super().progress(dataloader_iter)
        except StopIteration:
            self._ended = True
            raise

    def reset(self) -> None:
        super().reset()
        self._ended = False


class TrainPipelineSparseDist(TrainPipeline):
    """Sends the next batch's ids during the current step.

    Args:
        model: DistributedModelParallel, or a module that holds one.
        optimizer, device, custom_model_fwd: as of `TrainPipelineBase`.
        execute_all_batches: False leaves the last two batches of an iterator until another one brings more.
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
        super().__init__(model, optimizer, device, forward=custom_model_fwd)
        self._held_back = None if execute_all_batches else _HeldBack()

    def _next(self, batches: Iterator[Any]) -> Any:
        if self._held_back is None:
            return super()._next(batches)
        self._held_back.source = batches
        return super()._next(self._held_back)

    def reset(self) -> None:
        super().reset()
        self._held_back = self._held_back and _HeldBack()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Replaces the model, if one is given."""
        if model is not None:
            self._model = model

    def detach(self) -> nn.Module:
        """The model, unchanged."""
        return self._model

    def fill_pipeline(self, dataloader_iter: Iterator[Any]) -> None:
        """Does nothing: the first `progress` fills the pipeline."""


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`. Vectors are looked up in their own step, after the last update."""

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
        **unused: Any,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd=custom_model_fwd)


class TrainPipelineSemiSync(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`. Vectors always include the last step's update."""

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
        **unused: Any,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd=custom_model_fwd)


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`. Rows behind a device cache are fetched in the lookup."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Forward | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, custom_model_fwd=custom_model_fwd)


class TrainPipelineSparseDistLite(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Forward | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd=custom_model_fwd)


class TrainPipelineSparseDistCompAutograd(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist`: compile the dense part yourself, with torch.compile."""


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` without training. At the end of an iterator, call `reset` to use another."""

    _ended = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """The model's output for the next batch.

        Raises:
            StopIteration: there is none left.
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


class EvalPipelineFusedSparseDist(EvalPipelineSparseDist):
    """`EvalPipelineSparseDist`."""


@dataclass(frozen=True)
class TorchCompileConfig:
    """How `TrainPipelinePT2` compiles.

    Args:
        fullgraph, dynamic, backend: as of torch.compile.
        compile_on_iter: the step that is the first one compiled.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int | None = 3


class TrainPipelinePT2(TrainPipelineBase):
    """`TrainPipelineBase` that compiles its model with torch.compile after some steps.

    Args:
        compile_configs: None compiles nothing but for the two functions; by default as `TorchCompileConfig` says.
        pre_compile_fn, post_compile_fn: called with the model before and after.
        input_transformer: what the model gets instead of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._configs = compile_configs or TorchCompileConfig()
        self._before, self._after, self._transform = pre_compile_fn, post_compile_fn, input_transformer
        self._step = 0
        self._forward = self._transformed

    def _transformed(self, batch: Any) -> tuple[torch.Tensor, Any]:
        settings = self._configs
        if self._step == settings.compile_on_iter:
            if self._before is not None:
                self._before(self._model)
            self._model.compile(fullgraph=settings.fullgraph, dynamic=settings.dynamic, backend=settings.backend)
            if self._after is not None:
                self._after(self._model)
        self._step += 1
        return self._model(batch if self._transform is None else self._transform(batch))
