"""Counts the ids of columns over any number of files into one vocabulary, exactly and in bounded memory.

Counts are partitioned on disk by a hash of the id, and then added up partition by partition. Memory holds one
partition, or the ids with the same count. `mapping/vocabulary.py` reads vocabularies.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.data.arrays.arrow_types import is_text
from rayrec.data.arrays.hashing import hash_texts, mix64_array
from rayrec.data.arrays.lists import ids_of
from rayrec.data.mapping.id_index import IdIndex
from rayrec.data.mapping.vocabulary import close_vocabularies, ids_in, index_beside, load_vocabulary
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.partitions import PartitionedFile, Types, find_partitioned, tables_of, with_partitions
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.locations import local_path
from rayrec.storage.parallel import one_by_one, start_ray
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_columns

_PARTS = 64
_SPILL_IDS = 4 << 20
_SPILL_TABLES = 4096
_RANGE_IDS = 4 << 20


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of ids in the vocabulary, and the number of distinct ids in the data."""

    kept: int
    seen: int


def count_column(
    paths: str | Sequence[str],
    column: str | Sequence[str],
    out: Path,
    *,
    filters: Iterable[Any] = (),
    min_count: int = 1,
    max_size: int | None = None,
    extend: str | None = None,
    on_ray: bool = False,
) -> Counted:
    """Writes the vocabulary of a column, or of several columns together, by falling count, then by id.

    The file has the columns `id` and `count`. Features that share a table need one vocabulary, e.g. of the columns
    `item` and `history`: an id counts as often as it occurs in any of them.

    Args:
        paths: Parquet files, folders or globs.
        column: column of ids or lists of ids, or several of them; each may be a partition column.
        out: Parquet file to write; its old index is removed. Temporary files go into the same folder, which
            every node must see.
        filters: conditions for the rows to count, as in a train config.
        min_count: minimum count of an id.
        max_size: maximum number of ids; the most frequent ones are kept.
        extend: the ids of this vocabulary come first, in order and with count 0, so that they keep their rows. New ids
            follow; `min_count` and `max_size` apply to them. May be `out`.
        on_ray: run one Ray task per file.

    Raises:
        DataError: an unreadable file, a missing column, a mix of strings and integers, or no id with `min_count`.
        ValueError: no column.
    """
    columns = (column,) if isinstance(column, str) else tuple(dict.fromkeys(column))
    if not columns:
        raise ValueError("no column to count: name at least one")
    out = local_path(out).expanduser().absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        problem = f"cannot write the vocabulary: {error.strerror}"
        raise DataError(problem, file=str(out), fix="name a writable file: --out FILE") from error
    try:
        if on_ray:
            start_ray()
        conditions = parse_all(filters)
        partitioned = find_partitioned(paths, {*columns, *(condition.column for condition in conditions)})
        count = partial(_counts_in, columns=columns, conditions=conditions, types=partitioned.types)
        files = partitioned.that_pass(conditions).files
        counts = _spilled(count, files, folder) if on_ray else (table for file in files for table in count(file))
        old = None if extend is None else load_vocabulary(extend)
        partitions = [_merge(path, min_count, old) for path in _by_hash(_of_one_kind(counts, columns), folder)]
        sizes = sum((sizes for _, sizes, _ in partitions), Counter[int]())
        if not sizes and extend is None:
            problem = f"no id occurs {min_count} times" if min_count > 1 else f"{_subject(columns)} no ids"
            fix = "lower --min-count"
            raise DataError(f"the vocabulary would be empty: {problem}", column=", ".join(columns), fix=fix)
        vocabulary_size = _write([path for path, _, _ in partitions], sizes, folder / "out", max_size, extend)
        index_beside(str(out)).unlink(missing_ok=True)  # of the file that is replaced now
        (folder / "out").rename(out)
        close_vocabularies()
        return Counted(vocabulary_size, sum(seen for _, _, seen in partitions))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _counts_in(
    file: PartitionedFile, columns: Sequence[str], conditions: Sequence[Condition], types: Types
) -> Iterator[pa.Table]:
    """Counts the ids of a file; yields tables of `id` and `count`, in which ids may repeat.

    Raises:
        DataError: a missing column, a column without ids, or columns of strings and of integers.
    """
    uri = file.file.uri
    with open_parquet(uri) as parquet:
        arrow = with_partitions(leaf_columns(parquet.schema_arrow), {name: types[name] for name in file.values})
    for column in columns:
        if column not in arrow.names:
            raise column_missing(column, arrow, uri, "correct the column's name")
    names = dict.fromkeys((*columns, *(condition.column for condition in conditions)))
    first: tuple[str, pa.DataType] | None = None  # the first column with ids, and their type
    for table in tables_of(file, types, [*names], conditions):
        for column in columns:
            for chunk in table.column(column).chunks:
                ids = ids_of(chunk)
                if pa.types.is_null(ids.type):  # all are null
                    continue
                ids = _plain(ids, uri, column)
                first = first or (column, ids.type)
                if ids.type != first[1]:
                    described = " and ".join(f"{name!r} is {arrow.field(name).type}" for name in (first[0], column))
                    fix = "cast one of them, because 7 and '7' are different ids, or count them separately"
                    raise DataError(f"a vocabulary contains strings or integers: {described}", file=uri, fix=fix)
                counts = ids.value_counts()
                yield pa.table({"id": counts.field("values"), "count": counts.field("counts")})


def _subject(columns: Sequence[str]) -> str:
    return "the column contains" if len(columns) == 1 else "the columns contain"


Count = Callable[[PartitionedFile], Iterable[pa.Table]]


