"""`LabelJoin`: joins logged rows with label events that come later, as a stream.

A row waits for its window. When the watermark passes its end, the row is emitted with label 1 if an event came in the
window, else with label 0. What happens to a positive that comes later is the rule `late`:

- `drop`: it is counted and left out.
- `correct`: the row is emitted again with label 1. Its weight is 1 / (1 - p), p being the score that was served: with
  the logistic loss, this gradient adds the positive and takes the earlier negative back.
- `reweigh`: the row is emitted again with label 1 and weight 1. Each negative has the probability that it is real as
  its weight, (1 - p) / (1 - p (1 - d)), where d is the share of positives that come late. In expectation, the weighted
  loss is that of the final labels (fake negative weighted loss of Ktena et al. 2019; with a window, Yang et al. 2021).

All decisions follow times in the data, never a clock. If no row and no event comes after the watermark has passed it,
the output does not depend on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import decoded, impossible_times, micros_of
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError, first_line

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Late = Literal["correct", "drop", "reweigh"]

WEIGHT, LABEL_TIME = "_weight", "_label_time"
END = (1 << 62) - 1  # the watermark after the last row
BEGIN = -(1 << 62)
_KEY, _TIME, _ARRIVAL, _LABELED = "\0key", "\0time", "\0arrival", "\0label"
# Bounds the weight of a corrected row, 1 / (1 - p), to 20.
_MAX_SCORE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSpec:
    """How rows and events are joined.

    Args:
        window_s: seconds that a row waits for events.
        late: what happens to a positive that comes after the window.
        keep_s: seconds after a row within which late positives are used.
        labels: the labels; with several, `kind` names the label of an event.
        kind: column of the events with the name of a label; None: each event is a positive of the only label.
        request, row: columns of both with the key of a row.
        time: column of both with the time.
        unit: unit of times that are numbers, from 1970.
        late_share: share of positives that come late, for `reweigh`; None: counted in the events so far.
    """

    window_s: float
    late: Late = "correct"
    keep_s: float = 86_400.0
    labels: tuple[str, ...] = ("label",)
    kind: str | None = None
    request: str = "_request"
    row: str = "_row"
    time: str = "_time"
    unit: Literal["s", "ms", "us", "ns"] = "s"
    late_share: float | None = None

    def __post_init__(self) -> None:
        if not self.window_s > 0 or self.keep_s < self.window_s:
            raise ValueError(f"window {self.window_s:g} s must be positive, and at most keep ({self.keep_s:g} s)")
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels {list(self.labels)}: name at least one, each once")
        if len(self.labels) > 1 and self.kind is None:
            raise ValueError("several labels need `kind`, the column of the events with the name of the label")
        if len(self.labels) > 1 and self.late == "reweigh":
            raise ValueError("late: reweigh has one weight per row, so it needs a single label; use correct, or drop")
        if self.late_share is not None and not 0 <= self.late_share < 1:
            raise ValueError(f"late_share {self.late_share:g} must be at least 0 and less than 1")

    def score(self, label: str) -> str:
        """Column of the log with the served score of a label."""
        return "_score" if len(self.labels) == 1 else f"_score_{label}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "labels": list(self.labels)}


COUNTS = {
    "rows": "rows read",
    "events": "events read",
    "emitted": "rows written at the end of their window",
    "positives": "positives in their window",
    "late_positives": "positives after their window",
    "corrected": "rows written again for a late positive",
    "late_rows": "rows that came after the end of their window",
    "repeated_rows": "rows whose key came before, left out",
    "repeated_events": "events of a label that the row had",
    "other_events": "events of another kind",
    "without_row": "events whose row is not in the log",
    "too_late": "positives after `keep`",
}


class LabelJoin:
    """A streaming join: feed rows and events in any order, advance the watermark, take rows.

    Args:
        spec: how to join.

    Attributes:
        watermark: µs since 1970; END after the end.
        counts: numbers of `COUNTS` so far.
    """

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self.watermark = BEGIN
        self.counts = dict.fromkeys(COUNTS, 0)
        self._window, self._keep = round(spec.window_s * 1e6), round(spec.keep_s * 1e6)
        self._open: pa.Table | None = None  # rows in their window
        self._kept: pa.Table | None = None  # emitted rows, for late positives and to recognize repeated rows
        self._events = _no_events()
        self._columns = pa.schema([])  # of the rows so far

    def feed_rows(self, rows: pa.Table) -> int:
        """Takes rows of the log; returns the newest time, in µs since 1970.

        Raises:
            DataError: a column of the key or the time, or the score that the rule needs, is missing or null.
        """
        spec = self.spec
        needed = [] if spec.late == "drop" else [spec.score(label) for label in spec.labels]
        for name in (spec.request, spec.row, spec.time, *needed):
            if name not in rows.column_names:
                fix = f"late: {spec.late} weighs rows by the served score; use late: drop" if name in needed else ""
                raise column_missing(name, rows.schema, "", fix or "name the columns of the key and the time")
        for name in needed:
            _refuse_null(rows[name], name)
        if taken := {*spec.labels, WEIGHT, LABEL_TIME} & {*rows.column_names}:
            raise DataError("the log has a column that the join adds", column=min(taken), fix="rename the label")
        if not len(rows):
            return BEGIN
        times = self._times(rows)
        table = rows.append_column(_KEY, self._keys(rows)).append_column(_TIME, pa.array(times))
        first = self.counts["rows"]
        table = table.append_column(_ARRIVAL, pa.array(np.arange(first, first + len(rows))))
        columns = self._with_columns(rows.schema)
        fresh = self._first_of(table)
        held = _joined(self._open, fresh)
        # From here on, nothing fails: a file that cannot be joined leaves no trace.
        self._columns = columns
        self.counts["rows"] += len(rows)
        self.counts["repeated_rows"] += len(table) - len(fresh)
        late = fresh[_TIME].to_numpy() + self._window <= self.watermark
        self.counts["late_rows"] += int(late.sum())
        self._open = held
        return int(times.max())

    def feed_events(self, events: pa.Table) -> int:
        """Takes label events; returns the newest time, in µs since 1970.

        Raises:
            DataError: a column is missing or null.
        """
        spec = self.spec
        for name in (spec.request, spec.row, spec.time, *(() if spec.kind is None else (spec.kind,))):
            if name not in events.column_names:
                raise column_missing(name, events.schema, "", "name the columns of the key, the time and the label")
        if not len(events):
            return BEGIN
        num_events, newest = len(events), int(self._times(events).max())  # also of other kinds: time has passed for all
        labels = np.zeros(len(events), np.int32)
        if spec.kind is not None:
            _refuse_null(events[spec.kind], spec.kind)
            kinds = decoded(events[spec.kind].combine_chunks()).cast(pa.string())
            found = pc.index_in(kinds, value_set=pa.array(spec.labels))
            events, labels = events.filter(found.is_valid()), found.drop_null().to_numpy()
        if len(events):
            taken = {_KEY: self._keys(events), _LABELED: pa.array(labels, pa.int32())}
            self._events = pa.concat_tables([self._events, pa.table(taken | {_TIME: pa.array(self._times(events))})])
        self.counts["events"] += num_events
        self.counts["other_events"] += num_events - len(events)
        return newest

    def advance(self, watermark: int) -> pa.Table | None:
        """Passes the time to `watermark` (µs since 1970; `END`: nothing more comes), and emits what is decided.

        Returns:
            Rows of the log with the labels (0 or 1; null for the other labels in a repeated row), `_weight` and
            `_label_time`, the time at which the labels were known, in whose order they are. None if there are none.
        """
        before, now = self.watermark, max(watermark, self.watermark)
        self._unite_events()
        closed = self._close(before, now)
        if closed is not None:
            self._kept = _joined(self._kept, closed)
        late = self._late(before, now)
        output = self._weighed(closed, late)
        self.watermark = now
        self._forget()
        return output

    @property
    def waiting(self) -> int:
        """Rows whose window is open."""
        return 0 if self._open is None else len(self._open)

    @property
    def state(self) -> dict[str, pa.Table]:
        """The rows and events that it holds, by name. With `facts`, all that a later process needs."""
        tables = {"open": self._open, "kept": self._kept, "events": self._events}
        return {name: table for name, table in tables.items() if table is not None}

    @property
    def facts(self) -> dict[str, Any]:
        """The watermark and the counts, as JSON values."""
        return {"watermark": self.watermark, "counts": dict(self.counts)}

    @classmethod
    def restored(cls, spec: JoinSpec, facts: Mapping[str, Any], state: Mapping[str, pa.Table]) -> LabelJoin:
        """A join that continues from `state` and `facts`."""
        join = cls(spec)
        join.watermark, join.counts = int(facts["watermark"]), {**join.counts, **facts["counts"]}
        join._open, join._kept, join._events = state.get("open"), state.get("kept"), state["events"]
        added = {_KEY, _TIME, _ARRIVAL, *spec.labels, LABEL_TIME}
        for held in (join._kept, join._open):
            if held is not None:
                join._columns = join._with_columns(
                    pa.schema([field for field in held.schema if field.name not in added])
                )
        return join

    def _with_columns(self, columns: pa.Schema) -> pa.Schema:
        """The columns of the rows so far and these.

        Raises:
            DataError: a column has another type than before.
        """
        try:
            return pa.unify_schemas([self._columns, columns.remove_metadata()], promote_options="permissive")
        except pa.ArrowException as error:
            for field in columns:
                at = self._columns.get_field_index(field.name)
                known = field if at < 0 else self._columns.field(at)
                try:
                    pa.unify_schemas([pa.schema([known]), pa.schema([field])], promote_options="permissive")
                except pa.ArrowException:
                    problem = f"the column was {known.type} in earlier rows, and is {field.type}"
                    raise DataError(problem, column=field.name, fix="convert the file") from error
            raise

    def _keys(self, table: pa.Table) -> pa.Array:
        """Keys as texts: the number of the row, then the request."""
        texts, (row, request) = [], (self.spec.row, self.spec.request)
        for name in (row, request):
            _refuse_null(table[name], name)
            values = decoded(table[name].combine_chunks())
            try:
                texts.append((values.cast(pa.int64()) if name == row else values).cast(pa.large_string()))
            except pa.ArrowException as error:
                problem = "a row must be an integer" if name == row else "a request must be a text or an integer"
                raise DataError(f"{problem}: {first_line(error)}", column=name, fix="correct the column") from error
        return pc.binary_join_element_wise(*texts, pa.scalar(" ", pa.large_string()))

    def _times(self, table: pa.Table) -> I64:
        name, unit = self.spec.time, self.spec.unit
        _refuse_null(table[name], name)
        times = decoded(table[name].combine_chunks())
        if len(impossible_times(times, unit)):
            raise DataError(f"a time is not between 1970 and 2200 in {unit}", column=name, fix="state the unit")
        try:
            return micros_of(times, unit)
        except pa.ArrowException as error:
            raise DataError(
                f"the values are not times: {first_line(error)}", column=name, fix="correct them"
            ) from error

    def _first_of(self, rows: pa.Table) -> pa.Table:
        """The rows whose keys did not come before."""
        keys = rows[_KEY]
        firsts = np.zeros(len(rows), np.bool_)
        encoded = keys.combine_chunks().dictionary_encode()
        firsts[np.unique(encoded.indices.to_numpy(), return_index=True)[1]] = True
        for held in (self._open, self._kept):
            if held is not None:
                seen = held[_KEY].filter(pc.is_in(held[_KEY], value_set=encoded.dictionary))
                firsts &= ~_mask(pc.is_in(keys, value_set=seen.combine_chunks()))
        return rows if firsts.all() else rows.filter(pa.array(firsts))

    def _unite_events(self) -> None:
        """Keeps the earliest event of each label of a row."""
        grouped = self._events.group_by([_KEY, _LABELED]).aggregate([(_TIME, "min")])
        self.counts["repeated_events"] += len(self._events) - len(grouped)
        self._events = grouped.rename_columns({f"{_TIME}_min": _TIME}).select(_no_events().column_names)

    def _close(self, before: int, now: int) -> pa.Table | None:
        """The rows whose window ends, with their labels."""
        if self._open is None:
            return None
        ends = self._open[_TIME].to_numpy() + self._window
        ended = ends <= now
        if not ended.any():
            return None
        rows = self._open.filter(pa.array(ended))
        self._open = self._open.filter(pa.array(~ended)) if not ended.all() else None
        ends = ends[ended]
        for number, label in enumerate(self.spec.labels):
            times = self._event_times(rows, number)
            positive = times <= ends
            self.counts["positives"] += int(positive.sum())
            rows = rows.append_column(label, pa.array(positive))
        self.counts["emitted"] += len(rows)
        return rows.append_column(LABEL_TIME, pa.array(np.maximum(ends, before)))

    def _event_times(self, rows: pa.Table, label: int, until: int = END) -> I64:
        """Times of the events of a label of rows; END where there is none up to `until`."""
        events = self._events.filter(pc.equal(self._events[_LABELED], label))
        if until != END:
            events = events.filter(pc.less_equal(events[_TIME], until))
        if not len(events) or not len(rows):
            return np.full(len(rows), END, np.int64)
        found = pc.index_in(rows[_KEY], value_set=events[_KEY].combine_chunks())
        times: I64 = events[_TIME].combine_chunks().take(found.combine_chunks()).fill_null(END).to_numpy()
        return times

    def _late(self, before: int, now: int) -> list[pa.Table]:
        """Rows with positives after their window, one table a label. Marks them in the kept rows."""
        late: list[pa.Table] = []
        if self._kept is None:
            return late
        kept = self._kept
        for number, label in enumerate(self.spec.labels):
            times = self._event_times(kept, number, now)
            rows_at, has = kept[_TIME].to_numpy(), _mask(kept[label])
            hit = times < END
            self.counts["repeated_events"] += int((hit & has & (times > rows_at + self._window)).sum())
            hit &= ~has
            usable = hit & (times <= rows_at + self._keep)
            self.counts["too_late"] += int((hit & ~usable).sum())
            self.counts["late_positives"] += int(usable.sum())
            if usable.any():
                kept = kept.set_column(kept.column_names.index(label), label, pa.array(has | usable))
                if self.spec.late != "drop":
                    rows = kept.filter(pa.array(usable))
                    known = np.maximum(np.maximum(times, rows_at + self._window), before)[usable]
                    rows = rows.set_column(rows.column_names.index(LABEL_TIME), LABEL_TIME, pa.array(known))
                    for other in self.spec.labels:
                        values = pa.nulls(len(rows), pa.bool_()) if other != label else pa.array([True] * len(rows))
                        rows = rows.set_column(rows.column_names.index(other), other, values)
                    late.append(rows)
                    self.counts["corrected"] += len(rows)
        self._kept = kept
        return late

    def _weighed(self, closed: pa.Table | None, late: Iterable[pa.Table]) -> pa.Table | None:
        """The output: the rows with their weights, in the order of the times at which their labels were known."""
        spec, parts = self.spec, []
        shares = self._late_shares(closed, late) if spec.late == "reweigh" and closed is not None else None
        if closed is not None:
            weights = np.ones(len(closed))
            if shares is not None:
                scores = _scores(closed, spec.score(spec.labels[0]))
                negative = ~_mask(closed[spec.labels[0]])
                weights = np.where(negative, (1 - scores) / (1 - scores * (1 - shares)), weights)
            parts.append(closed.append_column(WEIGHT, pa.array(weights)))
        for rows in late:
            weights = np.ones(len(rows))
            if spec.late == "correct":
                label = next(name for name in spec.labels if not rows[name].null_count)
                weights = 1 / (1 - _scores(rows, spec.score(label)))
            parts.append(rows.append_column(WEIGHT, pa.array(weights)))
        if not parts:
            return None
        output = pa.concat_tables(parts, promote_options="permissive")
        again = np.repeat(np.arange(len(parts)) > 0, [len(part) for part in parts])
        order = np.lexsort((output[_ARRIVAL].to_numpy(), again, output[LABEL_TIME].to_numpy()))
        output = output.take(pa.array(order)).drop_columns([_KEY, _TIME, _ARRIVAL])
        names = [name for name in output.column_names if name not in (*spec.labels, WEIGHT, LABEL_TIME)]
        output = output.select([*names, *spec.labels, WEIGHT, LABEL_TIME])
        for label in spec.labels:
            output = output.set_column(output.column_names.index(label), label, output[label].cast(pa.int8()))
        known = output[LABEL_TIME].cast(pa.timestamp("us", "UTC"))
        return output.set_column(output.column_names.index(LABEL_TIME), LABEL_TIME, known)

    def _late_shares(self, closed: pa.Table, late: Iterable[pa.Table]) -> F64:
        """For each closed row, the share of late positives in those known before its window ended."""
        if self.spec.late_share is not None:
            return np.full(len(closed), self.spec.late_share)
        at, positive = closed[LABEL_TIME].to_numpy(), _mask(closed[self.spec.labels[0]])
        in_time = np.sort(at[positive])
        others = np.sort(np.concatenate([np.empty(0, np.int64), *(rows[LABEL_TIME].to_numpy() for rows in late)]))
        num_in_time = self.counts["positives"] - len(in_time) + np.searchsorted(in_time, at, side="left")
        num_late = self.counts["late_positives"] - len(others) + np.searchsorted(others, at, side="left")
        share: F64 = num_late / np.maximum(num_in_time + num_late, 1)
        return np.minimum(share, _MAX_SCORE)

    def _forget(self) -> None:
        """Removes what no later row or event needs."""
        now = self.watermark
        events = self._events
        due = events[_TIME].to_numpy() <= now
        if due.any():
            waits = known = np.zeros(len(events), np.bool_)
            if self._open is not None:
                waits = _mask(pc.is_in(events[_KEY], value_set=self._open[_KEY].combine_chunks()))
            if self._kept is not None:
                known = _mask(pc.is_in(events[_KEY], value_set=self._kept[_KEY].combine_chunks()))
            # An event without a row waits for a window: its row may come late.
            expired = events[_TIME].to_numpy() + self._window <= now
            gone = due & ~waits & (known | expired)
            self.counts["without_row"] += int((gone & ~known).sum())
            self._events = events.filter(pa.array(~gone))
        if self._kept is not None:
            if self.spec.late == "drop":
                self._kept = self._kept.select([_KEY, _TIME, *self.spec.labels, LABEL_TIME])
            rest = self._kept.filter(pa.array(self._kept[_TIME].to_numpy() + self._keep > now))
            self._kept = rest if len(rest) else None


def _no_events() -> pa.Table:
    return pa.schema([(_KEY, pa.large_string()), (_LABELED, pa.int32()), (_TIME, pa.int64())]).empty_table()


def _joined(held: pa.Table | None, more: pa.Table) -> pa.Table:
    if held is None:
        return _whole(more)
    return _whole(pa.concat_tables([held, more], promote_options="permissive"))


def _whole(table: pa.Table) -> pa.Table:
    """The table in one chunk, with one dictionary a column: a file of Arrow IPC holds no more."""
    return table.unify_dictionaries().combine_chunks()


def _mask(values: pa.Array | pa.ChunkedArray) -> Bools:
    mask: Bools = np.asarray(values).astype(np.bool_)
    return mask


def _scores(rows: pa.Table, name: str) -> F64:
    scores: F64 = rows[name].cast(pa.float64()).to_numpy()
    return np.clip(scores, 0.0, _MAX_SCORE)


def _refuse_null(column: pa.ChunkedArray, name: str) -> None:
    if column.null_count:
        row = int(np.flatnonzero(_mask(column.is_null()))[0])
        raise DataError("the value is null", row=row, column=name, fix="remove the row")
