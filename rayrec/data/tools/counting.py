"""Ids of a column, how often each comes, and sums of that."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.mapping.arrow_types import is_list, without_views
from rayrec.data.mapping.lists import unnest


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
