"""Guesses the role of a column from its type, name and values, and computes its range and ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import (
    LATEST_S,
    UNITS,
    decoded,
    floats_of,
    is_list,
    is_text,
    nulls_of,
    seconds_of,
    without_views,
)
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import row_of, unnest
from rayrec.data.tools.init.stated_roles import StatedRole
from rayrec.data.tools.quantiles import bucket_edges

TIME_NAMES = ("timestamp", "time", "ts", "date", "datetime", "event_time", "created_at", "unix_time")
WEIGHT_NAMES = ("weight", "sample_weight", "importance_weight")
GROUP_NAMES = ("group", "group_id", "session_id", "request_id", "query_id", "search_id", "impression_id")
POLICY_NAMES = ("propensity", "propensity_score", "pscore", "p_score", "action_prob", "logging_probability")
INDEX_NAMES = ("unnamed: 0", "__index_level_0__", "index")
ID_ENDS = ("id", "_cat", "_code")
NO_ID_ENDS = ("paid", "bid", "grid", "valid")
ID_NAMES = ("user", "customer", "item", "product", "movie", "video", "song", "article", "ad", "zip", "postcode")
# Buckets for a number as an id.
BUCKETS = 32
# Largest number of ids for which a vocabulary is written.
FEW_IDS = 65_536
# An integer column with fewer distinct values is a category.
FEW_VALUES = 64
# Minimum rows to recognize a row counter.
_MIN_ROWS = 10
# Skewness of an exponential distribution.
_SKEWED = 2.0
# Fraction of distinct values of a key.
_UNIQUE = 0.9
# Minimum rows to recognize texts that do not repeat.
_MIN_TEXT_ROWS = 100


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """Facts about a column in the inspected rows.

    Args:
        kind: the Arrow type.
        role: "label", "dense", "id", "id_list", "weighted_id_list", "timestamp", "sample_weight", "group", "unused";
            for lists in a sequence also "time_list" and "number_list".
        nulls: number of rows that are null, or lists with a null.
        values: number of values, list elements counted individually.
        distinct: number of distinct ids; 0 for columns that are not ids.
        ids_estimate: estimated number of distinct ids in the whole data set.
        low, high: minimum and maximum of numbers; None for other types.
        longest: length of the longest list; None for columns that are not lists.
        width: numbers per row of a dense column.
        log: True if the distribution is so skewed that the logarithm is the better feature.
        mean, deviation: of numbers, after the logarithm if `log`.
        edges: boundaries of about `BUCKETS` buckets of equal frequency, for numbers.
        values_seen: the distinct ids, if they are few (`FEW_IDS`) and the data set seems to have no more.
        note: why the column is unused, or what to check.
        lengths: length of each row's list; None if a list or an element is null or not finite.
        sequence: name of the sequence that the list belongs to.
        shares: name of the column that has the table of these ids.
        unique: True for integers that practically never repeat: a counter or a key.
        outcome: True if the column is left out because it seems to be known only after the label.
        time_format: unit of integer times, if it was chosen by its values or by `--time`.
        stated: the role that the user states; empty if it is guessed.
        binary: True if the column contains only 0 and 1, without nulls.
    """

    name: str
    kind: str
    role: str
    nulls: int
    values: int
    distinct: int
    ids_estimate: int
    low: float | None
    high: float | None
    longest: int | None
    note: str = ""
    width: int = 1
    log: bool = False
    mean: float | None = None
    deviation: float | None = None
    edges: tuple[float, ...] = ()
    values_seen: pa.Array | None = field(default=None, compare=False)
    lengths: I64 | None = field(default=None, compare=False)
    sequence: str = ""
    shares: str = ""
    unique: bool = False
    outcome: bool = False
    time_format: str = ""
    stated: StatedRole | Literal[""] = ""
    binary: bool = False

    @property
    def dense_range(self) -> bool:
        """True if the ids fill most of `[0, high]`, so that they can be table rows themselves."""
        return self.low is not None and self.high is not None and self.low >= 0 and self.high < 8 * self.ids_estimate

    @property
    def table_rows(self) -> int:
        """Proposed rows of a table for these ids without a vocabulary, with spare rows for new ids."""
        if self.dense_range and self.high is not None:
            return int(self.high) + 1 + max(8, int(self.high) // 4)
        return max(16, 1 << (2 * self.ids_estimate - 1).bit_length())


def column_facts(
    name: str,
    column: pa.ChunkedArray,
    share: float,
    span: tuple[int, int] | None = None,
    stated: StatedRole | Literal[""] = "",
) -> ColumnFacts:
    """Computes the facts about a column.

    Args:
        share: inspected rows / all rows.
        span: minimum and maximum over all rows from the files' statistics, if available.
        stated: the role that the user states, which the values can have (`stated_roles.first_wrong`).
    """
    array = pa.concat_arrays([c.cast(without_views(column.type)) for c in column.chunks])
    leaf, longest, width, complete_lengths, offsets = array, None, 1, None, None
    if is_list(column.type):
        lists = unnest(array)
        leaf, offsets, lengths = lists.leaf, lists.offsets, np.diff(lists.offsets)
        complete_lengths = None if array.null_count or leaf.null_count or _not_numbers(leaf) else lengths
        longest = int(lengths.max(initial=0))
        width = longest if longest and (lengths == longest).all() and not array.null_count else 0
        width = longest if stated == "numbers" else width  # of all lists that are not null
    role, note = _role(name, column.type, leaf, width)
    binary = role == "label"
    if stated and not pat.is_null(leaf.type):
        role, note = _role_as_stated(stated, is_list(column.type), leaf), ""
    if pat.is_struct(leaf.type) and role == "weighted_id_list":
        leaf = pc.struct_field(leaf, "id")
    leaf = _computable(decoded(leaf))
    low, high = _ends(leaf)
    if not stated:
        role, note = _by_values(name, role, note, array, leaf, low, high)
    if span is not None and low is not None and high is not None and role == "id":
        low, high = min(low, span[0]), max(high, span[1])
    nulls, kind = array.null_count, str(column.type)
    if offsets is not None and (inner := nulls_of(leaf)) is not None:
        nulls += len(np.unique(row_of(offsets, np.flatnonzero(inner))))
    if role in ("id", "id_list", "weighted_id_list"):
        distinct, estimate = _distinct(leaf, share)
        is_small = distinct <= FEW_IDS and estimate <= 1.1 * distinct + 1
        seen = pc.unique(leaf.drop_null()).sort() if is_small else None
        if pat.is_integer(leaf.type) and share < 1 and span is None:
            low = None  # other rows may have larger ids, so ids cannot be table rows themselves
        is_long_text = is_text(leaf.type) and len(leaf) >= _MIN_TEXT_ROWS and not stated
        if is_long_text and distinct > _UNIQUE * (len(leaf) - leaf.null_count):
            role, note, seen = "unused", "more than 90 % of the values are unique: key or free text?", None
        return ColumnFacts(
            *(name, kind, role, nulls, len(leaf), distinct, estimate, low, high, longest, note),
            values_seen=seen,
            lengths=complete_lengths,
            stated=stated,
            binary=binary,
        )
    facts = ColumnFacts(
        *(name, kind, role, nulls, len(leaf), 0, 0, low, high, longest, note, max(1, width)),
        # A sequence has neither lists of numbers nor unused lists.
        lengths=None if stated else complete_lengths,
        stated=stated,
        binary=binary,
    )
    return _numbers(facts, leaf) if role == "dense" else facts


def _role_as_stated(stated: StatedRole, in_lists: bool, leaf: pa.Array) -> str:
    if stated in ("ids", "lists"):
        return "id" if not in_lists else "weighted_id_list" if pat.is_struct(leaf.type) else "id_list"
    return "dense" if stated == "numbers" else "unused"


def _computable(leaf: pa.Array) -> pa.Array:
    """The array, with float16 widened: most of Arrow's compute functions do not accept it."""
    return leaf.cast(pa.float32()) if pat.is_float16(leaf.type) else leaf


