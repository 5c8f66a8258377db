"""Days, or other values of a column that folders give, one after another: train on one, evaluate on the next.

A run remembers the values that it trained on, never their numbers: old folders are removed, others arrive late, and
filters move.
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
    """The values of a column that folders give now, ascending.

    Args:
        filters: conditions on the column.
        data: names the data set in errors.
    """

    column: str
    values: tuple[Value, ...]
    filters: tuple[Condition, ...] = ()
    data: str = ""

    @classmethod
    def of(cls, data: DataSet, column: str, as_text: Collection[str] = ()) -> Periods:
        """Those of a data set, by the names of its folders.

        Args:
            as_text: as in `partitions_of`.

        Raises:
            DataError: files that lie in no folder `column=…`.
        """
        conditions = parse_all(data.filters)
        wanted = {column, *(condition.column for condition in conditions)}
        found = find_partitioned(data.listed(), wanted, as_text)
        values: set[Value] = set()
        for one in found.that_pass(conditions).files:
            value = one.values.get(column)
            if value is None:
                raise DataError(
                    f"data.progressive: it lies in no folder {column}=…",
                    file=one.file.uri,
                    fix="move it there, or filter it out",
                )
            values.add(value)
        on_column = tuple(condition for condition in conditions if condition.column == column)
        return cls(column, tuple(sorted(values)), on_column, str(data))  # all of one type

    def left(self, value: Value | None) -> tuple[Value, ...]:
        """What to train on after a value, None for all: the last one is only evaluated on."""
        return self.values[0 if value is None else self._passed(value) : -1]

    def next(self, value: Value | None) -> Only:
        """What to train on first after a value.

        Raises:
            DataError: nothing.
        """
        if left := self.left(value):
            return self.column, left[0]
        above = "" if value is None else f" above {self.column}={value}"
        raise DataError(
            f"data.progressive: there is one folder {self.column}=…{above} or none, and the last one is only "
            "evaluated on",
            file=self.data,
            fix="wait for the next one, or train without data.progressive",
        )

    def numbered(self, number: int) -> Only:
        """The period of an epoch, for checkpoints that have nothing but its number.

        Raises:
            DataError: there are not so many any more.
        """
        if number < len(self.values):
            return self.column, self.values[number]
        raise DataError(
            f"data.progressive: the checkpoint, of an earlier rayrec, is in epoch {number} and has no name of its "
            f"period; {len(self.values)} folders {self.column}=… are left, so that it cannot be found by its number",
            file=self.data,
            fix="put the older folders back for one launch, or begin a new run with init_from: this one, and filters "
            "that begin at the first period that it has not seen",
        )

    def evaluated_after(self, trained: Only) -> Only:
        """What the model is evaluated on after a period.

        Raises:
            DataError: there is no later one.
        """
        passed = self._passed(trained[1])
        if passed < len(self.values):
            return self.column, self.values[passed]
        raise DataError(
            f"data.progressive: there is no folder above {self.column}={trained[1]} to evaluate on",
            file=self.data,
            fix="put it back, or let `filters` pass it",
        )

    def goes_on(self, at: Only, over: bool) -> bool:
        """Whether a run goes on inside the period `at`, or after it where it is over; False where filters leave out
        the rest of it.

        Raises:
            DataError: the rest of it is gone, is the last period now, or periods are other ones than before.
        """
        column, value = at
        if column != self.column:
            raise DataError(
                f"data.progressive: it is {self.column!r}, and the checkpoint was made with {column!r}",
                file=self.data,
                fix=f"set data.progressive: {column}, or start a new run under another name",
            )
        if self.values and type(value) is not type(self.values[0]):
            kinds = {int: "a whole number", str: "a text"}
            raise DataError(
                f"data.progressive: {column}={value} was {kinds[type(value)]} when it was trained on, and "
                f"{column}={self.values[0]} is {kinds[type(self.values[0])]}: their order is another one",
                file=self.data,
                fix="name folders in one way; filter out those that are named otherwise",
            )
        if over:
            return True
        if not all(condition.holds(pa.array([value]))[0] for condition in self.filters):
            return False
        if value not in self.values:
            raise DataError(
                f"data.progressive: {column}={value} was trained on in part, and its folder is gone",
                file=self.data,
                fix=f"put it back, or go on without the rest of it: filters: [[{column}, '>', {value!r}]]",
            )
        self.evaluated_after(at)
        return True

    def late(self, at: Only, trained: Collection[Value]) -> tuple[Value, ...]:
        """Those below the period `at` that were not trained on: they arrived late, or filters let them pass now."""
        known = {*trained, at[1]}
        return tuple(value for value in self.values[: self._passed(at[1])] if value not in known)

    def report(self, at: Only, trained: Collection[Value]) -> str:
        """What a run that is at a period trains on next, and what it leaves out."""
        left, late = self.left(at[1]), self.late(at, trained)
        text = f"at {self._named((at[1],))}; then {self._named(left) if left else 'nothing until there are new ones'}"
        if late:
            text += (
                f"; NOT trained on: {self._named(late)}, which arrived late, or which `filters` left out before: "
                f"periods below {at[1]} are passed"
            )
        return text

    def _passed(self, value: Value) -> int:
        """How many are not above a value."""
        return bisect_right(self.values, value)  # all of one type

    def _named(self, values: tuple[Value, ...]) -> str:
        shown = ", ".join(f"{self.column}={value}" for value in values[:_SHOWN])
        return shown + (f" and {len(values) - _SHOWN} more to {values[-1]}" if len(values) > _SHOWN else "")
