"""Errors of data and storage: unusable input, and storage that does not respond."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Self


@dataclass(eq=False)
class DataError(ValueError):
    """Input data that cannot be used, located as exactly as possible.

    Args:
        problem: the problem, without its location.
        file: path or URI of the file.
        row_group: row group in the file, from 0.
        row: row in the file, from 0.
        column: Parquet column, with the feature name if that differs.
        value: the offending value, as text.
        fix: what the user can do.
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
        locations = [
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
        location = f" ({', '.join(locations)})" if locations else ""
        return f"{self.problem}{location}" + (f"; fix: {self.fix}" if self.fix else "")

    def at(self, file: str | None, row_group: int | None, row: int | None) -> Self:
        """A copy with a location."""
        return replace(self, file=file, row_group=row_group, row=row)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.to_dict()
        problem = fields.pop("problem")
        return partial(type(self), **fields), (problem,)


class DataUnavailable(DataError):
    """Storage did not respond within the patience. The input may be fine; another attempt may succeed."""


class FileChanged(DataError):
    """A file was overwritten while a run or an epoch still needs its rows."""


def first_line(error: Exception) -> str:
    """The first line of an error message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no name is close. Ignores case."""
    lower = {candidate.lower(): candidate for candidate in names}
    close = get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[close[0]]!r}?" if close else ""
