"""Collects the bad rows of a table, and locates each in its file."""

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
    """Locates the rows of a table in files."""

    def locate(self, row: int) -> tuple[str | None, int | None, int]:
        """The file, row group and row in the file of a row of the table."""


class InMemory:
    """The source of a table that was not read from a file."""

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
    """The bad rows of a table, with the reasons.

    Args:
        source: locates rows in files.
        redact: keep values out of errors.
    """

    source: Source = field(default_factory=InMemory)
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
        """Records bad rows, if any. `value` returns the bad value for an index into `rows`."""
        if len(rows):
            self._findings.append(_Finding(rows, column, problem, fix, value))

    def add_nulls(self, array: pa.Array, column: str, problem: str, fix: str) -> None:
        """Records the null rows of a column."""
        if (nulls := nulls_of(array)) is not None:
            self.add(np.flatnonzero(nulls), column, problem, fix)

    def extend(self, others: Problems) -> None:
        """Records the bad rows of other problems of the same table."""
        self._findings.extend(others._findings)

    def add_error(self, rows: npt.NDArray[np.int64], error: DataError) -> None:
        """Records rows with a common error that is already located, e.g. in an unreadable file."""
        self._findings.append(_Finding(rows, "", "", "", error=error))

    def reasons(self) -> Counter[str]:
        """Number of bad rows by reason."""
        counts: Counter[str] = Counter()
        for finding in self._findings:
            error = finding.error
            reason = finding.problem if error is None else f"{error.problem} ({error.file})"
            counts[reason] += len(finding.rows)
        return counts

    def rows(self) -> npt.NDArray[np.int64]:
        """The bad rows, ascending, without duplicates."""
        return np.unique(np.concatenate([f.rows for f in self._findings])) if self._findings else np.empty(0, np.int64)

    def error(self, row: int) -> DataError:
        """The first error of a bad row."""
        finding = next(f for f in self._findings if (f.rows == row).any())
        if finding.error is not None:
            return finding.error
        index = int(np.flatnonzero(finding.rows == row)[0])
        value = REDACTED if self.redact else finding.value(index) if finding.value else None
        error = DataError(finding.problem, column=finding.column, value=value, fix=finding.fix)
        return error.at(*self.source.locate(row))
