"""Questions about Arrow types that pyarrow answers in several calls, and newer layouts in older ones."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat


def is_list(kind: pa.DataType) -> bool:
    """Any of Arrow's list layouts."""
    return (
        pat.is_list(kind)
        or pat.is_large_list(kind)
        or pat.is_fixed_size_list(kind)
        or pat.is_list_view(kind)
        or pat.is_large_list_view(kind)
    )


def leaf_of(kind: pa.DataType) -> pa.DataType:
    """What the lists of a list type hold at last; another type itself."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def is_text(kind: pa.DataType) -> bool:
    """Strings and bytes of any layout, dictionary-encoded or not."""
    if pat.is_dictionary(kind):
        kind = kind.value_type
    return (
        pat.is_string(kind)
        or pat.is_large_string(kind)
        or pat.is_string_view(kind)
        or pat.is_binary(kind)
        or pat.is_large_binary(kind)
        or pat.is_binary_view(kind)
    )


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type that Arrow's compute functions know for one of the newer view layouts, at any depth."""
    if pat.is_string_view(kind):
        return pa.large_string()
    if pat.is_binary_view(kind):
        return pa.large_binary()
    if pat.is_struct(kind):
        return pa.struct([field.with_type(without_views(field.type)) for field in kind.fields])
    if not is_list(kind):
        return kind
    item = kind.value_field.with_type(without_views(kind.value_type))
    if pat.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    large = pat.is_large_list(kind) or pat.is_large_list_view(kind)
    return pa.large_list(item) if large else pa.list_(item)


def from_list_view(array: pa.ListViewArray | pa.LargeListViewArray) -> pa.Array:
    """The same lists, one after another; pyarrow's own cast loses values of views that overlap or are out of order."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(lengths.cast(pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    mask = array.is_null() if array.null_count else None
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=mask)
