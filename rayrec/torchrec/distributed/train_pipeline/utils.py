"""A thread that copies the next batch to the device ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Generic

import torch

from rayrec.torchrec.distributed.train_pipeline.pipeline_stage import (
    PipelineStage,
    SparseDataDistUtil,
    record_stream,
)
from rayrec.torchrec.distributed.train_pipeline.progress import In
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["DataLoadingThread", "PipelineStage", "SparseDataDistUtil"]

_POLL_S = 0.1  # time between two checks whether the thread was stopped
_END = object()


class DataLoadingThread(Thread, Generic[In]):
    """Reads batches from an iterator and copies them to a device, one batch in advance.

    Args:
        device: the device.
        dataloader_iter: the batches.
        to_device_non_blocking: copies do not block the thread; needs batches in pinned memory.
        memcpy_stream_priority: priority of the new stream.
        memcpy_stream: stream for copies to a GPU; default: a new stream.
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
        self._error: Exception | None = None

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    batch = next(self._source).to(self._device, non_blocking=self._non_blocking)
                    copied = None if self._stream is None else self._stream.record_event()
            except StopIteration:
                self._put(_END)
                return
            except Exception as error:
                self._put(error)
                return
            self._put((batch, copied))

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._batches.put(item, timeout=_POLL_S)
            except Full:
                continue

    def stop(self) -> None:
        """Stops the thread after its current batch."""
        self._stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> Any:
        """Returns the next batch, ready on the current stream; None at the end of the data or after `stop`.

        Raises:
            StopIteration: instead of None, with `none_throws`.
            Exception: the error of the iterator, in this and all later calls.
        """
        if self._error is not None:
            raise self._error
        item = self._take()
        if isinstance(item, Exception):
            self._error = item
            raise item
        if item is not _END:
            batch, copied = item
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                record_stream(batch, stream)
            return batch
        self._stopped.set()
        if none_throws:
            raise StopIteration
        return None

    def _take(self) -> Any:
        while True:
            try:
                return self._batches.get(timeout=_POLL_S)
            except Empty:
                if self._stopped.is_set():
                    return _END
