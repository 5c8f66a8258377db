"""Hive partitions: folders named `key=value`, whose values are columns of all files below them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from urllib.parse import unquote

import pyarrow as pa

from rayrec.data.errors import DataError

NULL = "__HIVE_DEFAULT_PARTITION__"
Values = dict[str, int | str | None]

_INT = re.compile(r"-?\d{1,18}")


def partitions_of(
    uris: Sequence[str], wanted: Collection[str] | None, as_text: Collection[str] = ()
) -> tuple[list[Values], dict[str, pa.DataType]]:
    """The partition columns of each file, and their types: int64 where all values are whole numbers, else string.

    Args:
        wanted: columns that are read from folder names; None: all.
        as_text: columns whose whole numbers stay texts.

    Raises:
        DataError: a key that comes twice in one path.
    """
    texts = [_texts(uri, wanted) for uri in uris]
    types: dict[str, pa.DataType] = {}
    for name in sorted({name for found in texts for name in found}):
        values = [found.get(name) for found in texts]
        whole = name not in as_text and all(value is None or _INT.fullmatch(value) for value in values)
        types[name] = pa.int64() if whole and any(value is not None for value in values) else pa.string()
    return [{name: _typed(text, types[name]) for name, text in found.items()} for found in texts], types


def _texts(uri: str, wanted: Collection[str] | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in uri.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        name = unquote(key)
        if not equals or not name or (wanted is not None and name not in wanted):
            continue
        if name in found:
            raise DataError(f"two folders of the path are named {name}=…", file=uri, fix="rename one of them")
        found[name] = None if value == NULL else unquote(value)
    return found


def _typed(text: str | None, kind: pa.DataType) -> int | str | None:
    return text if text is None or kind != pa.int64() else int(text)