def _ends(leaf: pa.Array) -> tuple[float | None, float | None]:
    if pat.is_boolean(leaf.type):
        return 0.0, 1.0
    if pat.is_decimal(leaf.type):
        leaf = leaf.cast(pa.float64())
    if not (pat.is_integer(leaf.type) or pat.is_floating(leaf.type)) or not len(leaf):
        return None, None
    ends = pc.min_max(leaf).as_py()
    return ends["min"], ends["max"]


def _by_values(
    name: str, role: str, note: str, array: pa.Array, leaf: pa.Array, low: float | None, high: float | None
) -> tuple[str, str]:
    """Refines (role, note) by name and values."""
    lower, has_range = name.lower(), not array.null_count and low is not None and high is not None
    if not name:
        return "unused", "has no name: an index written by pandas?"
    if role in ("unused", "label"):
        return role, note
    timed = has_range and lower in TIME_NAMES and role in ("id", "dense") and pat.is_integer(leaf.type)
    if timed and low is not None and high is not None and time_unit(low, high):
        return "timestamp", ""
    if lower in INDEX_NAMES or (role != "timestamp" and _counts_rows(leaf)):
        return "unused", "counts the rows"
    if lower in POLICY_NAMES:
        return "unused", "from the logging policy: not known at prediction time"
    if role in ("id", "dense") and has_range:
        assert low is not None and high is not None
        if lower in WEIGHT_NAMES and low >= 0 and role == "dense" and not _not_numbers(leaf):
            return "sample_weight", "if it is a feature, list it under dense instead"
    if lower in GROUP_NAMES and role == "id" and not array.null_count:
        return "group", "for the AUC per group in evaluations; if it is also a feature, list it under sparse"
    if role == "timestamp" and (array.null_count or _outside_times(leaf)):
        return "unused", "a time with nulls, or outside 1970 to 2200"
    if role == "dense" and named_id(lower) and pat.is_floating(leaf.type) and _all_whole(leaf):
        return "unused", "ids as floats? pandas converts integers with nulls to floats; write integers: astype('Int64')"
    if role == "dense" and _not_numbers(leaf):
        return "unused", "NaN or infinite in some rows: write nulls instead"
    return role, note


