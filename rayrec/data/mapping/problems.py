"""Bad rows of one table, collected check by check, and where each of them lies in its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rayrec.data.arrays.arrow_types import nulls_of
from rayrec.storage.errors import DataError

REDACTED = "(redacted)"


class Source(Protocol):
    """Knows where the rows of a table come from."""

    def locate(self, row: int) -> tuple[str | None, int | None, int]:
        """(file, row group, row inside the file) of the table's row."""


class Unplaced:
    """A table that comes from no file."""

    def locate(self, row: int) -> tuple[str | None, int | None, int]:
        return None, None, row


@dataclass(frozen=True, slots=True)
class _Finding:
    rows: npt.NDArray[np.int64]
    column: str
    problem: str
    fix: str
    value: Callable[[int], str | None] | None = None
    error: DataError | None = None


@dataclass(slots=True)
class Problems:
    """What is wrong with a table's rows.

    Args:
        source: places rows in files.
        redact: keep values out of errors.
    """

    source: Source = field(default_factory=Unplaced)
    redact: bool = False
    _findings: list[_Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._findings)

    def add(
        self,
        rows: npt.NDArray[np.int64],
        column: str,
        problem: str,
        fix: str,
        value: Callable[[int], str | None] | None = None,
    ) -> None:
        """Records bad rows, if there are some; `value` is called with an index into `rows`."""
        if len(rows):
            self._findings.append(_Finding(rows, column, problem, fix, value))

    def add_nulls(self, array: pa.Array, column: str, problem: str, fix: str) -> None:
        """Records the rows of a column that are null."""
        if (nulls := nulls_of(array)) is not None:
            self.add(np.flatnonzero(nulls), column, problem, fix)

    def add_error(self, rows: npt.NDArray[np.int64], error: DataError) -> None:
        """Notes rows that all share one reason which has its own place, as a file that cannot be read."""
        self._findings.append(_Finding(rows, "", "", "", error=error))

    def reasons(self) -> Counter[str]:
        """How many findings there are of each kind."""
        found: Counter[str] = Counter()
        for finding in self._findings:
            error = finding.error
            reason = finding.problem if error is None else f"{error.problem} ({error.file})"
            found[reason] += len(finding.rows)
        return found

    def rows(self) -> npt.NDArray[np.int64]:
        """All bad rows, ascending, each once."""
        return np.unique(np.concatenate([f.rows for f in self._findings])) if self._findings else np.empty(0, np.int64)

    def error(self, row: int) -> DataError:
        """The first finding about a bad row."""
        finding = next(f for f in self._findings if (f.rows == row).any())
        if finding.error is not None:
            return finding.error
        index = int(np.flatnonzero(finding.rows == row)[0])
        value = REDACTED if self.redact else finding.value(index) if finding.value else None
        error = DataError(finding.problem, column=finding.column, value=value, fix=finding.fix)
        return error.at(*self.source.locate(row))
