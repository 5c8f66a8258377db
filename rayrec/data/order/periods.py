"""Progressive training: train on one period (a value of a partition column such as a day), evaluate on the next.

A run stores the values of the periods it trained on, not their numbers: old folders are removed, others arrive late,
and filters change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa

from rayrec.data.source.dataset import DataSet
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.partitions import find_partitioned
from rayrec.storage.errors import DataError

Value = int | str
Only = tuple[str, Value]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Periods:
    """The current values of a partition column, ascending.

    Args:
        column: the partition column.
        values: its values.
        filters: conditions on the column.
        data: the data set, for errors.
    """

    column: str
    values: tuple[Value, ...]
    filters: tuple[Condition, ...] = ()
    data: str = ""

    @classmethod
    def of(cls, data: DataSet, column: str, as_text: Collection[str] = ()) -> Periods:
        """The periods of a data set, from the names of its folders.

        Args:
            as_text: as in `partitions_of`.

        Raises:
            DataError: a file that is not in a folder `column=…`.
        """
        conditions = parse_all(data.filters)
        wanted = {column, *(condition.column for condition in conditions)}
        partitioned = find_partitioned(data.listed(), wanted, as_text)
        values: set[Value] = set()
        for file in partitioned.that_pass(conditions).files:
            value = file.values.get(column)
            if value is None:
                raise DataError(
                    f"data.progressive: the file is not in a folder {column}=…",
                    file=file.file.uri,
                    fix="move it into one, or exclude it by a filter",
                )
            values.add(value)
        on_column = tuple(condition for condition in conditions if condition.column == column)
        return cls(column, tuple(sorted(values)), on_column, str(data))  # values of one type

    def remaining(self, value: Value | None) -> tuple[Value, ...]:
        """The periods to train on after `value` (None: all). The last one is used for evaluation only."""
        return self.values[0 if value is None else self._passed(value) : -1]

    def next(self, value: Value | None) -> Only:
        """The next period to train on after `value`.

        Raises:
            DataError: there is none.
        """
        if remaining := self.remaining(value):
            return self.column, remaining[0]
        after = "" if value is None else f" after {self.column}={value}"
        raise DataError(
            f"data.progressive: nothing to train on{after}; the newest folder {self.column}=… is used for evaluation "
            "only",
            file=self.data,
            fix="wait for the next folder, or train without data.progressive",
        )

    def numbered(self, number: int) -> Only:
        """The period of an epoch by its number, for checkpoints without the value.

        Raises:
            DataError: there are fewer periods now.
        """
        if number < len(self.values):
            return self.column, self.values[number]
        raise DataError(
            f"data.progressive: the checkpoint of an earlier rayrec is in epoch {number} and does not name its period; "
            f"only {len(self.values)} folders {self.column}=… exist, so its period is unknown",
            file=self.data,
            fix="restore the older folders for one launch, or start a new run with init_from this run and filters that "
            "start at the first new period",
        )

    def evaluated_after(self, trained: Only) -> Only:
        """The period for the evaluation after training on `trained`.

        Raises:
            DataError: there is no later period.
        """
        passed = self._passed(trained[1])
        if passed < len(self.values):
            return self.column, self.values[passed]
        raise DataError(
            f"data.progressive: no folder after {self.column}={trained[1]} to evaluate on",
            file=self.data,
            fix="restore the folder, or change `filters` to include it",
        )

    def continues(self, current: Only, over: bool) -> bool:
        """True if a run continues in the period `current`, or after it if `over`; False if filters exclude its rest.

        Raises:
            DataError: the folder is missing or is the last period now, or the partition column or its type changed.
        """
        column, value = current
        if column != self.column:
            raise DataError(
                f"data.progressive is {self.column!r}, but the checkpoint was trained with {column!r}",
                file=self.data,
                fix=f"set data.progressive: {column}, or start a new run under another name",
            )
        if self.values and type(value) is not type(self.values[0]):
            kinds = {int: "an integer", str: "a string"}
            raise DataError(
                f"data.progressive: {column}={value} was {kinds[type(value)]} in training, but "
                f"{column}={self.values[0]} is {kinds[type(self.values[0])]}, which sorts differently",
                file=self.data,
                fix="name all folders in the same form, or exclude the others by a filter",
            )
        if over:
            return True
        if not all(condition.holds(pa.array([value]))[0] for condition in self.filters):
            return False
        if value not in self.values:
            raise DataError(
                f"data.progressive: {column}={value} was trained on in part, but its folder is missing",
                file=self.data,
                fix=f"restore the folder, or skip the rest of it: filters: [[{column}, '>', {value!r}]]",
            )
        self.evaluated_after(current)
        return True

    def late(self, current: Only, trained: Collection[Value]) -> tuple[Value, ...]:
        """Periods before `current` without training: they arrived late, or filters excluded them before."""
        trained_values = {*trained, current[1]}
        return tuple(value for value in self.values[: self._passed(current[1])] if value not in trained_values)

    def report(self, current: Only, trained: Collection[Value]) -> str:
        """A line about the periods that a run at `current` trains on next, and those it skips."""
        remaining, late = self.remaining(current[1]), self.late(current, trained)
        following = self._named(remaining) if remaining else "nothing until a new folder exists"
        text = f"at {self._named((current[1],))}; next: {following}"
        if late:
            text += (
                f"; NOT trained on: {self._named(late)}, which arrived late or were excluded by `filters`; "
                f"training does not return to periods before {current[1]}"
            )
        return text

    def _passed(self, value: Value) -> int:
        """Number of periods up to and including a value."""
        return bisect_right(self.values, value)  # values of one type

    def _named(self, values: tuple[Value, ...]) -> str:
        listed = ", ".join(f"{self.column}={value}" for value in values[:_SHOWN])
        return listed + (f" and {len(values) - _SHOWN} more to {values[-1]}" if len(values) > _SHOWN else "")
