"""Makes JSON lines of what other programs write as JSON: one array, or lines of Python dicts."""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pyarrow as pa

_CHUNK_BYTES = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")


def as_json_lines(
    stream: pa.NativeFile, texts: Collection[str] = (), fields: Collection[str] = ()
) -> pa.NativeFile | io.RawIOBase:
    """The stream itself if it has JSON lines, or a stream that converts to JSON lines.

    Args:
        texts: columns to convert to text.
        fields: fields of structs, as `user.id`, to make columns of.

    Raises:
        ValueError: a line that is neither; names its number.
    """
    head = b""
    while not head.strip() and (data := stream.read(_CHUNK_BYTES)):
        head += data
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    source = _Chunks(_prepended(begin, stream))
    if begin.startswith(b"["):
        return _Chunks(_lines(_items(source), texts, fields))
    if begin.startswith(b"{") and begin[1:].lstrip()[:1] in (b"'", b"u"):
        return _Chunks(_lines(_each_line(source, ast.literal_eval), texts, fields))
    if not texts and not fields:
        return source
    return _Chunks(_lines(_each_line(source, json.loads), texts, fields))


class _Chunks(io.RawIOBase):
    """A stream of bytes from an iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end: a reader infers types from the first block that it gets."""
        if size < 0:
            return self.readall()
        parts, length = [self._rest], len(self._rest)
        while length < size and (chunk := next(self._chunks, b"")):
            parts.append(chunk)
            length += len(chunk)
        data = b"".join(parts)
        self._rest = data[size:]
        return data[:size]

    def readall(self) -> bytes:
        """All bytes that are left."""
        data, self._rest = b"".join([self._rest, *self._chunks]), b""
        return data

    def readinto(self, buffer: Any) -> int:
        """Fills a part of the buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _prepended(head: bytes, stream: pa.NativeFile) -> Iterator[bytes]:
    if head:
        yield head
    while data := stream.read(_CHUNK_BYTES):
        yield data


def _each_line(source: io.RawIOBase, parse: Callable[[str], Any]) -> Iterator[Any]:
    for number, line in enumerate(io.BufferedReader(source), 1):
        if line.strip():
            try:
                yield parse(line.decode("utf-8").strip())
            except (ValueError, SyntaxError) as error:
                raise ValueError(f"line {number}: {error}") from None


def _items(source: io.RawIOBase) -> Iterator[Any]:
    """The items of an array, one at a time."""
    reader, decoder = io.TextIOWrapper(io.BufferedReader(source), encoding="utf-8"), json.JSONDecoder()
    text, ended, number = reader.read(_CHUNK_BYTES), False, 0
    position = text.index("[") + 1
    while True:
        between = _BETWEEN.match(text, position)
        position = between.end() if between else position
        if text.startswith("]", position):
            return
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if ended:
                raise ValueError(f"item {number + 1} of the array: {error.msg}") from None
            more = reader.read(max(_CHUNK_BYTES, len(text) - position))
            text, position, ended = text[position:] + more, 0, not more
            continue
        number += 1
        yield item


def value_at(row: Any, name: str) -> Any:
    """The value of a column, or of a field of a struct, as `user.id`; None if there is none."""
    if not isinstance(row, dict) or name in row:
        return row.get(name) if isinstance(row, dict) else None
    inside = ((struct, name[len(struct) + 1 :]) for struct in row if name.startswith(f"{struct}."))
    return next((value for struct, field in inside if (value := value_at(row[struct], field)) is not None), None)


def _make_column(row: dict[str, Any], name: str) -> None:
    """Moves a field of a struct into a column."""
    if name not in row and (value := value_at(row, name)) is not None:
        _remove(row, name)
        row[name] = value


def _remove(row: dict[str, Any], name: str) -> None:
    """Removes a field, and a struct that has no other fields."""
    if name in row:
        del row[name]
        return
    for struct in [struct for struct in row if name.startswith(f"{struct}.") and isinstance(row[struct], dict)]:
        _remove(row[struct], name[len(struct) + 1 :])
        if not row[struct]:
            del row[struct]


def _lines(items: Iterator[Any], texts: Collection[str], fields: Collection[str]) -> Iterator[bytes]:
    for item in items:
        if isinstance(item, dict):
            for name in fields:
                _make_column(item, name)
            for name in texts:
                if not isinstance(value := item.get(name), str | None):
                    item[name] = json.dumps(value)
        yield json.dumps(item).encode() + b"\n"
