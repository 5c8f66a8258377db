"""The Parquet files that paths mean: those that are there, or what files of other formats become, once, in a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import Found, find_files, format_of
from rayrec.storage.locations import cache_folder, without_secrets
from rayrec.storage.parallel import several_nodes

Tell = Callable[[str], None]
_INTO: ContextVar[tuple[str, Tell] | None] = ContextVar("_INTO", default=None)


@contextmanager
def converting_into(place: str, tell: Tell) -> Iterator[None]:
    """Conversions of this thread go to a path or URI and are told so, instead of to the user's cache and to stderr."""
    before = _INTO.set((place, tell))
    try:
        yield
    finally:
        _INTO.reset(before)


def find_parquet(paths: str | Sequence[str]) -> list[Found]:
    """As `find_files`, where files of other formats stand for what they become.

    Raises:
        DataError: as `find_files` and `convert`; a cache that cannot be written, or that other nodes do not see.
    """
    found = find_files(paths)
    others = [file for file in found if format_of(file.uri)]
    if not others:
        return found
    from rayrec.data.formats.convert import convert_once  # the readers of all formats

    into = _INTO.get()
    if into is None and several_nodes():
        problem = "it would become Parquet in this user's cache, which other nodes of the Ray cluster do not see"
        fix = "make Parquet of such files first, where every node sees it: rayrec data convert"
        raise DataError(problem, file=others[0].uri, fix=fix)
    place, tell = into or (
        str(cache_folder("converted")),
        lambda text: print(f"rayrec: {text}", file=sys.stderr, flush=True),
    )
    made: dict[str, list[Found]] = {}
    try:
        for file, (parts, told) in zip(others, convert_once(others, place), strict=True):
            if told is not None:
                tell(without_secrets(told))
            made[file.uri] = parts
    except OSError as error:
        problem = f"files cannot be made Parquet there: {first_line(error)}"
        raise DataError(problem, file=place, fix="check permissions and room of the run's folder") from error
    return [one for file in found for one in made.get(file.uri, [file])]
