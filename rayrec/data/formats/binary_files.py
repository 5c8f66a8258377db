"""Reads Avro (by fastavro) and ORC (by pyarrow, stripe by stripe) as streams of Arrow batches."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.orc as paorc

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.locations import open_filesystem

_ROWS = 8192
_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL = {
    "date": pa.date32(),
    "timestamp-millis": pa.timestamp("ms", "UTC"),
    "timestamp-micros": pa.timestamp("us", "UTC"),
    "timestamp-nanos": pa.timestamp("ns", "UTC"),
    "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"),
    "local-timestamp-nanos": pa.timestamp("ns"),
    "time-millis": pa.time32("ms"),
    "time-micros": pa.time64("us"),
    "uuid": pa.string(),
}
_MAX_DIGITS = 76  # of Arrow's decimals


@dataclass(frozen=True, slots=True)
class Avro:
    """Avro object container files."""

    def schema(self, uri: str) -> pa.Schema:
        """The file's schema as an Arrow schema.

        Raises:
            DataError: not an Avro file, a type without an Arrow equivalent, or fastavro is not installed.
        """
        writer = _reader(uri).writer_schema
        if not isinstance(writer, dict) or writer.get("type") != "record":
            raise DataError(
                "the Avro schema is not a record", file=uri, fix="write records; their fields become columns"
            )
        known: dict[str, Any] = {}  # a type that one field names may be used by the next ones
        return pa.schema([(f["name"], _arrow(f["type"], known, uri, f["name"])) for f in writer["fields"]])

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing columns are null.

        Raises:
            DataError: a block that cannot be decoded, or a value of another type than its column.
        """
        records, done = _reader(uri), 0
        has_uuids = '"uuid"' in json.dumps(records.writer_schema)
        while True:
            try:
                rows = list(islice(records, _ROWS))
                batch = pa.RecordBatch.from_pylist(_uuids_as_texts(rows) if has_uuids else rows, schema)
            except Exception as error:  # fastavro raises any error of its decoders
                raise DataError(
                    f"cannot read rows from {done} on: {type(error).__name__}: {error}",
                    file=uri,
                    fix="write the file again, or set a column's type, e.g. --type user=string",
                ) from error
            if not rows:
                return
            yield batch
            done += len(rows)


def _reader(uri: str) -> Any:
    try:
        import fastavro
    except ImportError as error:
        raise DataError("reading Avro needs fastavro", file=uri, fix="pip install 'rayrec[avro]'") from error
    filesystem, path = open_filesystem(uri)
    try:
        return fastavro.reader(io.BufferedReader(filesystem.open_input_stream(path)))
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"cannot read the file as Avro: {error}", file=uri, fix="write the file again") from error


def _arrow(kind: Any, known: dict[str, pa.DataType], uri: str, column: str) -> pa.DataType:
    """Converts an Avro type; `known` holds the named types seen so far."""
    if isinstance(kind, list):
        choices = list(dict.fromkeys(_arrow(choice, known, uri, column) for choice in kind if choice != "null"))
        if len(choices) == 1:
            return choices[0]
        if choices and all(pa.types.is_integer(c) or pa.types.is_floating(c) for c in choices):
            return pa.int64() if all(pa.types.is_integer(c) for c in choices) else pa.float64()
    elif isinstance(kind, str):
        if kind in _PLAIN or kind in known:
            return _PLAIN.get(kind) or known[kind]
    elif kind.get("logicalType") == "uuid" and kind["type"] == "fixed":
        return pa.uuid()
    elif kind.get("logicalType") in _LOGICAL:
        return _LOGICAL[kind["logicalType"]]
    elif kind.get("logicalType") == "decimal" and kind["precision"] <= _MAX_DIGITS:
        make = pa.decimal128 if kind["precision"] <= 38 else pa.decimal256
        return make(kind["precision"], kind.get("scale", 0))
    elif kind["type"] == "array":
        return pa.list_(_arrow(kind["items"], known, uri, column))
    elif kind["type"] in ("enum", "fixed"):
        return known.setdefault(kind["name"], pa.string() if kind["type"] == "enum" else pa.binary(kind["size"]))
    elif kind["type"] == "record":
        fields = [(f["name"], _arrow(f["type"], known, uri, column)) for f in kind["fields"]]
        return known.setdefault(kind["name"], pa.struct(fields))
    elif kind["type"] == "map":
        return pa.map_(pa.string(), _arrow(kind["values"], known, uri, column))
    elif kind.get("logicalType") != "decimal":
        return _arrow(kind["type"], known, uri, column)
    raise DataError(f"unsupported Avro type {kind}", file=uri, column=column, fix="leave the field out")


def _uuids_as_texts(value: Any) -> Any:
    """The value with texts in place of UUIDs at any depth; Arrow does not convert Python's UUIDs."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, list):
        return [_uuids_as_texts(item) for item in value]
    return {name: _uuids_as_texts(item) for name, item in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class Orc:
    """ORC files."""

    def schema(self, uri: str) -> pa.Schema:
        """The file's schema."""
        return _open_orc(uri).schema

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing columns are null.

        Raises:
            DataError: a stripe that cannot be decoded, or a value that cannot be cast to its column's type.
        """
        file = _open_orc(uri)
        for number in range(file.nstripes):
            try:
                stripe = file.read_stripe(number)
                arrays = [
                    stripe.column(name).cast(kind) if name in stripe.schema.names else pa.nulls(stripe.num_rows, kind)
                    for name, kind in zip(schema.names, schema.types, strict=True)
                ]
            except (pa.ArrowException, OSError) as error:
                problem = f"cannot read stripe {number}: {first_line(error)}"
                raise DataError(problem, file=uri, fix="write the file again") from error
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _open_orc(uri: str) -> paorc.ORCFile:
    filesystem, path = open_filesystem(uri)
    try:
        return paorc.ORCFile(filesystem.open_input_file(path))
    except (pa.ArrowException, OSError) as error:
        problem = f"cannot read the file as ORC: {first_line(error)}"
        raise DataError(problem, file=uri, fix="write the file again") from error
