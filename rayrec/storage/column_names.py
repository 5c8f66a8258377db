"""Errors about missing and equal column names, with one text for all formats and commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from rayrec.storage.errors import DataError, suggestion

# Number of files that an error lists.
_NAMED = 5


def check_names(files: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Checks that no file has two columns of one name.

    Args:
        files: path or URI of each file, and its column names.

    Raises:
        DataError: names the column and the files.
    """
    wrong = {uri: name for uri, names in files if (name := _repeated(names)) is not None}
    if wrong:
        name = next(iter(wrong.values()))
        raise equal_names(name, [uri for uri, other in wrong.items() if other == name])


def equal_names(name: str, files: Sequence[str]) -> DataError:
    """The error of files with two columns of this name."""
    others = files[1:_NAMED]
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    listed = f"; the same in {', '.join(others)}{more}" if others else ""
    fix = "rename one of the columns, or write the file without it"
    return DataError(f"several columns are named {name!r}{listed}", file=files[0], column=name, fix=fix)


def column_missing(column: str, arrow: pa.Schema, file: str, fix: str) -> DataError:
    """The error for a missing column."""
    names = arrow.names
    shown_names = ", ".join(names[:20]) + (f", … ({len(names)} in total)" if len(names) > 20 else "")
    problem = f"column {column!r} is missing; the file has {shown_names}{suggestion(column, names)}"
    fields = [name for name in names if name.startswith(f"{column}.")]
    if fields:
        fix = f"{column!r} is a struct: name one of its fields, {', '.join(fields[:_NAMED])}"
    return DataError(problem, file=file, column=column, fix=fix)


def _repeated(names: Sequence[str]) -> str | None:
    if len(set(names)) == len(names):
        return None
    return next(name for number, name in enumerate(names) if name in names[:number])
