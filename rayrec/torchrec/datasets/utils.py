"""The batch of these data sets, and iterators that cut or split others."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import IterDataPipe

from rayrec._runtime.streamable import Pipelineable
from rayrec.torchrec.sparse import KeyedJaggedTensor

T = TypeVar("T")
D = TypeVar("D")
PATH_MANAGER_KEY = "torchrec"


def check_path_manager(key: str) -> None:
    """Raises ValueError for handlers of paths that a program has registered with iopath; paths are opened as files."""
    if key != PATH_MANAGER_KEY:
        raise ValueError(
            f"path_manager_key={key!r}: paths are opened as files, without iopath; copy them to a local disk, or "
            "read them from storage with rayrec.data"
        )


def safe_cast(val: T, dest_type: Callable[[T], D], default: D) -> D:
    """`dest_type(val)`; the default where that is a ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


@dataclass
class Batch(Pipelineable):
    """B examples: dense features `[B, N]`, sparse features, labels `[B]`."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for part in (self.dense_features, self.labels):
            if part.is_cuda:
                part.record_stream(stream)
        self.sparse_features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())


class Limit(IterDataPipe[T]):
    """The first `limit` items."""

    def __init__(self, datapipe: Iterable[T], limit: int) -> None:
        super().__init__()
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[T]:
        for place, item in enumerate(self.datapipe):
            if place >= self.limit:
                return
            yield item


class LoadFiles(IterDataPipe[tuple[str, Any]]):
    """(path, open file) of every path, closed when the next one is requested.

    Args:
        datapipe: the paths.
        mode: "b", "t", or a mode of `open`.
        length: what `len` gives; below 0, `len` raises TypeError.
        path_manager_key: `PATH_MANAGER_KEY`.
        open_kw: keywords of `open`.

    Raises:
        ValueError: another path manager.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        check_path_manager(path_manager_key)
        self.datapipe, self.mode, self.length, self.open_kw = datapipe, mode, length, open_kw

    def __len__(self) -> int:
        if self.length < 0:
            raise TypeError(f"{type(self).__name__} was given no length")
        return self.length

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        mode = "r" + self.mode if self.mode in ("b", "t") else self.mode
        for path in self.datapipe:
            with open(path, mode, **self.open_kw) as file:
                yield path, file


class ReadLinesFromCSV(IterDataPipe[list[str]]):
    """The rows of every (path, open text file); keywords as of `csv.reader`."""

    def __init__(self, datapipe: Iterable[tuple[str, Any]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            rows = csv.reader(file, **self.kw)
            if self.skip_first_line:
                next(rows, None)
            yield from rows


class _Part(IterDataPipe[T]):
    """The items that `keep` says, which gets each item's number and is made anew for every pass."""

    def __init__(self, datapipe: Iterable[T], keep: Callable[[], Callable[[int], bool]]) -> None:
        super().__init__()
        self.datapipe, self.keep = datapipe, keep

    def __iter__(self) -> Iterator[T]:
        keep = self.keep()
        for place, item in enumerate(self.datapipe):
            if keep(place):
                yield item


class ParallelReadConcat(IterDataPipe[T]):
    """Items of several pipes one after another; with a DataLoader's workers, of the pipes that are this worker's.

    Args:
        datapipes: the pipes.
        dp_selector: the pipes of this process, of all; by default they are dealt out to workers in turn.
    """

    def __init__(
        self,
        *datapipes: Iterable[T],
        dp_selector: Callable[[Sequence[Iterable[T]]], Sequence[Iterable[T]]] | None = None,
    ) -> None:
        super().__init__()
        self.datapipes, self.dp_selector = datapipes, dp_selector or _of_worker

    def __iter__(self) -> Iterator[T]:
        for pipe in self.dp_selector(self.datapipes):
            yield from pipe


def _of_worker(pipes: Sequence[Iterable[T]]) -> Sequence[Iterable[T]]:
    """Raises ValueError for more workers than pipes, some of which would read nothing."""
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return pipes
    if worker.num_workers > len(pipes):
        raise ValueError(f"{worker.num_workers} workers for {len(pipes)} files: use a worker a file at most")
    return pipes[worker.id :: worker.num_workers]


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether `idx_split_train_val` puts the item of this number among the first."""
    period = 10**decimal_places
    return key_fn(idx) % period < round(train_perc * period)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """The opposite of `train_filter`."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def rand_split_train_val(
    datapipe: Iterable[T], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Items dealt out at random: a share of `train_perc`, and the rest.

    Raises:
        ValueError: a share that is not between 0 and 1.
    """
    if not 0 < train_perc < 1:
        raise ValueError(f"train_perc={train_perc} must be between 0 and 1")

    def side(train: bool) -> Callable[[], Callable[[int], bool]]:
        def begin() -> Callable[[int], bool]:
            numbers = random.Random(random_seed)
            return lambda place: (numbers.random() < train_perc) == train

        return begin

    return _Part(datapipe, side(True)), _Part(datapipe, side(False))


def idx_split_train_val(
    datapipe: Iterable[T], train_perc: float, decimal_places: int = 2, key_fn: Callable[[int], int] = lambda i: i
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Items dealt out by their number: of every `10 ** decimal_places`, the first share of `train_perc`, and the rest.

    Raises:
        ValueError: a share that is not between 0 and 1.
    """
    if not 0 < train_perc < 1:
        raise ValueError(f"train_perc={train_perc} must be between 0 and 1")
    of = (key_fn, train_perc, decimal_places)
    return _Part(datapipe, lambda: partial(train_filter, *of)), _Part(datapipe, lambda: partial(val_filter, *of))
