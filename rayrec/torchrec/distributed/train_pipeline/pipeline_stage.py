"""Pipelines of custom stages before the model; each stage has its own stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rayrec.distributed.pipeline import sparse_features
from rayrec.torchrec.distributed.train_pipeline.progress import In, TrainPipeline

StageOut = TypeVar("StageOut")


@dataclass(frozen=True)
class PipelineStage:
    """A stage.

    Args:
        name: name of the stage.
        runnable: takes a batch, returns the batch for the next stage.
        stream: CUDA stream of the stage; any object on a CPU.
        fill_callback: called after each batch while the pipeline fills.
        data_exhausted_callback: called instead of `runnable` after the last batch.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: Any
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


@dataclass
class _Item:
    """A batch in the pipeline.

    Args:
        batch: the output of the last stage; None at the end of the data.
        done: CUDA event recorded at the end of the last stage.
        begun: (InputDist, pending input) of the ids that stages have sent in advance.
    """

    batch: Any
    done: Any = None
    begun: list[tuple[Any, Any]] = field(default_factory=list)

    def drop(self) -> None:
        """Drops the ids that were sent in advance but not looked up."""
        for input_dist, pending in self.begun:
            input_dist.drop(pending)
        self.begun.clear()


_ITEM: ContextVar[_Item | None] = ContextVar("rayrec staged batch", default=None)  # the item in the current stage


class StagedTrainPipeline(TrainPipeline[In, StageOut | None]):
    """Returns batches that have passed all stages. The pipeline holds as many batches as it has stages.

    Args:
        pipeline_stages: the stages in order.
        debug_mode: ignored.
        compute_stream: stream of the model; default: the current stream.
        on_flush_end: called at the end of a flush.
    """

    def __init__(
        self,
        pipeline_stages: list[PipelineStage],
        debug_mode: bool = False,
        compute_stream: torch.cuda.Stream | None = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._stages, self._compute_stream, self.on_flush_end = pipeline_stages, compute_stream, on_flush_end
        self._items: deque[_Item] = deque()  # the first item has passed all stages, the last one a single stage
        self._handed_out: _Item | None = None
        self._flushing = False
        self._source: Iterator[Any] | None = None
        self._exhausted = False

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:
        """Reads no more batches until all batches in the pipeline are returned."""
        self._flushing = flush

    def flush_end(self) -> None:
        """Ends a flush; the next `progress` fills the pipeline again."""
        self._flushing = False
        self._clear()
        if self.on_flush_end is not None:
            self.on_flush_end()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Returns the next batch after all stages; None at the end of the data.

        Drops the ids of the previous batch that were sent in advance but not looked up.
        """
        if self._handed_out is not None:
            self._handed_out.drop()
        if not self._items:
            for number in range(self.num_stages):
                item = self._take(dataloader_iter)
                for stage in self._stages[: self.num_stages - number]:
                    self._run(stage, item, filling=True)
                self._items.append(item)
        out = self._handed_out = self._items.popleft()
        self._items.append(self._take(dataloader_iter))
        for stage, item in zip(self._stages, reversed([*self._items]), strict=True):
            self._run(stage, item)
        if out.done is not None:
            stream = self._compute_stream or torch.cuda.current_stream()
            stream.wait_event(out.done)
            record_stream(out.batch, stream)
        if out.batch is None and self._flushing:
            self.flush_end()
            return self.progress(dataloader_iter)
        return out.batch

    def _take(self, source: Iterator[Any]) -> _Item:
        if source is not self._source:
            self._source, self._exhausted = source, False
        batch = None if self._exhausted or self._flushing else next(source, None)
        self._exhausted = self._exhausted or (batch is None and not self._flushing)
        return _Item(batch)

    def _run(self, stage: PipelineStage, item: _Item, filling: bool = False) -> None:
        if item.batch is None:
            item.done = None
            if stage.data_exhausted_callback is not None:
                stage.data_exhausted_callback()
        else:
            on_gpu = isinstance(stage.stream, torch.cuda.Stream)
            context: AbstractContextManager[Any] = torch.cuda.stream(stage.stream) if on_gpu else nullcontext()
            with context:
                if item.done is not None:
                    stage.stream.wait_event(item.done)
                    record_stream(item.batch, stage.stream)
                running = _ITEM.set(item)
                try:
                    item.batch = stage.runnable(item.batch)
                finally:
                    _ITEM.reset(running)
                item.done = stage.stream.record_event() if on_gpu else None
        if filling and stage.fill_callback is not None:
            stage.fill_callback()

    def reset(self) -> None:
        """Drops the iterator and the batches in the pipeline."""
        self._clear()
        self._source, self._exhausted = None, False

    def _clear(self) -> None:
        for item in (*self._items, *([self._handed_out] if self._handed_out else [])):
            item.drop()
        self._items.clear()
        self._handed_out = None


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Keeps the memory of the GPU tensors of a batch from reuse until the work queued on `stream` is done.

    Calls `record_stream` of the batch, or else of its items (mapping, list, tuple), fields (dataclass) or attributes.
    """
    if isinstance(batch, torch.Tensor):
        if batch.is_cuda:
            batch.record_stream(stream)
    elif hasattr(batch, "record_stream"):
        batch.record_stream(stream)
    else:
        for item in _members(batch):
            record_stream(item, stream)


def _members(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return [getattr(batch, field.name) for field in fields(batch)]
    return getattr(batch, "__dict__", {}).values()


class SparseDataDistUtil(Generic[In]):
    """The last stage of a `StagedTrainPipeline`: sends the ids of a batch in advance.

    Args:
        model: DistributedModelParallel, or a module that contains one.
        data_dist_stream, apply_jit, prefetch_stream, pipeline_postproc, embedding_lookup_stream: ignored; ids are sent
            on the stream of the stage.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: Any,
        apply_jit: bool = False,
        prefetch_stream: Any = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: Any = None,
    ) -> None:
        self._model = model
        self._collections = TrainPipeline[In, Any](model)._collections
        self.fwd_hook = None

    def start_sparse_data_dist(self, batch: Any) -> Any:
        """Sends the ids; returns the batch."""
        item = _ITEM.get()
        for collection in self._collections.values():
            pending = collection.ids_ahead.begin(sparse_features(batch))
            pending.send()
            if item is not None:
                item.begun.append((collection.ids_ahead, pending))
        return batch

    def wait_sparse_data_dist(self) -> None:
        """Does nothing; the lookup waits for the ids."""

    def prefetch(self, batch: Any) -> Any:
        """Returns the batch; the lookup fetches rows into a device cache."""
        return batch

    def load_prefetch(self) -> None:
        """Does nothing; the lookup fetches rows into a device cache."""

    def detach(self) -> nn.Module:
        """Drops the ids that were sent in advance; returns the model."""
        for collection in self._collections.values():
            collection.ids_ahead.clear()
        return self._model