def _counts_rows(leaf: pa.Array) -> bool:
    """True for integers that increase by one per row, except at the starts of files."""
    if not pat.is_integer(leaf.type) or leaf.null_count or len(leaf) < _MIN_ROWS:
        return False
    steps = np.diff(leaf.to_numpy(zero_copy_only=False).astype(np.int64))
    return bool(np.count_nonzero(steps == 1) > 0.99 * len(steps) or (len(steps) < 100 and (steps == 1).all()))


def _not_numbers(leaf: pa.Array) -> bool:
    return pat.is_floating(leaf.type) and not pc.all(pc.is_finite(leaf.cast(pa.float64())), min_count=0).as_py()


def named_id(name: str) -> bool:
    """True if a name in lower case says that the column holds ids."""
    return name in ID_NAMES or (name.endswith(ID_ENDS) and not name.endswith(NO_ID_ENDS))


def _all_whole(leaf: pa.Array) -> bool:
    numbers = leaf.drop_null().cast(pa.float64())
    return bool(pc.all(pc.equal(pc.floor(numbers), numbers)).as_py())  # None for no values


def _outside_times(leaf: pa.Array) -> bool:
    if not (pat.is_timestamp(leaf.type) or pat.is_date(leaf.type)):
        return False
    seconds = seconds_of(leaf, "s")
    return not (seconds.min(initial=0) >= 0 and seconds.max(initial=0) < LATEST_S)


def _numbers(facts: ColumnFacts, leaf: pa.Array) -> ColumnFacts:
    """Adds mean, deviation, edges and `log`. A column with a single value, or only nulls, is unused."""
    numbers = floats_of(leaf)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() == numbers.max():
        return replace(facts, role="unused", note="the same value in all inspected rows")
    distinct = len(np.unique(numbers)) if pat.is_integer(leaf.type) else 0
    unique = len(numbers) >= _MIN_ROWS and distinct > _UNIQUE * len(numbers)
    edges = tuple(bucket_edges(np.sort(numbers), BUCKETS))
    mean, deviation = float(numbers.mean()), float(numbers.std())
    skewness = float((((numbers - mean) / deviation) ** 3).mean()) if deviation > 0 else 0.0
    log = bool(numbers.min() >= 0 and numbers.max() > 100 and skewness > _SKEWED)
    if log:
        numbers = np.log1p(numbers)
        mean, deviation = float(numbers.mean()), float(numbers.std())
    if not (np.isfinite(mean) and np.isfinite(deviation) and deviation > 0):
        return replace(facts, role="unused", note="numbers are too large for float32")
    digits = 5 - math.floor(
        math.log10(deviation)
    )  # same absolute precision as the deviation, however large the mean is
    mean, deviation = round(mean, digits), float(f"{deviation:.6g}")
    return replace(facts, log=log, mean=mean, deviation=deviation, edges=edges, unique=unique)


