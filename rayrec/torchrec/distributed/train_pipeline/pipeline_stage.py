"""Batches that go through stages of a user's own before the model, each stage on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.pipeline import TrainPipeline, sparse_features


@dataclass(frozen=True)
class PipelineStage:
    """A stage.

    Args:
        name: of the stage.
        runnable: what a batch becomes.
        stream: where it runs; on a CPU any object.
        fill_callback: called after each batch of the pipeline's filling.
        data_exhausted_callback: called instead of the stage when there are no more batches.
    """

    name: str
    runnable: Callable[[Any], Any]
    stream: Any
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


@dataclass
class _Item:
    """A batch after some stages, and when its last one is done on the device; None at the end of the data."""

    batch: Any
    done: Any = None


class StagedTrainPipeline(TrainPipeline[Any]):
    """Hands out batches that went through all stages; as many batches as stages are on their way.

    Args:
        pipeline_stages: in order.
        debug_mode: taken and not needed.
        compute_stream: of the model; the current one by default.
        on_flush_end: called when a flush has ended.
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
        self._items: deque[_Item] = deque()  # the first one has been through all stages, the last through one
        self._flushing = False
        self._source: Iterator[Any] | None = None
        self._exhausted = False

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:
        """Takes no more batches until those on their way are handed out."""
        self._flushing = flush

    def flush_end(self) -> None:
        """Ends a flush; the next `progress` fills the pipeline again."""
        self._flushing = False
        self._items.clear()
        if self.on_flush_end is not None:
            self.on_flush_end()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """The next batch after all stages; None when there is none."""
        if not self._items:
            for number in range(self.num_stages):
                item = self._take(dataloader_iter)
                for stage in self._stages[: self.num_stages - number]:
                    self._run(stage, item, filling=True)
                self._items.append(item)
        out = self._items.popleft()
        self._items.append(self._take(dataloader_iter))
        for place, stage in enumerate(self._stages):
            self._run(stage, self._items[self.num_stages - 1 - place])
        if out.done is not None:
            stream = self._compute_stream or torch.cuda.current_stream()
            stream.wait_event(out.done)
            out.batch.record_stream(stream)
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
                    item.batch.record_stream(stage.stream)
                item.batch = stage.runnable(item.batch)
                item.done = stage.stream.record_event() if on_gpu else None
        if filling and stage.fill_callback is not None:
            stage.fill_callback()

    def reset(self) -> None:
        self._items.clear()
        self._source, self._exhausted = None, False


class SparseDataDistUtil:
    """The last stage of a `StagedTrainPipeline`: sends a batch's ids ahead.

    Args:
        model: DistributedModelParallel, or a module that holds one.
        data_dist_stream, apply_jit, prefetch_stream, pipeline_postproc, embedding_lookup_stream: taken and not needed:
            ids go on the stage's own stream.
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
        self._collections = TrainPipeline(model)._collections
        self.fwd_hook = None

    def start_sparse_data_dist(self, batch: Any) -> Any:
        """Sends the ids; returns the batch."""
        for collection in self._collections.values():
            collection.ids_ahead.begin(sparse_features(batch)).send()
        return batch

    def wait_sparse_data_dist(self) -> None:
        """The lookup waits."""

    def prefetch(self, batch: Any) -> Any:
        """Rows behind a device cache are fetched when they are looked up."""
        return batch

    def load_prefetch(self) -> None:
        """As `prefetch`."""

    def detach(self) -> nn.Module:
        """The model, off which nothing was taken."""
        return self._model
