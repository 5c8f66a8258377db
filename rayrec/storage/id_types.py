"""Types of files that hold ids: UUIDs are read as texts, as requests write them, other fixed-size binary as bytes, and
decimals without a fraction as integers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

_UUID = pa.uuid()
_HEX = np.array([f"{byte:02x}".encode() for byte in range(256)], "S2").view(np.uint8).reshape(256, 2)
# Positions of the 32 digits in the text, between the dashes.
_DIGITS = np.array([position for position in range(36) if position not in (8, 13, 18, 23)])


# By type id, which costs a tenth of the tests below: requests test each of their columns.
_OTHERS = {kind.id for kind in (_UUID, pa.decimal128(1, 0), pa.decimal256(1, 0), pa.binary(1))}
_OTHERS |= {kind.id for kind in (pa.decimal32(1, 0), pa.decimal64(1, 0))}


def type_as_read(kind: pa.DataType) -> pa.DataType:
    """The type that a column of a file has in rayrec."""
    if kind.id not in _OTHERS:
        return kind
    if kind == _UUID:
        return pa.string()
    if pat.is_decimal(kind) and kind.scale == 0:
        return pa.int64()
    return pa.binary() if pat.is_fixed_size_binary(kind) else kind


def column_as_read(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The values of a column in the type of `type_as_read`.

    Raises:
        pa.ArrowInvalid: a decimal beyond 64 bits.
    """
    if isinstance(column, pa.ChunkedArray) and column.type == _UUID:
        return pa.chunked_array([_texts(chunk) for chunk in column.chunks], pa.string())
    if column.type == _UUID:
        return _texts(column)
    kind = type_as_read(column.type)
    return column if kind == column.type else column.cast(kind)


def _texts(uuids: pa.ExtensionArray) -> pa.Array:
    """The canonical texts of UUIDs, e.g. 550e8400-e29b-41d4-a716-446655440000."""
    storage = uuids.storage
    valid = storage.is_valid()
    values = np.frombuffer(b"".join(storage.drop_null().to_pylist()), np.uint8).reshape(-1, 16)
    texts = np.full((len(values), 36), ord("-"), np.uint8)
    texts[:, _DIGITS] = _HEX[values].reshape(-1, 32)
    present = pa.array(texts.view("S36").reshape(-1).astype(str), pa.string())
    if len(present) == len(storage):
        return present
    positions = np.cumsum(valid.to_numpy(zero_copy_only=False)) - 1
    return present.take(pa.array(positions, mask=~valid.to_numpy(zero_copy_only=False)))
