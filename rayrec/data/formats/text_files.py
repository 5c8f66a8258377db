"""Reads CSV and JSON lines as a stream of Arrow batches, through pyarrow; errors name the line."""

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

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.locations import open_filesystem

NULLS = ["", "NULL", "null", "\\N"]  # not NA: a country
_BLOCK_BYTES = 8 << 20
_LOOK_BYTES = 1 << 18
_LOOK_LINES = 1000
_VALUE = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\d{4}-\d\d-\d\d\b.*")


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a CSV file before it is read.

    Args:
        columns: their names, `c0`, `c1`, … without a header; empty where no line could be looked at.
        header: whether the first line holds the names.
        padded: columns whose texts all begin with a space.
    """

    columns: list[str]
    header: bool
    padded: frozenset[str]


def look(stream: pa.NativeFile, delimiter: str, header: bool | None) -> Look:
    """Looks at the first lines.

    A first line with a number or a date among its cells holds data: columns are not named so. The same is true of one
    of which half of the cells come again below, in their column, where names do not come.

    Args:
        header: what the user says, if he does.
    """
    lines = _lines(stream, delimiter)
    if not lines:
        return Look([], header is not False, frozenset())
    first, below = lines[0], lines[1:]
    if header is None:
        named = not any(_VALUE.fullmatch(cell.strip()) for cell in first)
        header = named and 2 * _coming_again(first, below) < len(first)
    columns = first if header else [f"c{at}" for at in range(len(first))]
    rows = below if header else lines
    cells = {name: [row[at] for row in rows if at < len(row) and row[at]] for at, name in enumerate(columns)}
    padded = (name for name, some in cells.items() if some and all(cell.startswith(" ") for cell in some))
    return Look(columns, header, frozenset(padded))


def _lines(stream: pa.NativeFile, delimiter: str) -> list[list[str]]:
    """The cells of the first lines, all of them whole."""
    data = stream.read(_LOOK_BYTES)
    text = data.decode("utf-8-sig", errors="replace")
    if len(data) == _LOOK_BYTES:
        text = text[: text.rfind("\n") + 1]
    try:
        return [line for line in islice(csv.reader(io.StringIO(text), delimiter=delimiter), _LOOK_LINES) if line]
    except csv.Error:  # a cell too long for Python's reader
        return []


def _coming_again(first: Sequence[str], below: Sequence[Sequence[str]]) -> int:
    return sum(
        bool(cell) and any(at < len(line) and line[at] == cell for line in below) for at, cell in enumerate(first)
    )


@dataclass(frozen=True, slots=True)
class Csv:
    """Text with one row a line. Empty cells, `NULL` and `\\N` are nulls.

    Args:
        header: whether the first line names the columns; None: judged by the first lines (`look`). Without,
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
        raise DataError(f"the file cannot be opened: {first_line(error)}", file=uri, fix="check it") from error


def _wrong(uri: str, line: int | None, text: str, column: str | None) -> DataError:
    fix = "correct the line, or say what the column holds, e.g. --type user=string (its first rows looked otherwise)"
    text = re.sub(r" in row \d+$", "", text.splitlines()[0])
    return DataError(text if line is None else f"line {line}: {text}", file=uri, row=line, column=column, fix=fix)
