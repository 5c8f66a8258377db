"""The Criteo click logs: columns, rows of tab-separated files, and batches of binary numpy files.

For new code, convert the files to Parquet with `data/criteo/prepare.py` and read them with `rayrec.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterDataPipe

from rayrec.torchrec.datasets.criteo_binary import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe
from rayrec.torchrec.datasets.criteo_columns import (
    CAT_FEATURE_COUNT,
    COLUMN_TYPE_CASTERS,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_COLUMN_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
    FREQUENCY_THRESHOLD,
    INT_FEATURE_COUNT,
    TOTAL_TRAINING_SAMPLES,
)
from rayrec.torchrec.datasets.utils import PATH_MANAGER_KEY, LoadFiles, ParallelReadConcat, ReadLinesFromCSV

__all__ = [
    "CAT_FEATURE_COUNT",
    "COLUMN_TYPE_CASTERS",
    "DAYS",
    "DEFAULT_CAT_NAMES",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_INT_NAMES",
    "DEFAULT_LABEL_NAME",
    "FREQUENCY_THRESHOLD",
    "INT_FEATURE_COUNT",
    "PATH_MANAGER_KEY",
    "TOTAL_TRAINING_SAMPLES",
    "BinaryCriteoUtils",
    "CriteoIterDataPipe",
    "InMemoryBinaryCriteoIterDataPipe",
    "criteo_kaggle",
    "criteo_terabyte",
]

Mapper = Callable[[list[str]], Any]


def as_columns(row: list[str]) -> dict[str, int | str]:
    """Returns the values of a row by column name. A row without a label has 39 values instead of 40."""
    names, casts = DEFAULT_COLUMN_NAMES[-len(row) :], COLUMN_TYPE_CASTERS[-len(row) :]
    return {name: cast(text) for name, cast, text in zip(names, casts, row, strict=True)}


class CriteoIterDataPipe(IterDataPipe[Any]):
    """The rows of tab-separated files. Each worker of a DataLoader reads some of the files.

    Args:
        paths: the files.
        row_mapper: maps the cells of a row to an item; None: the item is the list of cells.
        open_kw: keyword arguments of `open`.
    """

    def __init__(self, paths: Iterable[str], *, row_mapper: Mapper | None = as_columns, **open_kw: Any) -> None:
        super().__init__()
        self.paths, self.row_mapper, self.open_kw = list(paths), row_mapper, open_kw

    def __iter__(self) -> Iterator[Any]:
        files = [ReadLinesFromCSV(LoadFiles([path], mode="r", **self.open_kw), delimiter="\t") for path in self.paths]
        for row in ParallelReadConcat(*files):
            yield row if self.row_mapper is None else self.row_mapper(row)


def criteo_terabyte(
    paths: Iterable[str], *, row_mapper: Mapper | None = as_columns, **open_kw: Any
) -> CriteoIterDataPipe:
    """Returns the rows of the terabyte log; see `CriteoIterDataPipe`."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(path: str, *, row_mapper: Mapper | None = as_columns, **open_kw: Any) -> CriteoIterDataPipe:
    """Returns the rows of a file of the Kaggle challenge, with or without labels; see `CriteoIterDataPipe`."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)
