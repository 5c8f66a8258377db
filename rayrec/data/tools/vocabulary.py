"""Counts the ids of one column of any number of files into a vocabulary, exactly, in bounded memory.

What many files' counts come to is written in parts by a hash of the id, and then a part is added up at a time. What is
in memory is a part, or the ids of one count. Vocabularies are read by `mapping/vocabulary.py`.
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
from rayrec.data.mapping.column_types import column_missing
from rayrec.data.mapping.id_index import IdIndex
from rayrec.data.mapping.vocabulary import ids_in, load_vocabulary
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.partitions import PartitionedFile, Types, find_partitioned, tables_of, with_partitions
from rayrec.storage.errors import DataError
from rayrec.storage.locations import local_path
from rayrec.storage.parallel import one_by_one, start_ray
from rayrec.storage.parquet import open_parquet

_PARTS = 64
_SPILL_IDS = 4 << 20
_SPILL_TABLES = 4096
_RANGE_IDS = 4 << 20


@dataclass(frozen=True, slots=True)
class Counted:
    """The ids that are in the vocabulary, and those that were seen."""

    kept: int
    seen: int


def count_column(
    paths: str | Sequence[str],
    column: str,
    out: Path,
    *,
    filters: Iterable[Any] = (),
    min_count: int = 1,
    max_size: int | None = None,
    extend: str | None = None,
    on_ray: bool = False,
) -> Counted:
    """Writes the vocabulary of a column: `id` and `count`, the most frequent id first, equal counts by id.

    Args:
        paths: Parquet files, folders or globs.
        column: of ids, or of lists of them; in the files, or given by their folders.
        out: the Parquet file to write; a folder beside it takes what does not fit in memory, so every node must see it.
        filters: conditions that rows must meet to be counted, as in a train config.
        min_count: rarer ids are left out.
        max_size: at most so many ids, the most frequent ones.
        extend: a vocabulary whose ids come first, in their order and with a count of 0, so that they keep their rows;
            the ids that it lacks follow, and only they count here. It may be `out` itself.
        on_ray: one Ray task a file.

    Raises:
        DataError: an unreadable file, a missing column, one that holds texts here and numbers there, or one without an
            id that comes so often.
    """
    out = local_path(out).expanduser().absolute()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        problem = f"the vocabulary cannot be written: {error.strerror}"
        raise DataError(problem, file=str(out), fix="name a file that can be: --out FILE") from error
    try:
        if on_ray:
            start_ray()
        conditions = parse_all(filters)
        found = find_partitioned(paths, {column, *(condition.column for condition in conditions)})
        count = partial(_counts_in, column=column, conditions=conditions, types=found.types)
        files = found.that_pass(conditions).files
        counts = _spilled(count, files, folder) if on_ray else (one for file in files for one in count(file))
        old = None if extend is None else load_vocabulary(extend)
        parts = [_merge(path, min_count, old) for path in _by_hash(_of_one_kind(counts, column), folder)]
        sizes = sum((sizes for _, sizes, _ in parts), Counter[int]())
        if not sizes and extend is None:
            problem = f"no id comes {min_count} times" if min_count > 1 else "the column holds no ids at all"
            raise DataError(f"the vocabulary would be empty: {problem}", column=column, fix="lower --min-count")
        kept = _write([path for path, _, _ in parts], sizes, folder / "out", max_size, extend)
        (folder / "out").rename(out)
        load_vocabulary.cache_clear()
        return Counted(kept, sum(seen for _, _, seen in parts))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _counts_in(one: PartitionedFile, column: str, conditions: Sequence[Condition], types: Types) -> Iterator[pa.Table]:
    """How often each id of a file comes, in tables of `id` and `count` that may share ids."""
    uri = one.file.uri
    with open_parquet(uri) as parquet:
        arrow = with_partitions(parquet.schema_arrow, {name: types[name] for name in one.values})
    if column not in arrow.names:
        raise column_missing(column, arrow, uri, "correct the column's name")
    names = dict.fromkeys((column, *(condition.column for condition in conditions)))
    for table in tables_of(one, types, [*names], conditions):
        for chunk in table.column(column).chunks:
            found = _plain(ids_of(chunk), uri, column).value_counts()
            yield pa.table({"id": found.field("values"), "count": found.field("counts")})


Count = Callable[[PartitionedFile], Iterable[pa.Table]]


def _spilled(count: Count, files: Iterable[PartitionedFile], folder: Path) -> Iterator[pa.Table]:
    """The counts of all files, each of which a Ray task writes into the folder."""
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
        fix = "write them as such; numbers are dense features, which need no vocabulary"
        raise DataError(f"ids are integers or strings, not {ids.type}", file=uri, column=column, fix=fix)
    return ids.cast(pa.int64(), safe=False)


def _add_up(table: pa.Table) -> pa.Table:
    """Each id once, with the sum of its counts."""
    return table.group_by("id").aggregate([("count", "sum")]).rename_columns(["id", "count"])


def _added_up(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Fewer and larger tables of the same counts, each of which has an id once."""
    waiting, rows = list[pa.Table](), 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if rows > _SPILL_IDS or len(waiting) > _SPILL_TABLES:
            waiting = [_add_up(pa.concat_tables(waiting))]
            rows = len(waiting[0])
            if rows > _SPILL_IDS // 2:
                yield waiting.pop()
                rows = 0
    if waiting:
        yield _add_up(pa.concat_tables(waiting))