def _role(name: str, kind: pa.DataType, leaf: pa.Array, width: int) -> tuple[str, str]:
    """(role, note) of a column by type, then by name and values."""
    plain = leaf.type.value_type if pat.is_dictionary(leaf.type) else leaf.type
    if is_list(plain):
        return "unused", "lists of lists: flatten them to one level"
    if is_list(kind):
        if pat.is_struct(plain) and {f.name for f in plain.fields} == {"id", "weight"}:
            weights = pc.struct_field(leaf.drop_null(), "weight")
            if weights.null_count or _not_numbers(weights):
                return "unused", "a weight is null, NaN or infinite: write a number"
            return "weighted_id_list", ""
        if pat.is_integer(plain) or is_text(plain):
            return "id_list", ""
        if width and (pat.is_floating(plain) or pat.is_decimal(plain)):
            return "dense", ""
        return "unused", f"a list of {plain}"
    if is_text(plain):
        return "id", ""
    if pat.is_boolean(plain):
        return ("dense", "") if leaf.null_count else ("label", "")
    if pat.is_integer(plain):
        values = pc.unique(decoded(leaf)).drop_null()
        if _zeros_and_ones(leaf, values):
            return "label", ""
        is_id = named_id(name.lower()) or len(values) < FEW_VALUES
        return ("id", "") if is_id else ("dense", f"a number? if it is an id, add it with --ids {name}")
    if pat.is_floating(plain):
        leaf = _computable(decoded(leaf))
        values = pc.unique(leaf)
        return ("label" if len(values) == 2 and _zeros_and_ones(leaf, values) else "dense"), ""
    if pat.is_decimal(plain):
        return "dense", ""
    if pat.is_timestamp(plain) or pat.is_date(plain):
        return "timestamp", ""
    if pat.is_null(plain):
        return "unused", "null in all inspected rows"
    return "unused", f"{plain} is neither a number nor an id"


def plain_number(value: float, digits: int = 6) -> str:
    """The number without an exponent; integers up to 2**53 exactly, others with this many significant digits."""
    if digits == 6 and math.isfinite(value) and value == int(value) and abs(value) < 2**53:
        return str(int(value))
    return str(np.format_float_positional(float(f"{value:.{digits}g}"), trim="-"))


def _zeros_and_ones(leaf: pa.Array, values: pa.Array) -> bool:
    """True if there are rows, none is null, and the distinct values are among 0 and 1."""
    if not len(leaf) or leaf.null_count or len(values) > 2:
        return False
    return bool(pc.all(pc.is_in(values, pa.array([0, 1]).cast(values.type))).as_py())


def time_unit(low: float, high: float) -> str | None:
    """The unit in which the integers are times between 1973 and 2200, or None."""
    return next(
        (unit for unit, per_second in UNITS.items() if low >= 10**8 * per_second and high < LATEST_S * per_second), None
    )


def _distinct(leaf: pa.Array, share: float) -> tuple[int, int]:
    """Distinct ids in the sample, and the estimate for all rows (Chao 1984, from the ids seen once and twice)."""
    counts = leaf.drop_null().value_counts().field("counts") if len(leaf) else pa.array([], pa.int64())
    seen = len(counts)
    if share >= 1 or not seen:
        return seen, max(seen, 1)
    once, twice = (pc.sum(pc.equal(counts, n)).as_py() or 0 for n in (1, 2))
    unseen = once * once / (2 * twice) if twice else once * (once - 1) / 2
    return seen, int(seen + min(unseen, seen * (1 / share - 1)))
