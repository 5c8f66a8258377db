"""Vocabularies: which ids have a table row of their own. Read and looked up here; `counting.py` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.errors import DataError
from rayrec.data.mapping.arrow_types import is_text, without_views
from rayrec.data.mapping.hashing import hash_strings
from rayrec.data.storage.locations import open_filesystem
from rayrec.data.storage.opening import open_parquet

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A vocabulary ready for searching.

    Args:
        text: whether its ids are strings.
        keys: its integers as unsigned numbers, or hashes of its strings, ascending.
        places: the place in the vocabulary of each key.
    """

    text: bool
    keys: U64
    places: I64

    def find(self, keys: U64) -> I64:
        """The place of each key in the vocabulary, -1 where it is not there."""
        if not len(self.keys):
            return np.full(len(keys), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.places[at], -1)


def text_keys(texts: pa.Array) -> U64:
    """What stands for strings in a `Lookup`."""
    return hash_strings(texts.cast(pa.large_binary()).fill_null(b"").to_pylist(), 0)


@lru_cache(maxsize=256)
def load_vocabulary(path: str) -> Lookup:
    """Reads a vocabulary: a Parquet file with a column `id`, or a text file with one id a line. Kept in memory.

    A text file of nothing but integers is a vocabulary of integers.

    Raises:
        DataError: the file is missing or of another form, or an id is there twice.
    """
    ids = _read_parquet(path) if path.endswith(".parquet") else _read_text(path)
    if ids.null_count:
        raise DataError("a vocabulary cannot hold null", file=path, fix="remove the null")
    keys = text_keys(ids) if is_text(ids.type) else ids.cast(pa.int64(), safe=False).to_numpy().view(np.uint64)
    places = np.argsort(keys, kind="stable")
    keys = keys[places]
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        value = str(ids[int(places[twice[0]])].as_py())
        raise DataError("an id is in the vocabulary twice", file=path, value=value, fix="keep each id once")
    return Lookup(is_text(ids.type), keys, places)


def _read_parquet(path: str) -> pa.Array:
    with open_parquet(path) as parquet:
        if "id" not in parquet.schema_arrow.names:
            raise DataError("a vocabulary needs a column `id`", file=path, column="id", fix="rename its column")
        ids = parquet.read(columns=["id"]).column("id").combine_chunks()
    ids = ids.cast(without_views(ids.type))
    if not is_text(ids.type) and not pa.types.is_integer(ids.type):
        raise DataError(f"a vocabulary holds integers or strings, not {ids.type}", file=path, column="id")
    return ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids


def _read_text(path: str) -> pa.Array:
    filesystem, inner = open_filesystem(path)
    try:
        with filesystem.open_input_stream(inner) as stream:
            lines = stream.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the vocabulary cannot be read: {error}", file=path, fix="check the path") from error
    try:
        return pa.array([int(line) for line in lines], pa.int64())
    except (ValueError, OverflowError):
        return pa.array(lines, pa.string())
