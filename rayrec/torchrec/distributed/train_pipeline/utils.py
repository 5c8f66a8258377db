"""A thread that has the next batch on the device before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch

from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil

__all__ = ["DataLoadingThread", "PipelineStage", "SparseDataDistUtil"]

_LOOK_S = 0.1  # how often a thread that waits looks whether it was stopped
_END = object()


class DataLoadingThread(Thread):
    """Takes batches from an iterator and moves them to a device, one ahead.

    Args:
        device: where they go.
        dataloader_iter: where they come from.
        to_device_non_blocking: copies do not hold the thread up; their memory must be pinned.
        memcpy_stream_priority: of the stream of copies to a GPU.
        memcpy_stream: that stream; by default one of its own.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[Any],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(name="DataLoadingThread", daemon=True)
        self._device, self._source, self._non_blocking = device, dataloader_iter, to_device_non_blocking
        self._stream = memcpy_stream
        if memcpy_stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=memcpy_stream_priority)
        self._batches: Queue[Any] = Queue(maxsize=1)
        self._stopped = Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    batch = next(self._source).to(self._device, non_blocking=self._non_blocking)
            except StopIteration:
                self._put(_END)
                return
            except Exception as error:
                self._put(error)
                return
            self._put(batch)

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._batches.put(item, timeout=_LOOK_S)
            except Full:
                continue

    def stop(self) -> None:
        """Ends the thread after the batch that it has in hand."""
        self._stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> Any:
        """The next batch; None when there are no more, or the thread was stopped.

        Raises:
            StopIteration: there are no more, where `none_throws` says so.
            Exception: what the iterator raised.
        """
        item = self._take()
        if isinstance(item, Exception):
            raise item
        if item is not _END:
            return item
        self._stopped.set()
        if none_throws:
            raise StopIteration
        return None

    def _take(self) -> Any:
        while True:
            try:
                return self._batches.get(timeout=_LOOK_S)
            except Empty:
                if self._stopped.is_set():
                    return _END
