"""Arrow list columns taken apart into offsets and leaf values, and edits of such lists without a loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import decoded, is_list, nulls_of, without_views
from rayrec.data.arrays.buffers import I64, Mask, empty

N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Lists:
    """A list column of n rows.

    Args:
        leaf: the lists' values, one after the other, nothing else.
        offsets: [n + 1], starting at 0.
        nulls: [n], which lists are null (they have no values here); None when none is.
    """

    leaf: pa.Array
    offsets: I64
    nulls: Mask | None


def take_bags(values: npt.NDArray[N], offsets: I64, order: I64) -> tuple[npt.NDArray[N], I64]:
    """The bags `order[0]`, `order[1]`, … one after the other, and where each starts.

    To Arrow a bag is a string of bytes, so that it is moved as a whole instead of number by number.

    Args:
        values: of all bags.
        offsets: [n + 1], where each bag starts in `values`, and where the last one ends.
        order: each in `[0, n)`, which is not checked.
    """
    size = values.itemsize
    places = pa.py_buffer(offsets * size)
    bags = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, places, pa.py_buffer(np.ascontiguousarray(values))]
    )
    _, places, taken = pc.take(bags, pa.array(order), boundscheck=False).buffers()
    starts = empty(len(order) + 1, np.int64)
    np.floor_divide(np.frombuffer(places, np.int64, len(order) + 1), size, out=starts)
    return np.frombuffer(taken, values.dtype, int(starts[-1])), starts


def unnest(array: pa.Array) -> Lists:
    """One level of any Arrow list array, sliced or not."""
    nulls = nulls_of(array)
    if nulls is None and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return Lists(array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0], None)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return Lists(array.flatten(), offsets_of(lengths), nulls)


def ids_of(array: pa.Array) -> pa.Array:
    """The ids of a column, those of lists one by one, without nulls."""
    array = array.cast(without_views(array.type))
    while is_list(array.type):
        array = unnest(array).leaf
    array = pc.struct_field(array, "id") if pa.types.is_struct(array.type) else array
    return decoded(array).drop_null()


def offsets_of(lengths: npt.NDArray[np.integer]) -> I64:
    """Where lists of these lengths start, and the end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_of(offsets: I64, positions: I64) -> I64:
    """The row that each position of the leaf belongs to."""
    return np.searchsorted(offsets, positions, side="right") - 1


def truncate(offsets: I64, max_length: int, keep: str) -> tuple[I64, I64] | None:
    """(leaf positions to keep, new offsets) so that no list is longer than `max_length`; None when none is.

    Args:
        keep: "first" or "last".
    """
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= max_length:
        return None
    kept = np.minimum(lengths, max_length)
    new_offsets = offsets_of(kept)
    firsts = offsets[:-1] if keep == "first" else offsets[1:] - kept
    positions = np.repeat(firsts - new_offsets[:-1], kept) + np.arange(new_offsets[-1])
    return positions, new_offsets


def filtered_offsets(offsets: I64, keep: Mask) -> I64:
    """The offsets of the lists after the leaf values that are not kept are taken out."""
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return before[offsets]
