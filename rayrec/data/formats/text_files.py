"""Reads CSV and JSON as streams of Arrow batches, through pyarrow. Errors name the line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.types as pat

from rayrec.data.formats.json_lines import as_json_lines, value_at
from rayrec.data.formats.text_cells import CellError, list_parser, list_type, number_type, numbers, times
from rayrec.data.formats.text_layout import Layout, find_layout
from rayrec.data.formats.text_options import TextOptions, TextReading
from rayrec.storage.column_names import equal_names
from rayrec.storage.errors import DataError, first_line
from rayrec.storage.locations import open_filesystem
from rayrec.storage.struct_fields import leaf_columns, with_types

_BLOCK_BYTES = 8 << 20
_LOOK_BYTES = 1 << 18
_LOOK_LINES = 1000
_ONE_CHARACTER = "\x1f"  # replaces a separator of several characters, which pyarrow does not take

Parse = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Csv:
    """Text with cells in lines.

    Args:
        separator: the usual separator of files with this suffix.
        reading: how to read the files.
    """

    separator: str = ","
    reading: TextReading = field(default_factory=TextReading)

    def layout(self, uri: str) -> Layout:
        """The layout of the file, as `find_layout` finds it."""
        try:
            data = _read(_stream(uri), _LOOK_BYTES)
            return find_layout(data, len(data) < _LOOK_BYTES, self.reading.options, self.separator)
        except DataError as error:
            raise error.at(uri, None, None) from error
        except (OSError, pa.ArrowException, ValueError) as error:
            fix = "check that the file is whole, and compressed and encoded as its name and --encoding say"
            raise _wrong(uri, None, str(error), None, fix) from error

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, inferred from the first 8 MB.

        Whole numbers beyond int64 are uint64 or text, and numbers with leading zeros are text.

        Raises:
            DataError: the file is empty, is not in the encoding, or cannot be parsed.
        """
        layout = self.layout(uri)
        try:
            found = self._open(uri, None, layout).schema
            if len(set(found.names)) < len(found.names):
                return found  # the caller refuses it, with other files like it
            unsure = [name for name in found.names if self._may_be_number(found.field(name))]
            text = pa.schema([pa.field(name, pa.string()) for name in unsure])
            first = next(iter(self._open(uri, text, layout)), None) if unsure else None
        except UnicodeDecodeError as error:  # in a name
            raise self._not_decoded(uri, None, layout) from error
        except pa.ArrowInvalid as error:
            raise self._locate(uri, None, error, layout) from error
        types = {column.name: column.type for column in found}
        if first is not None:
            types |= {name: self._type(name, first.column(name), types[name]) for name in unsure}
        for name, kind in types.items():
            if pat.is_binary(kind):
                raise self._not_decoded(uri, name, layout)
        return pa.schema(types | {name: kind for name, kind in self.reading.types.items() if name in types})

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing columns are null.

        Raises:
            DataError: a line with too many or too few cells, or a cell of another type than its column.
        """
        layout = self.layout(uri)
        parsers = {column.name: parser for column in schema if (parser := self._parser(column)) is not None}
        raw = pa.schema([pa.field(c.name, pa.string() if c.name in parsers else c.type) for c in schema])
        row = 1 + layout.comments + layout.header
        try:
            for batch in self._open(uri, raw, layout):
                yield _parsed(_stripped(batch, layout), schema, parsers, uri, row)
                row += batch.num_rows
        except pa.ArrowInvalid as error:
            raise self._locate(uri, raw, error, layout) from error

    def _may_be_number(self, column: pa.Field) -> bool:
        """Whether the type of a column needs a look at its text."""
        name, kind, options = column.name, column.type, self.reading.options
        if name in options.lists:
            return True
        if name in self.reading.types:
            return False
        return pat.is_integer(kind) or pat.is_floating(kind) or (options.thousands is not None and pat.is_string(kind))

    def _type(self, name: str, text: pa.Array, inferred: pa.DataType) -> pa.DataType:
        """The type of a column, from the text of its first cells."""
        options = self.reading.options
        if name in options.lists:
            return list_type(text, options.lists[name])
        whole = self.reading.kinds.get(name) == "integer"
        return number_type(text, inferred, options.decimal, options.thousands, leading_zeros=whole)

    def _parser(self, column: pa.Field) -> Parse | None:
        """What makes an array of a column's text, if pyarrow's own conversion is not enough."""
        name, kind, options = column.name, column.type, self.reading.options
        if (parser := _parser_of_option(column, options)) is not None:
            return parser
        zeros = name in options.types or self.reading.kinds.get(name) == "integer"
        if options.thousands is not None and (pat.is_integer(kind) or pat.is_floating(kind)):
            return numbers(kind, options.decimal, options.thousands, leading_zeros=zeros)
        return numbers(kind) if pat.is_integer(kind) and not zeros else None

    def _locate(self, uri: str, schema: pa.Schema | None, error: Exception, layout: Layout) -> DataError:
        if str(error).startswith("Empty CSV file"):
            return DataError("the file has no rows", file=uri, fix="remove it")
        row = re.search(r"Row #(\d+): (.*)", str(error))
        line, text = (int(row[1]), row[2]) if row else (None, str(error))
        column = re.search(r"In CSV column #(\d+)", str(error))
        name = schema.names[int(column[1])] if column and schema else None
        if "invalid UTF8" in text or "codec can't decode" in text:
            return self._not_decoded(uri, name, layout)
        if name is None:
            options = f"--separator (now {layout.separator!r}), --quote (now {self.reading.options.quote!r})"
            return _wrong(uri, line, text, None, f"correct the line, or say how cells are written: {options}, --escape")
        return _wrong(uri, line, text, name)

    def _not_decoded(self, uri: str, column: str | None, layout: Layout) -> DataError:
        """The error of a file in another encoding, with the first line that shows it."""
        for number, line in enumerate(io.BufferedReader(_stream(uri)), 1):
            try:
                line.decode(layout.encoding)
            except UnicodeDecodeError as error:
                problem = f"line {number}: the text is not {layout.encoding} (byte 0x{line[error.start]:02x})"
                fix = "give its encoding, e.g. --encoding latin-1 (data.read.text.encoding)"
                return DataError(problem, file=uri, row=number, column=column, fix=fix)
        return DataError(f"the text is not {layout.encoding}", file=uri, column=column, fix="give its --encoding")

    def _open(self, uri: str, schema: pa.Schema | None, layout: Layout) -> pacsv.CSVStreamingReader:
        options = self.reading.options
        stream: pa.NativeFile = _stream(uri)
        if layout.encoding != "utf-8":
            stream = pa.transcoding_input_stream(stream, layout.encoding, "utf-8")
        separator = layout.separator
        if len(separator) > 1:
            between = separator.encode()
            stream = pa.PythonFile(
                _Rewritten(stream, lambda lines: lines.replace(between, _ONE_CHARACTER.encode())), "r"
            )
            separator = _ONE_CHARACTER
        if layout.escape == "\\" and "\\N" in options.nulls:
            stream = pa.PythonFile(_Rewritten(stream, _with_plain_nulls(separator.encode())), "r")
        return pacsv.open_csv(
            stream,
            # pyarrow knows the line number of an error only with one thread. Files are read in parallel.
            read_options=pacsv.ReadOptions(
                block_size=_BLOCK_BYTES,
                use_threads=False,
                column_names=layout.columns if layout.renamed or not layout.header else None,
                autogenerate_column_names=not layout.header and not layout.columns,
                skip_rows=layout.comments,
                skip_rows_after_names=int(layout.renamed),
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=separator,
                quote_char=options.quote or False,
                double_quote=layout.escape is None,
                escape_char=layout.escape or False,
                newlines_in_values=bool(options.quote),
            ),
            convert_options=pacsv.ConvertOptions(
                column_types=schema,
                include_columns=None if schema is None else schema.names,
                include_missing_columns=schema is not None,
                strings_can_be_null=True,
                null_values=[*options.nulls, *(f" {null}" for null in options.nulls if layout.padded)],
                decimal_point=options.decimal,
            ),
        )


class _Rewritten(io.RawIOBase):
    """A stream of bytes whose lines pass a function."""

    def __init__(self, stream: pa.NativeFile, rewrite: Callable[[bytes], bytes]) -> None:
        self._stream, self._rewrite, self._ended = stream, rewrite, False
        self._rest = self._ready = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end."""
        while not self._ended and (size < 0 or len(self._ready) < size):
            data = self._stream.read(_BLOCK_BYTES)
            self._ended = not data
            text = self._rest + data
            end = len(text) if self._ended else 1 + max(text.rfind(b"\n"), text.rfind(b"\r"))
            self._ready, self._rest = self._ready + self._rewrite(text[:end]), text[end:]
        data, self._ready = (self._ready, b"") if size < 0 else (self._ready[:size], self._ready[size:])
        return data


