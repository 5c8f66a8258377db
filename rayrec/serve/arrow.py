"""Reads Arrow IPC streams from untrusted clients, without allocating much more memory than the stream has bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_text
from rayrec.inference.context import I64
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits

_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2  # MessageHeader in Arrow's Message.fbs
_COMPRESSION = 3  # field of RecordBatch; of DictionaryBatch, field 1 is its RecordBatch
_VALUE_BYTES = 8  # of a number, or of the position of a text


def read_stream(body: bytes, limits: Limits) -> pa.Table:
    """
    Raises:
        RequestError: The body is not a stream or is compressed, it has no rows or too many, or its values would be
            too large once they are decoded.
    """
    try:
        rows = 0
        for header in _headers(body):
            count, compressed = _batch(bytes(header))
            if compressed:
                raise RequestError(400, "the Arrow stream is compressed: write it uncompressed")
            rows += count
        limits.check_rows(rows)
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
        table.validate(full=True)
        for name, kind in zip(table.column_names, table.schema.types, strict=True):
            if _is_run_end_encoded(kind):
                raise RequestError(422, f"column {name!r} is run-end encoded: send plain values")
        limits.check_decoded(decoded_bytes(table, limits.decoded_bytes))
        return table
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error, MemoryError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise RequestError(400, f"the body is not an Arrow IPC stream: {lines[0][:300]}") from error


def _headers(body: bytes) -> Iterator[pa.Buffer]:
    """The metadata of all messages."""
    for message in pa.ipc.MessageReader.open_stream(body):
        yield message.metadata


def _batch(metadata: bytes) -> tuple[int, bool]:
    """The rows of a message, and whether its buffers are compressed.

    The decompressed size is whatever the sender claims, so compressed streams must be refused before they are read.
    """
    message = struct.unpack_from("<I", metadata, 0)[0]
    kind_at, header_at = _field(metadata, message, 1), _field(metadata, message, 2)
    kind = metadata[kind_at] if kind_at and header_at else 0
    if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH):
        return 0, False
    header = _table(metadata, header_at)
    if kind == _DICTIONARY_BATCH:
        header = _table(metadata, _field(metadata, header, 1))
    length = _field(metadata, header, 0)
    rows = struct.unpack_from("<q", metadata, length)[0] if length and kind == _RECORD_BATCH else 0
    return max(rows, 0), bool(_field(metadata, header, _COMPRESSION))


def _table(data: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int:
    """Offset of a field of a flatbuffers table; 0 if the table does not have it."""
    vtable = table - int(struct.unpack_from("<i", data, table)[0])
    size = struct.unpack_from("<H", data, vtable)[0]
    if 4 + 2 * number + 2 > size:
        return 0
    offset = int(struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0])
    return table + offset if offset else 0


def _is_run_end_encoded(kind: pa.DataType) -> bool:
    """Whether the type is run-end encoded, at any depth."""
    fields = range(kind.num_fields)
    return pat.is_run_end_encoded(kind) or any(_is_run_end_encoded(kind.field(number).type) for number in fields)


def decoded_bytes(table: pa.Table, most: int) -> int:
    """The size of the table's values as the mapping decodes them: 8 bytes for each value and element, and all texts.

    A few bytes of a stream may stand for many values: a list of nulls has none, views and dictionaries repeat theirs.

    Returns:
        The size; some size above `most` if it exceeds that.
    """
    total = 0
    for column in table.columns:
        for array in column.chunks:
            elements = _elements(array, most // _VALUE_BYTES)
            if total + elements * _VALUE_BYTES > most:
                return total + elements * _VALUE_BYTES
            total += int(_sizes(array).sum()) if _repeats(array.type) else elements * _VALUE_BYTES
    return total


def _elements(array: pa.Array, most: int) -> int:
    """The number of values of an array and its children, without reading them; views as they are stored."""
    count = len(array)
    for child in _children(array):
        if count > most:
            break
        count += _elements(child, most - count)
    return count


def _children(array: pa.Array) -> list[pa.Array]:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return [array.storage]
    if pat.is_map(kind):
        return [array.keys, array.items]
    if _is_listed(kind):
        return [array.values]
    if pat.is_struct(kind):
        return [array.field(number) for number in range(kind.num_fields)]
    return [array.dictionary] if pat.is_dictionary(kind) else []


def _is_listed(kind: pa.DataType) -> bool:
    return pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind) or _is_list_view(kind)


def _is_list_view(kind: pa.DataType) -> bool:
    return pat.is_list_view(kind) or pat.is_large_list_view(kind)


def _repeats(kind: pa.DataType) -> bool:
    """Whether values may share the same bytes, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return _repeats(kind.storage_type)
    if pat.is_dictionary(kind) or _is_list_view(kind) or pat.is_string_view(kind) or pat.is_binary_view(kind):
        return True
    return any(_repeats(kind.field(number).type) for number in range(kind.num_fields))


def _sizes(array: pa.Array) -> I64:
    """The decoded bytes of each value."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if pat.is_dictionary(kind):
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        # The mapping reads an index that is null as any value, if there is one.
        return _sizes(array.dictionary)[indices] if len(array.dictionary) else np.zeros(len(array), np.int64)
    sizes = np.full(len(array), _VALUE_BYTES, np.int64)
    if is_text(kind) or pat.is_fixed_size_binary(kind):
        return sizes + pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    if pat.is_struct(kind):
        return sizes + sum(map(_sizes, _children(array)))
    if _is_listed(kind) or pat.is_map(kind):
        items = sum(map(_sizes, _children(array)))
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(items)])
        starts, stops = _spans(array)
        return sizes + ends[stops] - ends[starts]
    return sizes


def _spans(array: pa.Array) -> tuple[I64, I64]:
    """Start and end of each list in the values; empty for null lists."""
    if pat.is_fixed_size_list(array.type):
        starts = np.arange(array.offset, array.offset + len(array)) * array.type.list_size
        return starts, starts + array.type.list_size
    offsets = array.offsets.to_numpy().astype(np.int64)
    if not _is_list_view(array.type):
        return offsets[:-1], offsets[1:]
    lengths = array.sizes.to_numpy().astype(np.int64)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(valid, offsets, 0), np.where(valid, offsets + lengths, 0)
