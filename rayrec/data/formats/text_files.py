"""Reads CSV and JSON lines as streams of Arrow batches, through pyarrow. Errors name the line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from rayrec.storage.column_names import equal_names
from rayrec.storage.errors import DataError, first_line
from rayrec.storage.locations import open_filesystem

# Without "NA", which is also a country code.
NULLS = ["", "NULL", "null", "\\N"]
_BLOCK_BYTES = 8 << 20
_LOOK_BYTES = 1 << 18
_LOOK_LINES = 1000
_VALUE = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\d{4}-\d\d-\d\d\b.*")


@dataclass(frozen=True, slots=True)
class CsvLayout:
    """The layout of a CSV file, guessed from its first lines.

    Args:
        columns: column names; `c0`, `c1`, … without a header; empty if no line could be parsed.
        header: True if the first line holds the names.
        padded: columns in which every value starts with a space.
    """

    columns: list[str]
    header: bool
    padded: frozenset[str]


def guess_layout(stream: pa.NativeFile, delimiter: str, header: bool | None) -> CsvLayout:
    """Guesses the layout from the first lines.

    The first line is data, not a header, if one of its cells is a number or a date, or if at least half of its cells
    occur again in later lines of the same column.

    Args:
        header: overrides the guess.
    """
    lines = _lines(stream, delimiter)
    if not lines:
        return CsvLayout([], header is not False, frozenset())
    first_cells, lower_lines = lines[0], lines[1:]
    if header is None:
        named = not any(_VALUE.fullmatch(cell.strip()) for cell in first_cells)
        header = named and 2 * _repeated_cells(first_cells, lower_lines) < len(first_cells)
    columns = first_cells if header else [f"c{position}" for position in range(len(first_cells))]
    rows = lower_lines if header else lines
    cells = {
        name: [row[position] for row in rows if position < len(row) and row[position]]
        for position, name in enumerate(columns)
    }
    padded = (name for name, values in cells.items() if values and all(cell.startswith(" ") for cell in values))
    return CsvLayout(columns, header, frozenset(padded))


def _lines(stream: pa.NativeFile, delimiter: str) -> list[list[str]]:
    """The cells of the first complete lines."""
    data = stream.read(_LOOK_BYTES)
    text = data.decode("utf-8-sig", errors="replace")
    if len(data) == _LOOK_BYTES:
        text = text[: text.rfind("\n") + 1]
    try:
        return [line for line in islice(csv.reader(io.StringIO(text), delimiter=delimiter), _LOOK_LINES) if line]
    except csv.Error:  # a cell longer than Python's reader allows
        return []


def _repeated_cells(first_cells: Sequence[str], lower_lines: Sequence[Sequence[str]]) -> int:
    return sum(
        bool(cell) and any(position < len(line) and line[position] == cell for line in lower_lines)
        for position, cell in enumerate(first_cells)
    )


@dataclass(frozen=True, slots=True)
class Csv:
    """Text with one row a line. Empty cells, `NULL` and `\\N` are nulls.

    Args:
        header: True if the first line names the columns; None: guessed by `guess_layout`. Without a header, columns
            are `c0`, `c1`, …
    """

    delimiter: str = ","
    header: bool | None = None

    def layout(self, uri: str) -> CsvLayout:
        """The layout of the file, as `guess_layout` finds it."""
        try:
            return guess_layout(_stream(uri), self.delimiter, self.header)
        except (OSError, pa.ArrowException) as error:
            raise _wrong(uri, None, str(error), None) from error

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, inferred from the first 8 MB.

        Raises:
            DataError: the file is empty, or cannot be parsed as CSV.
        """
        try:
            return self._open(uri, None, self.layout(uri)).schema
        except pa.ArrowInvalid as error:
            raise self._locate(uri, None, error) from error

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing columns are null.

        Raises:
            DataError: a line with too many or too few cells, or a cell of another type than its column.
        """
        layout = self.layout(uri)
        try:
            for batch in self._open(uri, schema, layout):
                yield _stripped(batch, layout)
        except pa.ArrowInvalid as error:
            raise self._locate(uri, schema, error) from error

    def _locate(self, uri: str, schema: pa.Schema | None, error: Exception) -> DataError:
        if str(error).startswith("Empty CSV file"):
            return DataError("the file has no rows", file=uri, fix="remove it")
        row = re.search(r"Row #(\d+): (.*)", str(error))
        line, text = (int(row[1]), row[2]) if row else (None, str(error))
        column = re.search(r"In CSV column #(\d+)", str(error))
        return _wrong(uri, line, text, schema.names[int(column[1])] if column and schema else None)

    def _open(self, uri: str, schema: pa.Schema | None, layout: CsvLayout) -> pacsv.CSVStreamingReader:
        names = None if schema is None else schema.names
        return pacsv.open_csv(
            _stream(uri),
            # pyarrow knows the line number of an error only with one thread. Files are read in parallel.
            read_options=pacsv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=False,
                column_names=None if layout.header else layout.columns,
                autogenerate_column_names=not layout.header and not layout.columns,
            ),
            parse_options=pacsv.ParseOptions(delimiter=self.delimiter),
            convert_options=pacsv.ConvertOptions(
                column_types=schema,
                include_columns=names,
                include_missing_columns=schema is not None,
                strings_can_be_null=True,
                null_values=[*NULLS, *(f" {null}" for null in NULLS)] if layout.padded else NULLS,
            ),
        )


def _stripped(batch: pa.RecordBatch, layout: CsvLayout) -> pa.RecordBatch:
    """Strips the leading spaces of padded columns."""
    for position, field in enumerate(batch.schema):
        if field.name in layout.padded and pa.types.is_string(field.type):
            batch = batch.set_column(position, field, pc.utf8_ltrim(batch.column(position), " "))
    return batch


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object per line; its fields are the columns.

    Args:
        block_bytes: size of the blocks to parse; None: 8 MB.
    """

    block_bytes: int | None = None

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, inferred from the first 8 MB."""
        try:
            return self._open(_stream(uri), None).schema
        except pa.ArrowInvalid as error:
            raise self._locate(uri, None, 0, error) from error

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing fields are null.

        Raises:
            DataError: a line that is not a JSON object, has an unknown field, or a value of another type.
        """
        rows = 0
        try:
            for batch in self._open(_stream(uri), schema):
                yield batch
                rows += batch.num_rows
        except pa.ArrowInvalid as error:
            raise self._locate(uri, schema, rows, error) from error

    def _locate(self, uri: str, schema: pa.Schema | None, rows: int, error: Exception) -> DataError:
        """Finds the line of an error by parsing line by line: pyarrow counts lines within a block."""
        size = 0
        for number, line in enumerate(io.BufferedReader(_stream(uri)), 1):
            size += len(line)
            if schema is None and size > (self.block_bytes or _BLOCK_BYTES):
                break
            if not line.strip():
                continue
            rows -= 1
            if rows >= 0:
                continue
            try:
                for _ in self._open(io.BytesIO(line), schema):
                    pass
            except pa.ArrowInvalid as line_error:
                return _wrong(uri, number, str(line_error), None)
        # Each line is valid, but their types differ within the first block.
        row = re.search(r" in row (\d+)", str(error)) if schema is None else None
        return _wrong(uri, None if row is None else int(row[1]) + 1, str(error), None)

    def _open(self, stream: pa.NativeFile | io.BytesIO, schema: pa.Schema | None) -> pajson.JSONStreamingReader:
        return pajson.open_json(
            stream,
            read_options=pajson.ReadOptions(block_size=self.block_bytes or _BLOCK_BYTES, use_threads=False),
            parse_options=pajson.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
            ),
        )


def _stream(uri: str) -> pa.NativeFile:
    filesystem, path = open_filesystem(uri)
    try:
        return filesystem.open_input_stream(path, compression="detect")
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"cannot open the file: {first_line(error)}", file=uri, fix="check path and permissions"
        ) from error


def _wrong(uri: str, line: int | None, text: str, column: str | None) -> DataError:
    if repeated := re.search(r"Column\(/?(.*)\) was specified twice", text):
        return equal_names(repeated[1], [uri])
    fix = "correct the line, or set the column's type, e.g. --type user=string (it is inferred from the first rows)"
    text = re.sub(r" in row \d+$", "", text.splitlines()[0])
    return DataError(text if line is None else f"line {line}: {text}", file=uri, row=line, column=column, fix=fix)
