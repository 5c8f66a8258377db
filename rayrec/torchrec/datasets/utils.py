"""`Batch`, the batch of these data sets, and data pipes that read, limit and split."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterDataPipe

from rayrec._runtime.streamable import Pipelineable
from rayrec.torchrec.sparse import KeyedJaggedTensor

T = TypeVar("T")
D = TypeVar("D")
PATH_MANAGER_KEY = "torchrec"


def check_path_manager(key: str) -> None:
    """Raises ValueError for a path manager of iopath, which is not supported."""
    if key != PATH_MANAGER_KEY:
        raise ValueError(
            f"path_manager_key={key!r} is not supported; copy the files to a local disk, or read them from storage "
            "with rayrec.data"
        )


def safe_cast(val: T, dest_type: Callable[[T], D], default: D) -> D:
    """Returns `dest_type(val)`, or the default if this raises ValueError."""
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
        for tensor in (self.dense_features, self.labels):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        self.sparse_features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())


class Limit(IterDataPipe[T]):
    """The first `limit` items."""

    def __init__(self, datapipe: Iterable[T], limit: int) -> None:
        super().__init__()
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[T]:
        yield from islice(self.datapipe, self.limit)


class LoadFiles(IterDataPipe[tuple[str, Any]]):
    """(path, open file) of every path; closes the file when you request the next one.

    Args:
        datapipe: the paths.
        mode: "b", "t", or a mode of `open`.
        length: the result of `len`; if negative, `len` raises TypeError.
        path_manager_key: must be `PATH_MANAGER_KEY`.
        open_kw: keyword arguments of `open`.

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
            raise TypeError(f"{type(self).__name__} has no length; pass length")
        return self.length

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        mode = "r" + self.mode if self.mode in ("b", "t") else self.mode
        for path in self.datapipe:
            with open(path, mode, **self.open_kw) as file:
                yield path, file


class ReadLinesFromCSV(IterDataPipe[list[str]]):
    """The rows of every (path, open text file); has the keyword arguments of `csv.reader`."""

    def __init__(self, datapipe: Iterable[tuple[str, Any]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            rows = csv.reader(file, **self.kw)
            if self.skip_first_line:
                next(rows, None)
            yield from rows


class _Filter(IterDataPipe[T]):
    """Filters items by their index.

    Args:
        datapipe: the items.
        make_predicate: creates, for each pass, the function that decides by the index of an item.
    """

    def __init__(self, datapipe: Iterable[T], make_predicate: Callable[[], Callable[[int], bool]]) -> None:
        super().__init__()
        self.datapipe, self.make_predicate = datapipe, make_predicate

    def __iter__(self) -> Iterator[T]:
        predicate = self.make_predicate()
        for index, item in enumerate(self.datapipe):
            if predicate(index):
                yield item


class ParallelReadConcat(IterDataPipe[T]):
    """Concatenates several pipes. Each worker of a DataLoader reads some of the pipes.

    Args:
        datapipes: the pipes.
        dp_selector: selects the pipes of this process; default: round-robin over workers.
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
    """Selects pipes round-robin. Raises ValueError for more workers than pipes, as some would be idle."""
    worker = torch.utils.data.get_worker_info()
    if worker is None:
        return pipes
    if worker.num_workers > len(pipes):
        raise ValueError(f"{worker.num_workers} workers for {len(pipes)} files; use at most one worker per file")
    return pipes[worker.id :: worker.num_workers]


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether the item with index `idx` is in the training split of `idx_split_train_val`."""
    period = 10**decimal_places
    return key_fn(idx) % period < round(train_perc * period)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """The negation of `train_filter`."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def rand_split_train_val(
    datapipe: Iterable[T], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Splits items at random: a fraction `train_perc`, and the rest.

    Raises:
        ValueError: a fraction outside (0, 1).
    """
    if not 0 < train_perc < 1:
        raise ValueError(f"train_perc={train_perc} must be between 0 and 1")

    def split(train: bool) -> Callable[[], Callable[[int], bool]]:
        def make_predicate() -> Callable[[int], bool]:
            generator = random.Random(random_seed)
            return lambda index: (generator.random() < train_perc) == train

        return make_predicate

    return _Filter(datapipe, split(True)), _Filter(datapipe, split(False))


def idx_split_train_val(
    datapipe: Iterable[T], train_perc: float, decimal_places: int = 2, key_fn: Callable[[int], int] = lambda i: i
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Splits items by index: of every `10 ** decimal_places` items, the first fraction `train_perc`, and the rest.

    Raises:
        ValueError: a fraction outside (0, 1).
    """
    if not 0 < train_perc < 1:
        raise ValueError(f"train_perc={train_perc} must be between 0 and 1")
    args = (key_fn, train_perc, decimal_places)
    train, val = partial(train_filter, *args), partial(val_filter, *args)
    return _Filter(datapipe, lambda: train), _Filter(datapipe, lambda: val)
