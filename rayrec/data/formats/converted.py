"""The Parquet files that paths mean: those that are there, or what files of other formats become, once, in a cache."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from rayrec.storage.errors import DataError, first_line
from rayrec.storage.files import Found, find_files, format_of
from rayrec.storage.locations import cache_folder, without_secrets

Tell = Callable[[str], None]
_INTO: ContextVar[tuple[Path, Tell] | None] = ContextVar("_INTO", default=None)


@contextmanager
def converting_into(folder: Path, tell: Tell) -> Iterator[None]:
    """Conversions of this thread go there and are told so, instead of to the user's cache and to stderr."""
    before = _INTO.set((folder, tell))
    try:
        yield
    finally:
        _INTO.reset(before)


def find_parquet(paths: str | Sequence[str]) -> list[Found]:
    """As `find_files`, where files of other formats stand for what they become.

    Raises:
        DataError: as `find_files` and `convert`, or a cache that cannot be written.
    """
    found = find_files(paths)
    others = [file for file in found if format_of(file.uri)]
    if not others:
        return found
    from rayrec.data.formats.convert import convert_once  # the readers of all formats

    folder, tell = _INTO.get() or (
        cache_folder("converted"),
        lambda text: print(f"rayrec: {text}", file=sys.stderr, flush=True),
    )
    made: dict[str, list[Found]] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "_lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, (whole, told) in zip(others, convert_once(others, folder), strict=True):
                if told is not None:
                    tell(without_secrets(told))
                parts = sorted(str(part) for part in whole.rglob("*.parquet"))
                made[file.uri] = find_files(parts) if parts else []
    except OSError as error:
        problem = f"files cannot be made Parquet there: {first_line(error)}"
        raise DataError(problem, file=str(folder), fix="check permissions and room of the run's folder") from error
    return [one for file in found for one in made.get(file.uri, [file])]
