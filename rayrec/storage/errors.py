"""The errors of the data path: input that cannot be used, and storage that does not answer.

What is wrong with which input is decided where the input is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Self


@dataclass(eq=False)
class DataError(ValueError):
    """Input data that cannot be used, located as exactly as it is known.

    Args:
        problem: what is wrong, without the place.
        file: path or URI of the file.
        row_group: row group inside the file, from 0.
        row: row inside the file, from 0.
        column: Parquet column (with the feature's name where it differs).
        value: the offending value, as text.
        fix: what to do about it.
    """

    problem: str
    _: KW_ONLY
    file: str | None = None
    row_group: int | None = None
    row: int | None = None
    column: str | None = None
    value: str | None = None
    fix: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self._text())

    def _text(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (
                ("file", self.file),
                ("row group", self.row_group),
                ("row", self.row),
                ("column", None if self.column is None else repr(self.column)),
                ("value", self.value),
            )
            if value is not None
        ]
        where = f" ({', '.join(places)})" if places else ""
        return f"{self.problem}{where}" + (f"; fix: {self.fix}" if self.fix else "")

    def at(self, file: str | None, row_group: int | None, row: int | None) -> Self:
        """The same at a place."""
        return replace(self, file=file, row_group=row_group, row=row)

    def to_dict(self) -> dict[str, Any]:
        """The error's parts as JSON values."""
        return asdict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = self.to_dict()
        problem = parts.pop("problem")
        return partial(type(self), **parts), (problem,)


class DataUnavailable(DataError):
    """Storage did not answer, for as long as patience lasts: the input may be right, and another attempt may work."""


class FileChanged(DataError):
    """A file is not the one that it was: it was written anew while a run, or an epoch, still needs its rows."""


def first_line(error: Exception) -> str:
    """What a foreign error says first."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is close; upper and lower case are alike."""
    lower = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""