def _of_one_kind(tables: Iterable[pa.Table], column: str) -> Iterator[pa.Table]:
    """
    Raises:
        DataError: ids of two types, or none.
    """
    first, problem = None, "no ids at all"
    for table in tables:
        first = first or table.schema
        problem = "" if table.schema == first else "texts in some files and numbers in others"
        if problem:
            break
        yield table
    if problem:
        raise DataError(f"the column holds {problem}", column=column, fix="write ids of one type")


def _by_hash(counts: Iterable[pa.Table], folder: Path) -> list[Path]:
    """Files of the counts, each of the ids of some hashes."""
    paths = [folder / f"part-{number}" for number in range(_PARTS)]
    with ExitStack() as stack:
        files: list[pq.ParquetWriter] = []
        for table in _added_up(counts):
            files = files or [
                stack.enter_context(pq.ParquetWriter(path, table.schema, use_dictionary=False)) for path in paths
            ]
            ids = table["id"].combine_chunks()
            keys = hash_texts(ids) if is_text(ids.type) else mix64_array(ids.to_numpy(), 0)
            part = (keys % np.uint64(_PARTS)).astype(np.int64)
            table = table.take(pa.array(np.argsort(part, kind="stable")))
            ends = np.cumsum(np.bincount(part, minlength=_PARTS)).tolist()
            for file, first, stop in zip(files, [0, *ends[:-1]], ends, strict=True):
                file.write_table(table.slice(first, stop - first))
    return paths


def _merge(path: Path, min_count: int, old: IdIndex | None) -> tuple[Path, Counter[int], int]:
    """A file of one part's ids that come often enough and are new, how many have each count, and how many ids there
    are."""
    table = _add_up(pq.read_table(path))
    if old is not None:
        ids = table["id"].combine_chunks()
        if old.text != is_text(ids.type):
            held = ("integers", "texts")[old.text]
            raise DataError(f"the vocabulary to extend holds {held}, and the column does not", fix="name another one")
        table = table.filter(pa.array(old.find(ids if old.text else ids.to_numpy()) < 0))
    kept = table.filter(pc.greater_equal(table["count"], min_count))
    pq.write_table(kept, path)
    values, times = np.unique(kept["count"].to_numpy(), return_counts=True)
    return path, Counter(dict(zip(values.tolist(), times.tolist(), strict=True))), len(table)


def _write(parts: Sequence[Path], sizes: Counter[int], out: Path, max_size: int | None, extend: str | None) -> int:
    """The ids of a vocabulary to extend, then all others by falling count; returns how many those are."""
    schema = pq.read_schema(parts[0])
    left = sum(sizes.values()) if max_size is None else min(max_size, sum(sizes.values()))
    total = left
    with pq.ParquetWriter(out, schema) as writer:
        for ids in () if extend is None else ids_in(extend):
            writer.write_table(pa.table({"id": ids, "count": np.zeros(len(ids), np.int64)}).cast(schema))
        for low, high in _ranges(sizes):
            if not left:
                break
            inside = (pc.field("count") >= low) & (pc.field("count") <= high)
            some = pa.concat_tables(pq.read_table(part, filters=inside) for part in parts)
            some = some.sort_by([("count", "descending"), ("id", "ascending")]).slice(0, left)
            writer.write_table(some)
            left -= len(some)
    return total


def _ranges(sizes: Counter[int]) -> Iterator[tuple[int, int]]:
    """Ranges of counts, falling, each of about `_RANGE_IDS` ids or of a single count."""
    high, low, held = 0, 0, 0
    for count in sorted(sizes, reverse=True):
        if held and held + sizes[count] > _RANGE_IDS:
            yield low, high
            held = 0
        high = high if held else count
        low, held = count, held + sizes[count]
    if held:
        yield low, high