def _with_plain_nulls(separator: bytes) -> Callable[[bytes], bytes]:
    r"""Escapes the backslash of cells `\N`, the null of databases, so that they are `\N` once unescaped."""
    between = re.escape(separator)
    null = re.compile(rb"((?<=%b)|(?<=[\r\n])|\A)\\N(?=%b|[\r\n]|\Z)" % (between, between))
    return lambda lines: null.sub(rb"\\\\N", lines)


def _stripped(batch: pa.RecordBatch, layout: Layout) -> pa.RecordBatch:
    """Strips the leading spaces of padded columns."""
    for position, column in enumerate(batch.schema):
        if column.name in layout.padded and pat.is_string(column.type):
            batch = batch.set_column(position, column, pc.utf8_ltrim(batch.column(position), " "))
    return batch


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object per line, one array of objects, or one Python dict per line; their fields are the columns.

    Args:
        reading: how to read the files.
        block_bytes: size of the blocks to parse; None: 8 MB.
    """

    reading: TextReading = field(default_factory=TextReading)
    block_bytes: int | None = None

    def schema(self, uri: str) -> pa.Schema:
        """Columns and types, inferred from the first 8 MB. Whole numbers beyond int64 are uint64.

        Raises:
            DataError: the file is empty, or not JSON; a column has values of several types.
        """
        try:
            found = self._open(self._lines(uri), None).schema
        except (pa.ArrowInvalid, ValueError) as error:
            raise self._locate(uri, None, 0, error) from error
        types: dict[str, pa.DataType] = {}
        if floats := [
            c.name for c in leaf_columns(found) if pat.is_float64(c.type) and c.name not in self.reading.types
        ]:
            types |= self._large(uri, floats)
        for name, separator in self.reading.options.lists.items():
            if name in found.names and pat.is_string(found.field(name).type):
                types[name] = list_type(self._open(self._lines(uri), found).read_next_batch().column(name), separator)
        return with_types(found, types | self.reading.types)

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; missing fields are null.

        Raises:
            DataError: a line that is not a JSON object, has an unknown field, or a value of another type.
        """
        rows = 0
        options = self.reading.options
        # A column that is null throughout stays null.
        texts = [c for c in schema if c.name not in options.lists or pat.is_list(c.type)]
        parsers = {c.name: parser for c in texts if (parser := _parser_of_option(c, options)) is not None}
        raw = pa.schema([pa.field(c.name, pa.string() if c.name in parsers else c.type) for c in schema])
        try:
            for batch in self._open(self._lines(uri), raw):
                yield _parsed(batch, schema, parsers, uri, rows + 1)
                rows += batch.num_rows
        except (pa.ArrowInvalid, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise self._locate(uri, raw, rows, error) from error

    def _lines(self, uri: str) -> pa.NativeFile:
        types, options = self.reading.types, self.reading.options
        texts = [name for name, kind in types.items() if pat.is_string(kind)]
        fields = [name for name in dict.fromkeys([*types, *options.lists, *options.times]) if "." in name]
        return pa.PythonFile(as_json_lines(_stream(uri), texts, fields), "r")

    def _large(self, uri: str, names: list[str]) -> dict[str, pa.DataType]:
        """Types of the columns that hold whole numbers beyond int64, which pyarrow makes floats.

        Raises:
            DataError: numbers beyond uint64.
        """
        types: dict[str, pa.DataType] = {}
        for number, line in enumerate(islice(io.BufferedReader(self._lines(uri)), _LOOK_LINES), 1):
            row = json.loads(line) if line.strip() else {}
            for name in names:
                value = value_at(row, name)
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    if not 0 <= value < 2**64:
                        fix = f"read it as text: --type {name}=string"
                        raise DataError(f"{value} is beyond 64 bits", file=uri, row=number, column=name, fix=fix)
                    types[name] = pa.uint64()
        return types

    def _locate(self, uri: str, schema: pa.Schema | None, rows: int, error: Exception) -> DataError:
        """Finds the line of an error by parsing line by line: pyarrow counts lines within a block."""
        size = 0
        try:
            for number, line in enumerate(io.BufferedReader(self._lines(uri)), 1):
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
                    return self._wrong(uri, number, str(line_error))
        except ValueError as line_error:  # cannot be converted to a JSON line
            row = re.match(r"line (\d+): (.*)", str(line_error))
            return self._wrong(uri, int(row[1]) if row else None, row[2] if row else str(line_error))
        # Each line is valid, but their types differ within the first block.
        row = re.search(r" in row (\d+)", str(error)) if schema is None else None
        return self._wrong(uri, None if row is None else int(row[1]) + 1, str(error))

    def _wrong(self, uri: str, line: int | None, text: str) -> DataError:
        if text.startswith("Empty JSON"):
            return DataError("the file is empty", file=uri, fix="remove it")
        column = re.search(r"Column\(/?([^)\[]*)\)", text)
        name = column[1].replace("/", ".") if column else None
        if name is None or "changed from" not in text:
            return _wrong(uri, line, text, name, "correct the line" if name is None else None)
        return _wrong(uri, line, text, name, f"read all its values as text: --type {name}=string")

    def _open(self, stream: pa.NativeFile | io.BytesIO, schema: pa.Schema | None) -> pajson.JSONStreamingReader:
        return pajson.open_json(
            stream,
            read_options=pajson.ReadOptions(block_size=self.block_bytes or _BLOCK_BYTES, use_threads=False),
            parse_options=pajson.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
            ),
        )


