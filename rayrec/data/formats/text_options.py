"""The options for reading text files: CSV, TSV and JSON."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
from pydantic import Field, field_validator

from rayrec._runtime.strict import Strict
from rayrec.storage.errors import DataError

Kind = Literal["text", "integer", "number"]
# Without "NA", which is also a country code.
NULLS = ("", "NULL", "null", "\\N")


class TextOptions(Strict):
    """How text files are read. Options that are not set are detected in the first lines of each file.

    Args:
        separator: Text between cells, of one or several characters. Default: by the first lines; most likely the one
            of the file name's suffix.
        header: Whether the first line holds the names of the columns.
        names: Names of the columns, for files without a header line.
        encoding: Encoding of the text, e.g. "latin-1" or "utf-16". Default: UTF-8, or UTF-16 by its byte-order mark.
        quote: Character around cells that contain separators or line breaks; empty: no quotes.
        escape: Character that makes the next one part of the cell, e.g. a backslash. Default: none; a quote inside of
            quotes is written twice.
        nulls: Cells that are null.
        decimal: Decimal point of numbers.
        thousands: Character between thousands, e.g. "," in 1,204. Default: none.
        types: Arrow types of columns, e.g. `user: string`. Others are inferred from the first rows; numbers with
            leading zeros are text.
        lists: Columns with a list in each cell, and the text between its items, e.g. `genres: "|"`; "json" for lists
            such as [1, 2]. Brackets of any kind around the list and quotes around its items are left out.
        times: Columns with times, and their format as `strptime` takes it, e.g. `at: "%d.%m.%Y"`; or `iso`, `s`, `ms`,
            `yyyymmdd` and others that `init --time` takes.
    """

    separator: str | None = Field(default=None, min_length=1)
    header: bool | None = None
    names: list[str] | None = None
    encoding: str | None = None
    quote: str = Field(default='"', max_length=1)
    escape: str | None = Field(default=None, min_length=1, max_length=1)
    nulls: list[str] = Field(default=list(NULLS))
    decimal: Literal[".", ","] = "."
    thousands: str | None = Field(default=None, min_length=1, max_length=1)
    types: dict[str, str] = Field(default={})
    lists: dict[str, str] = Field(default={})
    times: dict[str, str] = Field(default={})

    @field_validator("encoding")
    @classmethod
    def _known(cls, encoding: str | None) -> str | None:
        if encoding is not None:
            try:
                codecs.lookup(encoding)
            except LookupError:
                raise ValueError(
                    f"unknown encoding {encoding!r}; use e.g. utf-8, utf-16, latin-1, cp1252, gbk"
                ) from None
        return encoding

    @field_validator("types")
    @classmethod
    def _are_types(cls, types: dict[str, str]) -> dict[str, str]:
        for column, name in types.items():
            arrow_type(column, name)
        return types

    @property
    def arrow_types(self) -> dict[str, pa.DataType]:
        """`types` and the types of `times`, as Arrow types."""
        types = {column: arrow_type(column, name) for column, name in self.types.items()}
        return types | dict.fromkeys(self.times, pa.timestamp("us"))


@dataclass(frozen=True, slots=True)
class TextReading:
    """How to read text files.

    Args:
        options: what the user says.
        kinds: what the schema says of columns. A column of texts is not read as numbers, and numbers with leading
            zeros are numbers in a column of integers. A column without values has this kind.
    """

    options: TextOptions = field(default_factory=TextOptions)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, pa.DataType]:
        """Types that are not inferred."""
        own = {*self.options.lists, *self.options.times, *self.options.types}
        texts = {name: pa.string() for name, kind in self.kinds.items() if kind == "text" and name not in own}
        return texts | self.options.arrow_types

    def type_without_values(self, column: str) -> pa.DataType:
        """The type of a column that has nulls only."""
        types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64()}
        return types[self.kinds[column]] if column in self.kinds else pa.null()

    @property
    def key(self) -> str:
        """The options, other than types, that change the rows of a file; empty if none is set."""
        return str(self.options.model_dump(exclude_defaults=True) or "")


def arrow_type(column: str, name: str) -> pa.DataType:
    """The Arrow type of a name.

    Raises:
        DataError: an unknown name.
    """
    item = name[5:-1] if name.startswith("list<") and name.endswith(">") else None
    try:
        return pa.list_(pa.type_for_alias(item)) if item is not None else pa.type_for_alias(name)
    except ValueError as error:
        fix = "use one of int64, double, string, bool, timestamp[s], date32, list<int64>, …"
        raise DataError(f"unknown type {name!r}", column=column, fix=fix) from error


_OPTIONS: ContextVar[TextOptions | None] = ContextVar("_OPTIONS", default=None)
_KINDS: ContextVar[Mapping[str, Kind]] = ContextVar("_KINDS")


@contextmanager
def reading_text(options: TextOptions) -> Iterator[None]:
    """Within the block, text files are read with these options. What an outer block sets has priority."""
    if (outer := _OPTIONS.get()) is not None:
        options = options.model_copy(update={name: getattr(outer, name) for name in outer.model_fields_set})
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


@contextmanager
def reading_kinds(kinds: Mapping[str, Kind]) -> Iterator[None]:
    """Within the block, columns of text files are read as what a schema says that they are, not as they look."""
    token = _KINDS.set(kinds)
    try:
        yield
    finally:
        _KINDS.reset(token)


def text_reading() -> TextReading:
    """What the innermost `reading_text` and `reading_kinds` say; outside of them, the defaults."""
    return TextReading(_OPTIONS.get() or TextOptions(), dict(_KINDS.get({})))
