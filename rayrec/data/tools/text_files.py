"""Reads CSV and JSON lines as a stream of Arrow batches, through pyarrow; errors name the line."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from rayrec.data.errors import DataError
from rayrec.data.storage.locations import open_filesystem
from rayrec.data.tools.csv_look import Look, look

NULLS = ["", "NULL", "null", "\\N"]  # not NA: a country
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Csv:
    """Text with one row a line. Empty cells, `NULL` and `\\N` are nulls.

    Args:
        header: whether the first line names the columns; None: judged by the first lines (`csv_look.py`). Without,
            columns are `c0`, `c1`, …
    """

    delimiter: str = ","
    header: bool | None = None

    def look(self, uri: str) -> Look:
        """What the first lines show."""
        try:
            return look(_stream(uri), self.delimiter, self.header)
        except (OSError, pa.ArrowException) as error:
            raise _wrong(uri, None, str(error), None) from error

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, judged by the first 8 MB.

        Raises:
            DataError: the file is empty, or not text of this form.
        """
        try:
            return self._open(uri, None, self.look(uri)).schema
        except pa.ArrowInvalid as error:
            raise self._place(uri, None, error) from error

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; a column that the file lacks is null.

        Raises:
            DataError: a line with too many or too few cells, or a cell that is not of its column's type.
        """
        found = self.look(uri)
        try:
            for batch in self._open(uri, schema, found):
                yield _stripped(batch, found)
        except pa.ArrowInvalid as error:
            raise self._place(uri, schema, error) from error

    def _place(self, uri: str, schema: pa.Schema | None, error: Exception) -> DataError:
        if str(error).startswith("Empty CSV file"):
            return DataError("the file is empty", file=uri, fix="leave it out")
        found = re.search(r"Row #(\d+): (.*)", str(error))
        line, text = (int(found[1]), found[2]) if found else (None, str(error))
        column = re.search(r"In CSV column #(\d+)", str(error))
        return _wrong(uri, line, text, schema.names[int(column[1])] if column and schema else None)

    def _open(self, uri: str, schema: pa.Schema | None, found: Look) -> pacsv.CSVStreamingReader:
        names = None if schema is None else schema.names
        return pacsv.open_csv(
            _stream(uri),
            # One thread: only then does pyarrow know in which line it is. Files are read side by side.
            read_options=pacsv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=False,
                column_names=None if found.header else found.columns,
                autogenerate_column_names=not found.header and not found.columns,
            ),
            parse_options=pacsv.ParseOptions(delimiter=self.delimiter),
            convert_options=pacsv.ConvertOptions(
                column_types=schema,
                include_columns=names,
                include_missing_columns=schema is not None,
                strings_can_be_null=True,
                null_values=[*NULLS, *(f" {null}" for null in NULLS)] if found.padded else NULLS,
            ),
        )


def _stripped(batch: pa.RecordBatch, found: Look) -> pa.RecordBatch:
    """Without the spaces before the texts of padded columns."""
    for at, field in enumerate(batch.schema):
        if field.name in found.padded and pa.types.is_string(field.type):
            batch = batch.set_column(at, field, pc.utf8_ltrim(batch.column(at), " "))
    return batch


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object a line; its fields are the columns."""

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, judged by the first 8 MB."""
        try:
            return self._open(_stream(uri), None).schema
        except pa.ArrowInvalid as error:
            raise self._place(uri, None, 0, error) from error

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; a field that a line lacks is null.

        Raises:
            DataError: a line that is no JSON object, has an unknown field, or a value of another type.
        """
        rows = 0
        try:
            for batch in self._open(_stream(uri), schema):
                yield batch
                rows += batch.num_rows
        except pa.ArrowInvalid as error:
            raise self._place(uri, schema, rows, error) from error

    def _place(self, uri: str, schema: pa.Schema | None, rows: int, error: Exception) -> DataError:
        """pyarrow counts lines from the start of some block: look for the first line that it refuses by itself."""
        size = 0
        for number, line in enumerate(io.BufferedReader(_stream(uri)), 1):
            size += len(line)
            if schema is None and size > _BLOCK_BYTES:
                break
            if not line.strip():
                continue
            rows -= 1
            if rows >= 0:
                continue
            try:
                for _ in self._open(io.BytesIO(line), schema):
                    pass
            except pa.ArrowInvalid as found:
                return _wrong(uri, number, str(found), None)
        # Lines that are good by themselves but differ, in the first block.
        row = re.search(r" in row (\d+)", str(error)) if schema is None else None
        return _wrong(uri, None if row is None else int(row[1]) + 1, str(error), None)

    def _open(self, stream: pa.NativeFile | io.BytesIO, schema: pa.Schema | None) -> pajson.JSONStreamingReader:
        return pajson.open_json(
            stream,
            read_options=pajson.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            parse_options=pajson.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
            ),
        )


def _stream(uri: str) -> pa.NativeFile:
    filesystem, path = open_filesystem(uri)
    try:
        return filesystem.open_input_stream(path, compression="detect")
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the file cannot be opened: {str(error).splitlines()[0]}", file=uri, fix="check it") from error


def _wrong(uri: str, line: int | None, text: str, column: str | None) -> DataError:
    fix = "correct the line, or say what the column holds, e.g. --type user=string (its first rows looked otherwise)"
    text = re.sub(r" in row \d+$", "", text.splitlines()[0])
    return DataError(text if line is None else f"line {line}: {text}", file=uri, row=line, column=column, fix=fix)