def _parser_of_option(column: pa.Field, options: TextOptions) -> Parse | None:
    """What parses a column of lists or times that the user named."""
    if column.name in options.lists:
        return list_parser(column.type, options.lists[column.name])
    if column.name in options.times:
        return times(options.times[column.name])
    return None


def _parsed(
    batch: pa.RecordBatch, schema: pa.Schema, parsers: Mapping[str, Parse], uri: str, row: int
) -> pa.RecordBatch:
    """The batch with its columns parsed; `row` is the number of its first row, for errors."""
    arrays = []
    for column, array in zip(schema, batch.columns, strict=True):
        try:
            arrays.append(parsers[column.name](array) if column.name in parsers else array)
        except CellError as error:
            raise _wrong(uri, row + error.index, str(error), column.name) from None
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def looks_like_json(uri: str) -> bool:
    """Whether a text file starts with an object or an array of JSON."""
    begin = _read(_stream(uri), _LOOK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return begin.startswith(b"{") or (begin.startswith(b"[") and begin[1:].lstrip().startswith(b"{"))


def _stream(uri: str) -> pa.NativeFile:
    filesystem, path = open_filesystem(uri)
    try:
        return filesystem.open_input_stream(path, compression="detect")
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"cannot open the file: {first_line(error)}", file=uri, fix="check path and permissions"
        ) from error


def _read(stream: pa.NativeFile, size: int) -> bytes:
    """The first bytes."""
    data = b""
    while len(data) < size and (more := stream.read(size - len(data))):
        data += more
    return data


def _wrong(uri: str, line: int | None, text: str, column: str | None, fix: str | None = None) -> DataError:
    if repeated := re.search(r"Column\(/?(.*)\) was specified twice", text):
        return equal_names(repeated[1], [uri])
    if column is not None and f"invalid value '{column}'" in text:
        text, fix = "the line repeats the names of the columns", "remove such lines"
    if fix is None:
        fix = f"correct the line, or set the column's type: --type {column or 'user'}=string"
    text = re.sub(r" in row \d+$", "", text.splitlines()[0])
    return DataError(text if line is None else f"line {line}: {text}", file=uri, row=line, column=column, fix=fix)
