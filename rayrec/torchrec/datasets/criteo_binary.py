"""Criteo's logs as numpy files: dense `[rows, 13]` float32, sparse `[rows, 26]` and labels `[rows, 1]` integers."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rayrec.torchrec.datasets.criteo_columns import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    FREQUENCY_THRESHOLD,
    INT_FEATURE_COUNT,
)
from rayrec.torchrec.datasets.utils import PATH_MANAGER_KEY, Batch, check_path_manager
from rayrec.torchrec.not_offered import NotOffered
from rayrec.torchrec.sparse import KeyedJaggedTensor

Rows = np.ndarray[Any, np.dtype[Any]]
STAGES = ("train", "val", "test")


@dataclass(frozen=True)
class _Files:
    """Arrays of several files one below the other, left on disk.

    Args:
        arrays: of each file, `[rows, columns]`.
    """

    arrays: tuple[Rows, ...]

    @classmethod
    def of(cls, paths: Sequence[str]) -> _Files:
        return cls(tuple(np.load(path, mmap_mode="r") for path in paths))

    @property
    def lengths(self) -> list[int]:
        return [len(array) for array in self.arrays]

    def take(self, rows: Rows) -> Rows:
        """The numbered rows, read into memory."""
        first = self.arrays[0]
        out = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for end, array in zip(accumulate(self.lengths), self.arrays, strict=True):
            here = (rows >= end - len(array)) & (rows < end)
            out[here] = array[rows[here] - (end - len(array))]
        return out


def batch_sizes(num_rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[int]:
    """Rows of each batch over all ranks. The last one is smaller, or larger by fewer rows than there are ranks, so that
    every rank has a part of it."""
    of_all = batch_size * world_size
    full, rest = divmod(num_rows, of_all)
    sizes = [of_all] * full
    if drop_last or not rest:
        return sizes
    if rest >= world_size:
        return [*sizes, rest]
    return [*sizes[:-1], of_all + rest] if sizes else []


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row and number of rows of a rank; the first ranks have one more where they do not divide."""
    each, more = divmod(size, world_size)
    return rank * each + min(rank, more), each + (rank < more)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of a rank from numpy files. All ranks have equally many.

    Args:
        stage: "train": all rows. "val", "test": the first or second half of the one file's rows.
        dense_paths, sparse_paths, labels_paths: the files, in one order.
        batch_size: of a rank.
        rank, world_size: the rank's part of every batch; with fewer rows than ranks there is none.
        drop_last: leaves a smaller last batch out.
        shuffle_batches: the rows of a batch are in drawn order.
        shuffle_training_set: rows are in drawn order, if the stage is "train".
        shuffle_training_set_random_seed: of both orders.
        mmap_mode: rows are read when they are due; else the rank's rows are held in memory.
        hashes: ids of the column are taken modulo it.
        path_manager_key: `PATH_MANAGER_KEY`.

    Raises:
        ValueError: an unknown stage, lists of different lengths, "val" or "test" of several files, another path
            manager.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        super().__init__()
        check_path_manager(path_manager_key)
        if stage not in STAGES:
            raise ValueError(f"stage={stage!r} must be one of {STAGES}")
        if not len(dense_paths) == len(sparse_paths) == len(labels_paths):
            counts = (len(dense_paths), len(sparse_paths), len(labels_paths))
            raise ValueError(f"dense_paths, sparse_paths, labels_paths: {counts} files, which must be equally many")
        if stage != "train" and len(dense_paths) != 1:
            raise ValueError(f"stage={stage!r} takes half the rows of one file; there are {len(dense_paths)} files")
        self.stage, self.batch_size, self.rank, self.world_size = stage, batch_size, rank, world_size
        self.shuffle_batches, self.hashes = shuffle_batches, hashes
        self._draws = np.random.RandomState(shuffle_training_set_random_seed)
        parts = tuple(_Files.of(paths) for paths in (dense_paths, sparse_paths, labels_paths))
        num_rows = sum(parts[0].lengths)
        half = -(-num_rows // 2)
        begin, end = {"train": (0, num_rows), "val": (0, half), "test": (half, num_rows)}[stage]
        sizes = batch_sizes(end - begin, batch_size, world_size, bool(drop_last))
        if shuffle_training_set and stage == "train":
            order = np.argsort(self._draws.permutation(num_rows))[share(num_rows, rank, world_size)[0] :]
            ends = [0, *accumulate(share(size, rank, world_size)[1] for size in sizes)]
            rows = [order[first:last] for first, last in zip(ends[:-1], ends[1:], strict=True)]
        else:
            starts = accumulate(sizes, initial=begin)
            mine = [share(size, rank, world_size) for size in sizes]
            rows = [np.arange(at + first, at + first + count) for at, (first, count) in zip(starts, mine, strict=False)]
        self._rows, self._parts = rows, parts
        if not mmap_mode and rows:
            self._parts = tuple(_Files((part.take(np.concatenate(rows)),)) for part in parts)
            ends = [0, *accumulate(map(len, rows))]
            self._rows = [np.arange(first, last) for first, last in zip(ends[:-1], ends[1:], strict=True)]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._rows:
            order = self._draws.permutation(len(rows)) if self.shuffle_batches else slice(None)
            yield self._batch(*(part.take(rows[order]) for part in self._parts))

    def _batch(self, dense_BN: Rows, ids_BF: Rows, labels_B1: Rows) -> Batch:
        count = len(dense_BN)
        if self.hashes is not None:
            ids_BF = (ids_BF % np.array(self.hashes)).astype(ids_BF.dtype)
        sparse = KeyedJaggedTensor(
            keys=DEFAULT_CAT_NAMES,
            values=torch.from_numpy(np.ascontiguousarray(ids_BF.T).reshape(-1)),
            lengths=torch.ones(count * CAT_FEATURE_COUNT, dtype=torch.int32),
            offsets=torch.arange(count * CAT_FEATURE_COUNT + 1, dtype=torch.int32),
            stride=count,
            length_per_key=[count] * CAT_FEATURE_COUNT,
            offset_per_key=[count * place for place in range(CAT_FEATURE_COUNT + 1)],
        )
        return Batch(torch.from_numpy(dense_BN), sparse, torch.from_numpy(labels_B1.reshape(-1)))


class BinaryCriteoUtils:
    """Makes and reads the numpy files."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Writes a tab-separated file's columns as three numpy files.

        Dense numbers x become log(x - least number of the file + 2); empty cells are 0. Hexadecimal ids become int64.

        Args:
            in_file: with labels.
            out_dense_file, out_sparse_file, out_labels_file: paths.
            dataset_name: the format, which is the same for "criteo_1tb" and "criteo_kaggle".
            path_manager_key: `PATH_MANAGER_KEY`.
        """
        check_path_manager(path_manager_key)
        with open(in_file, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))
        cut = 1 + INT_FEATURE_COUNT
        numbers = np.array([[float(cell or 0) for cell in row[1:cut]] for row in rows], np.float32)
        np.save(out_dense_file, np.log(numbers - (numbers.min() - 2)))
        np.save(out_sparse_file, np.array([[int(cell or "0", 16) for cell in row[cut:]] for row in rows], np.int64))
        np.save(out_labels_file, np.array([[int(row[0])] for row in rows], np.int32))

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """The shape of a file's array."""
        check_path_manager(path_manager_key)
        return tuple(np.load(path, mmap_mode="r").shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int], rank: int, world_size: int, start_row: int = 0, last_row: int | None = None
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """A rank's rows of files that lie one after another, as first and last row by file; and how many rows are left
        over after an equal division, which the first ranks have.

        Args:
            lengths: rows of each file.
            rank, world_size: which part.
            start_row, last_row: of the rows that are divided, both of them included; by default all.
        """
        last_row = sum(lengths) - 1 if last_row is None else last_row
        first, count = share(last_row - start_row + 1, rank, world_size)
        begin, end = start_row + first, start_row + first + count
        found: dict[int, tuple[int, int]] = {}
        for place, (at, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            low, high = max(begin, at), min(end, at + length)
            if low < high:
                found[place] = (low - at, high - at - 1)
        return found, (last_row - start_row + 1) % world_size

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> Rows:
        """Rows of a file's array.

        Raises:
            ValueError: rows that there are not.
        """
        check_path_manager(path_manager_key)
        array = np.load(fname, mmap_mode="r")
        if not 0 <= start_row < len(array) or start_row + num_rows > len(array):
            raise ValueError(
                f"{fname}: rows [{start_row}, {start_row + num_rows}) are not all in the file, which has {len(array)}"
            )
        part: Rows = array[start_row : start_row + num_rows]
        return part if mmap_mode else np.array(part)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Writes files in which a column's ids are numbered from 2 in the order in which they first come; those that
        come fewer than `frequency_threshold` times in all files are 1.

        Raises:
            ValueError: another path manager.
        """
        check_path_manager(path_manager_key)
        arrays = [np.load(path) for path in in_files]
        for column in range(columns):
            counts: Counter[int] = Counter()
            for array in arrays:
                counts.update(array[:, column].tolist())
            kept = [value for value, count in counts.items() if count >= frequency_threshold]
            numbers = {value: place for place, value in enumerate(kept, start=2)}
            for array in arrays:
                array[:, column] = [numbers.get(value, 1) for value in array[:, column].tolist()]
        for path, array in zip(in_files, arrays, strict=True):
            name = os.path.splitext(os.path.basename(path))[0]
            np.save(os.path.join(output_dir, name + output_file_suffix), array)

    @staticmethod
    def shuffle(*args: Any, **kwargs: Any) -> None:
        """Raises NotOffered: files of days are not shuffled on disk."""
        raise NotOffered(
            "BinaryCriteoUtils.shuffle: use InMemoryBinaryCriteoIterDataPipe(shuffle_training_set=True), or prepare "
            "Parquet files with data/criteo/prepare.py and read them shuffled with rayrec.data"
        )
