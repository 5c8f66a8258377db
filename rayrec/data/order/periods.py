"""Training in the order of time: train on one period, evaluate on the next before training on it.

A period is a value of a partition column, e.g. a day (`data.progressive`), or a window of rows (`data.order: time`).

A run stores the values of the periods it trained on, not their numbers: old folders are removed, others arrive late,
and filters change. If several columns make up the period (`year=2024/month=1/day=2`), its value is the tuple of theirs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from rayrec.data.source.dataset import DataSet
from rayrec.data.source.filters import Condition, parse_all
from rayrec.data.source.partitions import Columns, PartitionedFile, Value, columns_of, find_partitioned, value_of
from rayrec.storage.errors import DataError
from rayrec.storage.locations import plain_path

Only = tuple[Columns, Value]

# Begin the column of windows: an interval of time each, or so many rows each.
OF_TIME, OF_ROWS = "windows of ", "rows by "
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Periods:
    """The periods that exist now, ascending.

    Args:
        column: the partition column, or the columns that make up a period, the longest time first. Of windows: what
            they are, so that a run does not continue with others.
        values: its values; tuples for several columns. Of windows: the start, or the first row and its place.
        filters: conditions on the columns.
        data: the data set, for errors.
        spans: of windows, the rows `[start, stop)` of each.
    """

    column: Columns
    values: tuple[Value, ...]
    filters: tuple[Condition, ...] = ()
    data: str = ""
    spans: Mapping[Value, tuple[int, int]] | None = None

    @property
    def _kind(self) -> str:
        """What a period is."""
        return "folder" if self.spans is None else "window"

    @property
    def option(self) -> str:
        """The option of the config that asks for them."""
        return "data.progressive" if self.spans is None else "data.order: time"

    @classmethod
    def of(cls, data: DataSet, column: str | Sequence[str], as_text: Collection[str] = ()) -> Periods:
        """The periods of a data set, from the names of its folders.

        Args:
            column: as `data.progressive`. In a list, equal values are the same period wherever their folders are.
            as_text: as in `partitions_of`.

        Raises:
            DataError: a file that is not in a folder `column=…`; a single column with a value in folders of several
                other partitions; texts of unequal form, which do not sort by time.
        """
        names = columns_of(column)
        key = names[0] if len(names) == 1 else names
        conditions = parse_all(data.filters)
        wanted = {*names, *(condition.column for condition in conditions)}
        files = find_partitioned(data.listed(), wanted, as_text).that_pass(conditions).files
        values: set[Value] = set()
        for file in files:
            value = value_of(key, file.values)
            if value is None:
                lacking = next(name for name in names if file.values.get(name) is None)
                raise DataError(
                    f"data.progressive: the file is not in a folder {lacking}=…",
                    file=file.file.uri,
                    fix="move it into one, or exclude it by a filter",
                )
            values.add(value)
        if isinstance(column, str):
            _check_parents(files, column)
        for number, name in enumerate(names):
            _check_form(name, {_parts(value)[number] for value in values}, data)
        on_columns = tuple(condition for condition in conditions if condition.column in names)
        return cls(key, tuple(sorted(values)), on_columns, str(data))  # values of one type

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
        after = "" if value is None else f" after {_shown(self.column, value)}"
        newest = f"newest folder {_shown(self.column)}" if self.spans is None else "newest window"
        raise DataError(
            f"{self.option}: nothing to train on{after}; the {newest} is used for evaluation only",
            file=self.data,
            fix=f"wait for the next {self._kind}, or train without {self.option.removesuffix(': time')}",
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
            f"only {len(self.values)} folders {_shown(self.column)} exist, so its period is unknown",
            file=self.data,
            fix="restore the older folders for one launch, or start a new run with init_from this run and filters that "
            "start at the first new period",
        )

    def evaluated_after(self, trained: Only) -> Only:
        """The period for the evaluation after training on `trained`.

        Raises:
            DataError: it is the last period.
        """
        passed = self._passed(trained[1])
        if passed < len(self.values):
            return self.column, self.values[passed]
        raise DataError(
            f"{self.option}: no {self._kind} after {_shown(self.column, trained[1])} to evaluate on",
            file=self.data,
            fix=f"restore the {self._kind}'s rows, or change `filters` to include them",
        )

    def continues(self, current: Only, over: bool) -> bool:
        """True if a run continues in the period `current`, or after it if `over`; False if filters exclude its rest.

        Raises:
            DataError: the folder is missing or is the last period now, or the partition column or its type changed.
        """
        column, value = current
        if column != self.column and self.spans is not None:
            raise DataError(
                f"{self.option}: the run now has {_kind(self.column)}, but the checkpoint was trained with "
                f"{_kind(column)}, which begin at other rows",
                file=self.data,
                fix="set data.windows as before, or start a new run with init_from this run",
            )
        if column != self.column:
            now, then = (one if isinstance(one, str) else f"[{', '.join(one)}]" for one in (self.column, column))
            raise DataError(
                f"data.progressive is {now!r}, but the checkpoint was trained with {then!r}",
                file=self.data,
                fix=f"set data.progressive: {then}, or start a new run under another name",
            )
        if self.spans is not None and value not in self.values and (not over or isinstance(value, tuple)):
            raise DataError(
                f"{self.option}: no window begins at {_shown(column, value)} any more, where the checkpoint stands: "
                "earlier rows were added or removed",
                file=self.data,
                fix="restore the files, or use windows of `time`, which do not depend on earlier rows",
            )
        now_parts = _parts(self.values[0] if self.values else value)
        for name, old, new in zip(columns_of(column), _parts(value), now_parts, strict=True):
            if type(old) is not type(new):
                kinds = {int: "an integer", str: "a string"}
                raise DataError(
                    f"data.progressive: {name}={old} was {kinds[type(old)]} in training, but "
                    f"{name}={new} is {kinds[type(new)]}, which sorts differently",
                    file=self.data,
                    fix="name all folders in the same form, or exclude the others by a filter",
                )
        if over:
            return True
        of_column = dict(zip(columns_of(column), _parts(value), strict=True))
        if not all(condition.holds(pa.array([of_column[condition.column]]))[0] for condition in self.filters):
            return False
        if value not in self.values:
            rest = f"skip the rest of it: filters: [[{column}, '>', {value!r}]]"
            raise DataError(
                f"data.progressive: {_shown(column, value)} was trained on in part, but its folder is missing",
                file=self.data,
                fix=f"restore the folder, or {rest if isinstance(column, str) else 'exclude it by a filter'}",
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
        following = self._named(remaining) if remaining else f"nothing until a new {self._kind} exists"
        text = f"at {self._named((current[1],))}; next: {following}"
        if late:
            text += (
                f"; NOT trained on: {self._named(late)}, which arrived late or were excluded by `filters`; "
                f"training does not return to periods before {_value_shown(self.column, current[1])}"
            )
        return text

    def shown(self, value: Value) -> str:
        """The period as text."""
        return _shown(self.column, value)

    def _passed(self, value: Value) -> int:
        """Number of periods up to and including a value."""
        return bisect_right(self.values, value)  # values of one type

    def _named(self, values: tuple[Value, ...]) -> str:
        listed = ", ".join(_shown(self.column, value) for value in values[:_SHOWN])
        if len(values) <= _SHOWN:
            return listed
        return f"{listed} and {len(values) - _SHOWN} more to {_value_shown(self.column, values[-1])}"


def _parts(value: Value) -> tuple[int | str, ...]:
    return value if isinstance(value, tuple) else (value,)


def _kind(column: Columns) -> str:
    """What the periods are."""
    if not isinstance(column, str):
        return f"windows of {column[0].removeprefix(OF_ROWS)} rows" if column[0].startswith(OF_ROWS) else "folders"
    return column if column.startswith(OF_TIME) else "folders"


def _shown(column: Columns, value: Value | None = None) -> str:
    """The folders of a period; without a value, of any. The start of a window."""
    names = columns_of(column)
    if value is not None and names[0].startswith(OF_TIME):
        return str(value)
    if isinstance(value, tuple) and names[0].startswith(OF_ROWS):
        return f"row {value[0]:,} ({value[1]})"
    parts = ["…"] * len(names) if value is None else _parts(value)
    return "/".join(f"{name}={part}" for name, part in zip(names, parts, strict=True))


def _value_shown(column: Columns, value: Value) -> str:
    return _shown(column, value) if isinstance(value, tuple) else str(value)


def _check_parents(files: Iterable[PartitionedFile], column: str) -> None:
    """Refuses a value of the column that is in several other partitions: `day=1` in `month=1` and in `month=2`."""
    parents: dict[int | str | None, str] = {}
    for file in files:
        value = file.values[column]
        *folders, _ = plain_path(file.file.uri).split("/")
        partitions = [folder for folder in folders if "=" in folder]
        depth = next(number for number, folder in enumerate(partitions) if unquote(folder.partition("=")[0]) == column)
        above = "/".join(partitions[:depth])
        first = parents.setdefault(value, above)
        if above != first:
            names = [unquote(folder.partition("=")[0]) for folder in partitions[: depth + 1]]
            raise DataError(
                f"data.progressive: {column}={value} is in {first or 'no other partition'} and in "
                f"{above or 'no other partition'}, which may be different times",
                file=file.file.uri,
                fix=f"name all columns of a period: progressive: [{', '.join(names)}], or, if it is one period in all "
                f"of these folders, progressive: [{column}]",
            )


def _check_form(column: str, values: Collection[int | str], data: DataSet) -> None:
    """Refuses texts like 2024-1-9 and 2024-1-10, which do not sort by time."""
    forms: dict[str, str] = {}
    for text in sorted(value for value in values if isinstance(value, str)):
        forms.setdefault(_form(text), text)
    if len(forms) > 1:
        first, second, *_ = forms.values()
        raise DataError(
            f"data.progressive: {column}={first} and {column}={second} have different forms; as texts they do not sort "
            "by time",
            file=str(data),
            fix="name all folders in one form with padded numbers, such as 2024-01-09, or exclude the others by a "
            "filter",
        )


def _form(text: str) -> str:
    """The text with 0 for each digit and a for each run of letters."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d", "0", text))
