"""What one column of a data set looks like: its role, its range, its ids; judged by type, name and values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import UNITS, decoded, floats_of, is_list, is_text, seconds_of, without_views
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import unnest
from rayrec.data.mapping.targets import LATEST_S
from rayrec.data.tools.quantiles import bucket_edges

TIME_NAMES = ("timestamp", "time", "ts", "date", "datetime", "event_time", "created_at", "unix_time")
WEIGHT_NAMES = ("weight", "sample_weight", "importance_weight")
GROUP_NAMES = ("group", "group_id", "session_id", "request_id", "query_id", "search_id", "impression_id")
POLICY_NAMES = ("propensity", "propensity_score", "pscore", "p_score", "action_prob", "logging_probability")
INDEX_NAMES = ("unnamed: 0", "__index_level_0__", "index")
ID_ENDS = ("id", "_cat", "_code")
NO_ID_ENDS = ("paid", "bid", "grid", "valid")
ID_NAMES = ("user", "customer", "item", "product", "movie", "video", "song", "article", "ad", "zip", "postcode")
BUCKETS = 32  # of a number as an id
FEW_IDS = 65_536  # a vocabulary of so many ids is worth its file
_FEW = 64  # an integer column of fewer distinct values is taken for a category
_FEWEST_ROWS = 10  # fewer say nothing about a law of the values
_SKEWED = 2.0  # skewness of an exponential law
_ROWS_OF_TEXTS = 100  # of fewer rows nothing is said about texts that do not come again


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """One column of the inspected rows.

    Args:
        kind: its Arrow type.
        role: "label", "dense", "id", "id_list", "weighted_id_list", "timestamp", "sample_weight", "group", "unused"; of
            lists in a sequence also "time_list" and "number_list".
        nulls: null rows.
        values: values, those of lists counted one by one.
        distinct: different ids among them; 0 for columns that are not ids.
        ids_estimate: different ids to be expected in the whole data set.
        low, high: smallest and largest number, None for others.
        longest: the longest list, None for columns that are not lists.
        width: numbers of a dense column's row.
        log: whether a few numbers reach so far above the others that their logarithm says more.
        mean, deviation: of numbers, after the logarithm where there is one.
        edges: of numbers, boundaries of about `BUCKETS` buckets of equal frequency.
        values_seen: the ids themselves where there are few (`FEW_IDS`) and the whole data set seems to have no more.
        note: why it is not used, or what to look at.
        lengths: of each row's list; None where a list is null, or a value in one null or no finite number.
        sequence: the sequence that the lists belong to.
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

    @property
    def dense_range(self) -> bool:
        """Whether the ids fill most of `[0, high]`, so that they can be rows themselves."""
        return self.low is not None and self.high is not None and self.low >= 0 and self.high < 8 * self.ids_estimate

    @property
    def table_rows(self) -> int:
        """Rows that a table for these ids should have, without a vocabulary; with room for ids that come later."""
        if self.dense_range and self.high is not None:
            return int(self.high) + 1 + max(8, int(self.high) // 4)
        return max(16, 1 << (2 * self.ids_estimate - 1).bit_length())


def column_facts(name: str, column: pa.ChunkedArray, share: float, span: tuple[int, int] | None = None) -> ColumnFacts:
    """Looks at one column.

    Args:
        share: inspected rows over all rows.
        span: smallest and largest value of all rows by the files' statistics, if they have any.
    """
    array = pa.concat_arrays([c.cast(without_views(column.type)) for c in column.chunks])
    leaf, longest, width, whole = array, None, 1, None
    if is_list(column.type):
        lists = unnest(array)
        leaf, lengths = lists.leaf, np.diff(lists.offsets)
        whole = None if array.null_count or leaf.null_count or _not_numbers(leaf) else lengths
        longest = int(lengths.max(initial=0))
        width = longest if longest and (lengths == longest).all() and not array.null_count else 0
    role, note = _role(name, column.type, leaf, width)
    if pat.is_struct(leaf.type) and role == "weighted_id_list":
        leaf = pc.struct_field(leaf, "id")
    leaf = decoded(leaf)
    low, high = _ends(leaf)
    role, note = _by_values(name, role, note, array, leaf, low, high)
    if span is not None and low is not None and high is not None and role == "id":
        low, high = min(low, span[0]), max(high, span[1])
    nulls, kind = array.null_count, str(column.type)
    if role in ("id", "id_list", "weighted_id_list"):
        distinct, estimate = _distinct(leaf, share)
        few = distinct <= FEW_IDS and estimate <= 1.1 * distinct + 1
        seen = pc.unique(leaf.drop_null()).sort() if few else None
        if pat.is_integer(leaf.type) and share < 1 and span is None:
            low = None  # larger ids may follow: they cannot be rows themselves
        if is_text(leaf.type) and len(leaf) >= _ROWS_OF_TEXTS and distinct > 0.9 * (len(leaf) - leaf.null_count):
            role, note, seen = "unused", "hardly a text comes twice: a key, or free text?", None
        return ColumnFacts(
            *(name, kind, role, nulls, len(leaf), distinct, estimate, low, high, longest, note),
            values_seen=seen,
            lengths=whole,
        )
    facts = ColumnFacts(
        name, kind, role, nulls, len(leaf), 0, 0, low, high, longest, note, max(1, width), lengths=whole
    )
    return _numbers(facts, leaf) if role == "dense" else facts


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
    """(role, note) after a look at names and values."""
    lower, whole = name.lower(), not array.null_count and low is not None and high is not None
    if not name:
        return "unused", "has no name: the index that pandas writes?"
    if role in ("unused", "label"):
        return role, note
    timed = whole and lower in TIME_NAMES and role in ("id", "dense") and pat.is_integer(leaf.type)
    if timed and low is not None and high is not None and time_unit(low, high):
        return "timestamp", ""
    if lower in INDEX_NAMES or (role != "timestamp" and _counts_rows(leaf)):
        return "unused", "counts the rows"
    if lower in POLICY_NAMES:
        return "unused", "what the logging policy gave: not known when a model scores"
    if role in ("id", "dense") and whole:
        assert low is not None and high is not None
        if lower in WEIGHT_NAMES and low >= 0 and role == "dense" and not _not_numbers(leaf):
            return "sample_weight", "or a feature? then list it under dense"
    if lower in GROUP_NAMES and role == "id" and not array.null_count:
        return "group", "evaluations give the AUC inside groups; list it under sparse too if it is a feature"
    if role == "timestamp" and (array.null_count or _outside_times(leaf)):
        return "unused", "a time that is null in some rows, or outside 1970 to 2200"
    if role == "dense" and _named_id(lower) and pat.is_floating(leaf.type) and _all_whole(leaf):
        return "unused", "ids as floats, as pandas writes them where some are null? write integers: astype('Int64')"
    if role == "dense" and _not_numbers(leaf):
        return "unused", "NaN or infinite in some rows: write nulls instead"
    return role, note


def _counts_rows(leaf: pa.Array) -> bool:
    """Whether integers go up by one from row to row, but for the starts of files."""
    if not pat.is_integer(leaf.type) or leaf.null_count or len(leaf) < _FEWEST_ROWS:
        return False
    steps = np.diff(leaf.to_numpy(zero_copy_only=False).astype(np.int64))
    return bool(np.count_nonzero(steps == 1) > 0.99 * len(steps) or (len(steps) < 100 and (steps == 1).all()))


def _not_numbers(leaf: pa.Array) -> bool:
    return pat.is_floating(leaf.type) and not pc.all(pc.is_finite(leaf.cast(pa.float64())), min_count=0).as_py()


def _named_id(name: str) -> bool:
    return name in ID_NAMES or (name.endswith(ID_ENDS) and not name.endswith(NO_ID_ENDS))


def _all_whole(leaf: pa.Array) -> bool:
    numbers = leaf.drop_null().cast(pa.float64())
    return bool(pc.all(pc.equal(pc.floor(numbers), numbers)).as_py())  # of none it is not known


def _outside_times(leaf: pa.Array) -> bool:
    if not (pat.is_timestamp(leaf.type) or pat.is_date(leaf.type)):
        return False
    seconds = seconds_of(leaf, "s")
    return not (seconds.min(initial=0) >= 0 and seconds.max(initial=0) < LATEST_S)


def _numbers(facts: ColumnFacts, leaf: pa.Array) -> ColumnFacts:
    """Mean, deviation, and whether a logarithm helps; a column of one value, or of nulls, is of no use."""
    numbers = floats_of(leaf)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() == numbers.max():
        return replace(facts, role="unused", note="one value in all rows that were looked at")
    edges = tuple(bucket_edges(np.sort(numbers), BUCKETS))
    mean, deviation = float(numbers.mean()), float(numbers.std())
    skewness = float((((numbers - mean) / deviation) ** 3).mean()) if deviation > 0 else 0.0
    log = bool(numbers.min() >= 0 and numbers.max() > 100 and skewness > _SKEWED)
    if log:
        numbers = np.log1p(numbers)
        mean, deviation = float(numbers.mean()), float(numbers.std())
    if not (np.isfinite(mean) and np.isfinite(deviation) and deviation > 0):
        return replace(facts, role="unused", note="numbers too large for float32")
    digits = 5 - math.floor(math.log10(deviation))  # the mean as exactly as the deviation, from which it may lie far
    return replace(facts, log=log, mean=round(mean, digits), deviation=float(f"{deviation:.6g}"), edges=edges)


def _role(name: str, kind: pa.DataType, leaf: pa.Array, width: int) -> tuple[str, str]:
    """(role, note) of a column, judged by its type first, then by its name and values."""
    plain = leaf.type.value_type if pat.is_dictionary(leaf.type) else leaf.type
    if is_list(plain):
        return "unused", "lists of lists: flatten them to one level"
    if is_list(kind):
        if pat.is_struct(plain) and {f.name for f in plain.fields} == {"id", "weight"}:
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
        if len(values) and not leaf.null_count and pc.all(pc.is_in(values, pa.array([0, 1]).cast(values.type))).as_py():
            return "label", ""
        is_id = _named_id(name.lower()) or len(values) < _FEW
        return ("id", "") if is_id else ("dense", "a number? if these are ids, list it under sparse")
    if pat.is_floating(plain) or pat.is_decimal(plain):
        return "dense", ""
    if pat.is_timestamp(plain) or pat.is_date(plain):
        return "timestamp", ""
    return "unused", f"{plain} is neither a number nor an id"


def time_unit(low: float, high: float) -> str | None:
    """The unit in which integers are times between 1973 and 2200; None where in no unit they are."""
    return next((unit for unit, each in UNITS.items() if low >= 10**8 * each and high < LATEST_S * each), None)


def _distinct(leaf: pa.Array, share: float) -> tuple[int, int]:
    """Different ids here, and how many to expect in all (Chao 1984, from those seen once and twice)."""
    counts = leaf.drop_null().value_counts().field("counts") if len(leaf) else pa.array([], pa.int64())
    seen = len(counts)
    if share >= 1 or not seen:
        return seen, max(seen, 1)
    once, twice = (pc.sum(pc.equal(counts, n)).as_py() or 0 for n in (1, 2))
    unseen = once * once / (2 * twice) if twice else once * (once - 1) / 2
    return seen, int(seen + min(unseen, seen * (1 / share - 1)))
