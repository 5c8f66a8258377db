"""Counts the ids of a feature in a whole data set, to build its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.data.mapping.arrow_types import is_list, without_views
from rayrec.data.mapping.lists import unnest
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.slices import slices_of
from rayrec.data.source.windows import Window
from rayrec.data.storage.locations import open_filesystem
from rayrec.data.stream.reading import read_rows

_MERGE_ROWS = 4 << 20


def build_vocabulary(
    manifest: Manifest, feature: SparseFeature, *, min_count: int = 1, max_size: int | None = None
) -> pa.Table:
    """Counts a feature's ids in all rows of a data set that pass its filters.

    Args:
        min_count: rarer ids are left to the out-of-vocabulary rows.
        max_size: at most so many ids, the most frequent ones.

    Returns:
        `id` and `count`, the most frequent id first, equal counts by id.
    """
    counted: list[pa.Table] = []
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda window: _count_window(manifest, window, feature), manifest.windows):
            counted.append(found)
            if sum(len(some) for some in counted) > 2 * len(counted[0]) + _MERGE_ROWS:
                counted = [add_up(pa.concat_tables(counted))]
    table = add_up(pa.concat_tables(counted))
    table = table.filter(pc.greater_equal(table["count"], min_count))
    table = table.sort_by([("count", "descending"), ("id", "ascending")])
    return table if max_size is None else table.slice(0, max_size)


def write_vocabulary(table: pa.Table, path: str) -> None:
    """Writes what `build_vocabulary` gave as the Parquet file that a schema names."""
    filesystem, inner = open_filesystem(path)
    pq.write_table(table, inner, filesystem=filesystem)


def _count_window(manifest: Manifest, window: Window, feature: SparseFeature) -> pa.Table:
    needed = {feature.column, *(condition.column for condition in manifest.filters)}
    columns = tuple((name, kind) for name, kind in manifest.columns if name in needed)
    table, problems = read_rows(slices_of(manifest, window), columns, manifest.filters)
    if problems:
        raise problems.error(int(problems.rows()[0]))
    column = table.column(feature.column)
    empty = counts(pa.array([], _id_type(column.type)))
    return add_up(pa.concat_tables([empty, *(counts(ids) for chunk in column.chunks for ids in ids_of(chunk))]))


def ids_of(array: pa.Array) -> Iterator[pa.Array]:
    """The ids of a column, those of lists one by one, without nulls."""
    array = array.cast(without_views(array.type))
    while is_list(array.type):
        array = unnest(array).leaf
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "id")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    yield array.drop_null().cast(_id_type(array.type))


def _id_type(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        kind = kind.field("id").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return without_views(kind)


def counts(ids: pa.Array) -> pa.Table:
    """How often each comes: `id` and `count`."""
    found = ids.value_counts()
    return pa.table({"id": found.field("values"), "count": found.field("counts")})


def add_up(table: pa.Table) -> pa.Table:
    """Each id once, with the sum of its counts."""
    summed = table.group_by("id").aggregate([("count", "sum")])
    return pa.table({"id": summed["id"], "count": summed["count_sum"]})
