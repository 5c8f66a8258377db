"""Reads Arrow IPC streams from untrusted clients, without allocating much more memory than the stream has bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits

_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2  # MessageHeader in Arrow's Message.fbs
_COMPRESSION = 3  # field of RecordBatch; of DictionaryBatch, field 1 is its RecordBatch
_MAX_TEXT_BYTES = 64 << 20  # of a column, once every row has its own copy


def read_stream(body: bytes, limits: Limits) -> pa.Table:
    """
    Raises:
        RequestError: The body is not a stream or is compressed, it has no rows or too many, or copies of
            values that its rows share would be too large.
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
        for name, column in zip(table.column_names, table.columns, strict=True):
            _check_copies(name, column, limits)
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


def _check_copies(name: str, column: pa.ChunkedArray, limits: Limits) -> None:
    """Limits the size of views, in which many rows may share the same bytes: mapping copies them for each row."""
    kind = column.type
    if pat.is_run_end_encoded(kind):
        raise RequestError(422, f"column {name!r} is run-end encoded: send plain values")
    if pat.is_list_view(kind) or pat.is_large_list_view(kind):
        count = pc.sum(pc.list_value_length(column)).as_py() or 0
        limits.check_ids(count)
    if pat.is_string_view(kind) or pat.is_binary_view(kind):
        size = pc.sum(pc.binary_length(column)).as_py() or 0
        if size > _MAX_TEXT_BYTES:
            raise RequestError(
                413, f"column {name!r} has {size:,} bytes of text, at most {_MAX_TEXT_BYTES:,}; send fewer rows"
            )
