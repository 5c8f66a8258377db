"""The batch of these data sets, and iterators that cut or split others."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from rayrec.sparse import KeyedJaggedTensor
from rayrec.streamable import Pipelineable

T = TypeVar("T")


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


class Limit(IterableDataset[T]):
    """The first `limit` items."""

    def __init__(self, datapipe: Iterable[T], limit: int) -> None:
        super().__init__()
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[T]:
        for place, item in enumerate(self.datapipe):
            if place >= self.limit:
                return
            yield item


class LoadFiles(IterableDataset[tuple[str, Any]]):
    """(path, open file) of every path, closed when the next one is requested."""

    def __init__(self, datapipe: Iterable[str], mode: str = "b", **open_kw: Any) -> None:
        super().__init__()
        self.datapipe, self.mode, self.open_kw = datapipe, mode, open_kw

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        mode = "r" + self.mode if self.mode in ("b", "t") else self.mode
        for path in self.datapipe:
            with open(path, mode, **self.open_kw) as file:
                yield path, file


class ReadLinesFromCSV(IterableDataset[list[str]]):
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


class _Part(IterableDataset[T]):
    """The items that `keep` says, which gets each item's number and is made anew for every pass."""

    def __init__(self, datapipe: Iterable[T], keep: Callable[[], Callable[[int], bool]]) -> None:
        super().__init__()
        self.datapipe, self.keep = datapipe, keep

    def __iter__(self) -> Iterator[T]:
        keep = self.keep()
        for place, item in enumerate(self.datapipe):
            if keep(place):
                yield item


def rand_split_train_val(
    datapipe: Iterable[T], train_perc: float, random_seed: int = 0
) -> tuple[IterableDataset[T], IterableDataset[T]]:
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
) -> tuple[IterableDataset[T], IterableDataset[T]]:
    """Items dealt out by their number: of every `10 ** decimal_places`, the first share of `train_perc`, and the rest.

    Raises:
        ValueError: a share that is not between 0 and 1.
    """
    if not 0 < train_perc < 1:
        raise ValueError(f"train_perc={train_perc} must be between 0 and 1")
    period = 10**decimal_places
    first = round(train_perc * period)
    return (
        _Part(datapipe, lambda: lambda place: key_fn(place) % period < first),
        _Part(datapipe, lambda: lambda place: key_fn(place) % period >= first),
    )
