"""The Criteo logs as numpy files: dense `[rows, 13]` float32, sparse `[rows, 26]` and labels `[rows, 1]` integers."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
    """The memory-mapped arrays of several files, concatenated.

    Args:
        arrays: array of each file, `[rows, columns]`.
    """

    arrays: tuple[Rows, ...]

    @classmethod
    def open(cls, paths: Sequence[str]) -> _Files:
        return cls(tuple(np.load(path, mmap_mode="r") for path in paths))

    @property
    def lengths(self) -> list[int]:
        return [len(array) for array in self.arrays]

    def take(self, rows: Rows) -> Rows:
        """Reads the rows with these indices into memory."""
        out = np.empty((len(rows), *self.arrays[0].shape[1:]), self.arrays[0].dtype)
        for end, array in zip(accumulate(self.lengths), self.arrays, strict=True):
            in_file = (rows >= end - len(array)) & (rows < end)
            out[in_file] = array[rows[in_file] - (end - len(array))]
        return out


def batch_sizes(num_rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[int]:
    """Returns the number of rows of each global batch.

    If fewer rows than ranks remain, they extend the last batch, so that every rank has rows of every batch.
    """
    global_size = batch_size * world_size
    full, rest = divmod(num_rows, global_size)
    sizes = [global_size] * full
    if drop_last or not rest:
        return sizes
    if rest >= world_size:
        return [*sizes, rest]
    return [*sizes[:-1], global_size + rest] if sizes else []


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns the first row and the number of rows of a rank; the first ranks get the remainder."""
    base, remainder = divmod(size, world_size)
    return rank * base + min(rank, remainder), base + (rank < remainder)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """The batches of a rank from numpy files. All ranks have the same number of batches.

    Args:
        stage: "train": all rows. "val", "test": the first or second half of the rows of a single file.
        dense_paths, sparse_paths, labels_paths: the files, in the same order.
        batch_size: examples per rank and batch.
        rank, world_size: this rank, and the number of ranks. There are no batches if there are fewer rows than ranks.
        drop_last: drop a smaller last batch.
        shuffle_batches: shuffle the rows of each batch.
        shuffle_training_set: shuffle all rows, in stage "train".
        shuffle_training_set_random_seed: seed of both.
        mmap_mode: read rows when they are needed; otherwise, keep the rows of this rank in memory.
        hashes: number of ids of each column; ids are taken modulo this number.
        path_manager_key: must be `PATH_MANAGER_KEY`.

    Raises:
        ValueError: an unknown stage, lists of different lengths, "val" or "test" with several files, or another path
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
            raise ValueError(f"dense_paths, sparse_paths and labels_paths must have equal lengths, not {counts}")
        if stage != "train" and len(dense_paths) != 1:
            raise ValueError(f"stage={stage!r} reads half the rows of one file; pass one file, not {len(dense_paths)}")
        self.stage, self.batch_size, self.rank, self.world_size = stage, batch_size, rank, world_size
        self.shuffle_batches, self.hashes = shuffle_batches, hashes
        self._random = np.random.RandomState(shuffle_training_set_random_seed)
        arrays = tuple(_Files.open(paths) for paths in (dense_paths, sparse_paths, labels_paths))
        num_rows = sum(arrays[0].lengths)
        half = -(-num_rows // 2)
        start, stop = {"train": (0, num_rows), "val": (0, half), "test": (half, num_rows)}[stage]
        sizes = batch_sizes(stop - start, batch_size, world_size, bool(drop_last))
        shares = [share(size, rank, world_size) for size in sizes]
        if shuffle_training_set and stage == "train":
            order = np.argsort(self._random.permutation(num_rows))[share(num_rows, rank, world_size)[0] :]
            rows = [order[begin:end] for begin, end in pairwise([0, *accumulate(count for _, count in shares)])]
        else:
            batch_starts = accumulate(sizes, initial=start)
            rows = [
                np.arange(batch_start + first, batch_start + first + count)
                for batch_start, (first, count) in zip(batch_starts, shares, strict=False)
            ]
        self._rows, self._arrays = rows, arrays
        if not mmap_mode and rows:
            self._arrays = tuple(_Files((array.take(np.concatenate(rows)),)) for array in arrays)
            self._rows = [np.arange(begin, end) for begin, end in pairwise([0, *accumulate(map(len, rows))])]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Batch]:
        for rows in self._rows:
            order = self._random.permutation(len(rows)) if self.shuffle_batches else slice(None)
            yield self._batch(*(array.take(rows[order]) for array in self._arrays))

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
            offset_per_key=[count * column for column in range(CAT_FEATURE_COUNT + 1)],
        )
        return Batch(torch.from_numpy(dense_BN), sparse, torch.from_numpy(labels_B1.reshape(-1)))


class BinaryCriteoUtils:
    """Writes and reads the numpy files."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Converts a tab-separated file to three numpy files.

        Dense values x become log(x - minimum of the file + 2); empty cells are 0. Hexadecimal ids become int64.

        Args:
            in_file: a file with labels.
            out_dense_file, out_sparse_file, out_labels_file: paths of the numpy files.
            dataset_name: ignored; "criteo_1tb" and "criteo_kaggle" have the same format.
            path_manager_key: must be `PATH_MANAGER_KEY`.
        """
        check_path_manager(path_manager_key)
        with open(in_file, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t"))
        split = 1 + INT_FEATURE_COUNT
        numbers = np.array([[float(cell or 0) for cell in row[1:split]] for row in rows], np.float32)
        np.save(out_dense_file, np.log(numbers - (numbers.min() - 2)))
        np.save(out_sparse_file, np.array([[int(cell or "0", 16) for cell in row[split:]] for row in rows], np.int64))
        np.save(out_labels_file, np.array([[int(row[0])] for row in rows], np.int32))

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """Returns the shape of the array in a file."""
        check_path_manager(path_manager_key)
        return tuple(np.load(path, mmap_mode="r").shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int], rank: int, world_size: int, start_row: int = 0, last_row: int | None = None
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Divides the rows of concatenated files among ranks.

        Args:
            lengths: number of rows of each file.
            rank, world_size: this rank, and the number of ranks.
            start_row, last_row: the range to divide, inclusive; default: all rows.

        Returns:
            (first, last) row of this rank by file index, inclusive; and the remainder of the division, which the first
            ranks get.
        """
        last_row = sum(lengths) - 1 if last_row is None else last_row
        offset, count = share(last_row - start_row + 1, rank, world_size)
        start, stop = start_row + offset, start_row + offset + count
        ranges: dict[int, tuple[int, int]] = {}
        for index, (file_start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            low, high = max(start, file_start), min(stop, file_start + length)
            if low < high:
                ranges[index] = (low - file_start, high - file_start - 1)
        return ranges, (last_row - start_row + 1) % world_size

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> Rows:
        """Reads a range of rows of the array in a file.

        Raises:
            ValueError: the range exceeds the array.
        """
        check_path_manager(path_manager_key)
        array = np.load(fname, mmap_mode="r")
        if not 0 <= start_row < len(array) or start_row + num_rows > len(array):
            raise ValueError(
                f"{fname}: rows [{start_row}, {start_row + num_rows}) exceed the {len(array)} rows of the file"
            )
        rows: Rows = array[start_row : start_row + num_rows]
        return rows if mmap_mode else np.array(rows)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Renumbers the ids of each column from 2, in order of first occurrence, and writes the files to `output_dir`.
        Ids that occur fewer than `frequency_threshold` times in all files become 1.

        Raises:
            ValueError: another path manager.
        """
        check_path_manager(path_manager_key)
        arrays = [np.load(path) for path in in_files]
        for column in range(columns):
            counts: Counter[int] = Counter()
            for array in arrays:
                counts.update(array[:, column].tolist())
            frequent = [value for value, count in counts.items() if count >= frequency_threshold]
            numbers = {value: number for number, value in enumerate(frequent, start=2)}
            for array in arrays:
                array[:, column] = [numbers.get(value, 1) for value in array[:, column].tolist()]
        for path, array in zip(in_files, arrays, strict=True):
            name = os.path.splitext(os.path.basename(path))[0]
            np.save(os.path.join(output_dir, name + output_file_suffix), array)

    @staticmethod
    def shuffle(*args: Any, **kwargs: Any) -> None:
        """Not supported; raises NotOffered."""
        raise NotOffered(
            "BinaryCriteoUtils.shuffle: use InMemoryBinaryCriteoIterDataPipe(shuffle_training_set=True), or prepare "
            "Parquet files with data/criteo/prepare.py and read them shuffled with rayrec.data"
        )
