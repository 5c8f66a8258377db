"""Arrow list columns as offsets and values, and vectorized operations on them."""

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
        leaf: the values of all lists, concatenated.
        offsets: [n + 1], starting at 0.
        nulls: [n], True for null lists, which have no values; None without nulls.
    """

    leaf: pa.Array
    offsets: I64
    nulls: Mask | None


def take_bags(values: npt.NDArray[N], offsets: I64, order: I64) -> tuple[npt.NDArray[N], I64]:
    """Bags `order[0]`, `order[1]`, … concatenated, and their offsets.

    The bags are handed to Arrow as byte strings, so that `take` copies each as one block.

    Args:
        values: the values of all bags.
        offsets: [n + 1], positions in `values`.
        order: indices in `[0, n)`; they are not checked.
    """
    size = values.itemsize
    byte_offsets = pa.py_buffer(offsets * size)
    bags = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, byte_offsets, pa.py_buffer(np.ascontiguousarray(values))]
    )
    _, byte_offsets, taken_bytes = pc.take(bags, pa.array(order), boundscheck=False).buffers()
    starts = empty(len(order) + 1, np.int64)
    np.floor_divide(np.frombuffer(byte_offsets, np.int64, len(order) + 1), size, out=starts)
    return np.frombuffer(taken_bytes, values.dtype, int(starts[-1])), starts


def unnest(array: pa.Array) -> Lists:
    """Splits off one level of nesting from any Arrow list array, sliced or not."""
    nulls = nulls_of(array)
    if nulls is None and (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return Lists(array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0], None)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return Lists(array.flatten(), offsets_of(lengths), nulls)


def ids_of(array: pa.Array) -> pa.Array:
    """All ids of a column, from lists too, without nulls."""
    array = array.cast(without_views(array.type))
    while is_list(array.type):
        array = unnest(array).leaf
    array = pc.struct_field(array, "id") if pa.types.is_struct(array.type) else array
    return decoded(array).drop_null()


def offsets_of(lengths: npt.NDArray[np.integer]) -> I64:
    """The offsets of lists of these lengths, [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def row_of(offsets: I64, positions: I64) -> I64:
    """The row of each position in the leaf."""
    return np.searchsorted(offsets, positions, side="right") - 1


def truncate(offsets: I64, max_length: int, keep: str) -> tuple[I64, I64] | None:
    """Cuts lists to `max_length`: the leaf positions that remain, and new offsets. None if no list is longer.

    Args:
        keep: the end of a list that remains, "first" or "last".
    """
    lengths = np.diff(offsets)
    if not len(lengths) or lengths.max() <= max_length:
        return None
    new_lengths = np.minimum(lengths, max_length)
    new_offsets = offsets_of(new_lengths)
    firsts = offsets[:-1] if keep == "first" else offsets[1:] - new_lengths
    positions = np.repeat(firsts - new_offsets[:-1], new_lengths) + np.arange(new_offsets[-1])
    return positions, new_offsets


def filtered_offsets(offsets: I64, keep: Mask) -> I64:
    """The offsets of the lists after filtering the leaf by the mask `keep`."""
    kept_before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=kept_before[1:])
    return kept_before[offsets]
