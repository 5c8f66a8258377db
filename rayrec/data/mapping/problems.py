"""Bad rows of one table, collected check by check, and where each of them lies in its file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rayrec.data.errors import DataError

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
    problem: Callable[[int], str]
    value: Callable[[int], str | None]
    fix: str
    error: DataError | None = None


@dataclass(slots=True)
class Problems:
    """What is wrong with a table's rows.

    Args:
        source: places rows in files.
        redact: keep values out of errors.
    """

    source: Source
    redact: bool = False
    _findings: list[_Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._findings)

    def add(
        self,
        rows: npt.NDArray[np.int64],
        column: str,
        problem: Callable[[int], str],
        value: Callable[[int], str | None],
        fix: str,
    ) -> None:
        """Records bad rows; `problem` and `value` are called with an index into `rows`."""
        self._findings.append(_Finding(rows, column, problem, value, fix))

    def add_error(self, rows: npt.NDArray[np.int64], error: DataError) -> None:
        """Notes rows that all share one reason which has its own place, as a file that cannot be read."""
        self._findings.append(_Finding(rows, "", lambda _: "", lambda _: None, "", error))

    def reasons(self) -> Counter[str]:
        """How many findings there are of each kind."""
        found: Counter[str] = Counter()
        for finding in self._findings:
            if finding.error is not None:
                found[f"{finding.error.problem} ({finding.error.file})"] += len(finding.rows)
            elif len(finding.rows):
                found[finding.problem(0)] += len(finding.rows)
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
        file, row_group, file_row = self.source.locate(row)
        return DataError(
            finding.problem(index),
            file=file,
            row_group=row_group,
            row=file_row,
            column=finding.column,
            value=REDACTED if self.redact else finding.value(index),
            fix=finding.fix,
        )