def _spilled(count: Count, files: Iterable[PartitionedFile], folder: Path) -> Iterator[pa.Table]:
    """The counts of all files; Ray tasks write them into the folder."""
    for paths in one_by_one(partial(_spill, count=count, folder=folder), enumerate(files), on_ray=True):
        for path in paths:
            yield pq.read_table(path)
            path.unlink()


def _spill(numbered: tuple[int, PartitionedFile], count: Count, folder: Path) -> list[Path]:
    number, file = numbered
    paths = list[Path]()
    for table in _added_up(count(file)):
        paths.append(folder / f"{number}-{len(paths)}")
        pq.write_table(table, paths[-1], use_dictionary=False)
    return paths


def _plain(ids: pa.Array, uri: str, column: str) -> pa.Array:
    if is_text(ids.type):
        return ids.cast(pa.large_string())
    if not pa.types.is_integer(ids.type):
        fix = "write integers or strings; numbers are dense features and need no vocabulary"
        raise DataError(f"ids are integers or strings, not {ids.type}", file=uri, column=column, fix=fix)
    return ids.cast(pa.int64(), safe=False)


def _add_up(table: pa.Table) -> pa.Table:
    """Sums the counts of each id."""
    return table.group_by("id").aggregate([("count", "sum")]).rename_columns(["id", "count"])


def _added_up(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Merges tables to fewer, larger ones, each with distinct ids."""
    pending, rows = list[pa.Table](), 0
    for table in tables:
        pending.append(table)
        rows += len(table)
        if rows > _SPILL_IDS or len(pending) > _SPILL_TABLES:
            pending = [_add_up(pa.concat_tables(pending))]
            rows = len(pending[0])
            if rows > _SPILL_IDS // 2:
                yield pending.pop()
                rows = 0
    if pending:
        yield _add_up(pa.concat_tables(pending))


def _of_one_kind(tables: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yields the tables, and checks that they have one type of ids.

    Raises:
        DataError: ids of two types, or no ids.
    """
    expected, problem = None, "no ids"
    for table in tables:
        expected = expected or table.schema
        problem = "" if table.schema == expected else "strings in some files and integers in others"
        if problem:
            break
        yield table
    if problem:
        raise DataError(f"{_subject(columns)} {problem}", column=", ".join(columns), fix="write ids of one type")


def _by_hash(counts: Iterable[pa.Table], folder: Path) -> list[Path]:
    """Partitions the counts into files by hash of the id."""
    paths = [folder / f"part-{number}" for number in range(_PARTS)]
    with ExitStack() as stack:
        files: list[pq.ParquetWriter] = []
        for table in _added_up(counts):
            files = files or [
                stack.enter_context(pq.ParquetWriter(path, table.schema, use_dictionary=False)) for path in paths
            ]
            ids = table["id"].combine_chunks()
            keys = hash_texts(ids) if is_text(ids.type) else mix64_array(ids.to_numpy(), 0)
            partition = (keys % np.uint64(_PARTS)).astype(np.int64)
            table = table.take(pa.array(np.argsort(partition, kind="stable")))
            ends = np.cumsum(np.bincount(partition, minlength=_PARTS)).tolist()
            for file, start, stop in zip(files, [0, *ends[:-1]], ends, strict=True):
                file.write_table(table.slice(start, stop - start))
    return paths


def _merge(path: Path, min_count: int, old: IdIndex | None) -> tuple[Path, Counter[int], int]:
    """Adds up one partition, in place.

    Keeps ids with `min_count` that are not in `old`. Returns the file, the number of kept ids by count, and the number
    of distinct new ids.
    """
    table = _add_up(pq.read_table(path))
    if old is not None:
        ids = table["id"].combine_chunks()
        if old.text != is_text(ids.type):
            old_type, new_type = ("strings", "integers") if old.text else ("integers", "strings")
            problem = f"the vocabulary to extend contains {old_type}, the data {new_type}"
            raise DataError(problem, fix="extend another vocabulary")
        table = table.filter(pa.array(old.find(ids if old.text else ids.to_numpy()) < 0))
    frequent = table.filter(pc.greater_equal(table["count"], min_count))
    pq.write_table(frequent, path)
    values, times = np.unique(frequent["count"].to_numpy(), return_counts=True)
    return path, Counter(dict(zip(values.tolist(), times.tolist(), strict=True))), len(table)


def _write(paths: Sequence[Path], sizes: Counter[int], out: Path, max_size: int | None, extend: str | None) -> int:
    """Writes the ids of the vocabulary to extend, then new ids by falling count. Returns the number of new ids."""
    schema = pq.read_schema(paths[0])
    remaining = sum(sizes.values()) if max_size is None else min(max_size, sum(sizes.values()))
    total = remaining
    with pq.ParquetWriter(out, schema) as writer:
        for ids in () if extend is None else ids_in(extend):
            writer.write_table(pa.table({"id": ids, "count": np.zeros(len(ids), np.int64)}).cast(schema))
        for low, high in _ranges(sizes):
            if not remaining:
                break
            inside = (pc.field("count") >= low) & (pc.field("count") <= high)
            next_ids = pa.concat_tables(pq.read_table(path, filters=inside) for path in paths)
            next_ids = next_ids.sort_by([("count", "descending"), ("id", "ascending")]).slice(0, remaining)
            writer.write_table(next_ids)
            remaining -= len(next_ids)
    return total


def _ranges(sizes: Counter[int]) -> Iterator[tuple[int, int]]:
    """Ranges of counts, descending, each with about `_RANGE_IDS` ids or with a single count."""
    high, low, ids_in_range = 0, 0, 0
    for count in sorted(sizes, reverse=True):
        if ids_in_range and ids_in_range + sizes[count] > _RANGE_IDS:
            yield low, high
            ids_in_range = 0
        high = high if ids_in_range else count
        low, ids_in_range = count, ids_in_range + sizes[count]
    if ids_in_range:
        yield low, high
