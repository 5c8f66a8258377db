"""Config of derived columns: columns computed from other columns. `derive.py` computes them.

Each entry of `schema.derived` is a pure function of Arrow arrays. It reads columns of the data, or derived columns
listed above it, and defines a new column that features read like any other. `map_rows` computes them for training,
`evaluate`, `predict` and the service; `deploy/cpp` implements some of them again.

Statistics (quantile boundaries, means) are part of the schema. `rayrec data fit` computes missing ones from the
training data and writes them into the config, and so into the run, the export and the fingerprint.

Nulls pass through; the feature's `on_null` or `default` decides. Scalar functions apply to lists element by element.
"""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from rayrec._runtime.strict import Strict
from rayrec.data.mapping.derived.expressions import names_in

Unit = Literal["s", "ms", "us", "ns"]


class _Derived(Strict):
    name: str = Field(min_length=1)

    @property
    def inputs(self) -> list[str]:
        """The columns that it reads."""
        values = [getattr(self, field, None) for field in ("column", "columns", "at", "key")]
        names = ([value] if isinstance(value, str) else value for value in values if value is not None)
        return list(chain.from_iterable(names))


class Buckets(_Derived):
    """Numbers as ids: the number of boundaries ≤ x, an integer in `[0, len(boundaries)]`.

    Args:
        kind: Kind of the derived column; the data guide has a table of all kinds.
        name: Name of the new column.
        column: Input column: of the data, or derived above.
        boundaries: For `buckets`: ascending numbers.
        quantiles: For `buckets`, instead of boundaries: number of buckets of equal frequency; `rayrec data fit`
            computes their boundaries.
        log_base: For `buckets`, instead of boundaries: the powers base⁰, base¹, … are the boundaries.
        buckets: For `buckets` with `log_base`: number of buckets; larger numbers fall into the last one.
    """

    kind: Literal["buckets"]
    column: str
    boundaries: list[float] | None = Field(default=None, min_length=1)
    quantiles: int | None = Field(default=None, ge=2)
    log_base: float | None = Field(default=None, gt=1)
    buckets: int = Field(default=32, ge=2)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.boundaries is None and (self.quantiles is None) == (self.log_base is None):
            raise ValueError(f"derived column {self.name!r}: give one of boundaries, quantiles and log_base")
        if self.log_base is not None and (self.boundaries or self.quantiles):
            raise ValueError(f"derived column {self.name!r}: give log_base or boundaries, not both")
        ends = self.boundaries or []
        if not all(map(math.isfinite, ends)) or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"derived column {self.name!r}: the boundaries must be finite and ascend")
        return self

    @property
    def edges(self) -> list[float] | None:
        """The boundaries; None if they are not fitted yet."""
        return self.boundaries if self.log_base is None else [self.log_base**k for k in range(self.buckets - 1)]


class Missing(_Derived):
    """1 for a null or NaN, else 0."""

    kind: Literal["missing"]
    column: str


class Cross(_Derived):
    """Combinations of ids as 64-bit hashes; for lists, all pairs of elements. Map the result with `hash`.

    Args:
        columns: For `cross`: two or more columns of ids or lists of ids; the order matters. For `overlap`: two lists.
            For `custom`: the arguments of the function.
    """

    kind: Literal["cross"]
    columns: list[str] = Field(min_length=2)


class TimePart(_Derived):
    """A component of a time in a time zone: hour 0 to 23, weekday 0 (Monday) to 6, day of the month, month, minute.

    Args:
        part: For `time_part`: the component.
        zone: For `time_part`: IANA time zone, e.g. Europe/Berlin.
        unit: For `time_part`, `age`, `entity` and `events`: unit of integer times, counted from 1970.
    """

    kind: Literal["time_part"]
    column: str
    part: Literal["minute", "hour", "weekday", "day", "month"] = "hour"
    zone: str = "UTC"
    unit: Unit = "s"

    @field_validator("zone")
    @classmethod
    def _known(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"unknown time zone {zone!r}; give an IANA name such as Europe/Berlin") from error
        return zone


class Age(_Derived):
    """The age of an event at the time of the row, a number.

    Args:
        at: For `age`, `entity` and `events`: column with the time of the row.
        per: For `age`: unit of the result.
        on_future: For `age`: result for an event after the time of the row: "error" reports it as a possible leak,
            "zero", or "null".
    """

    kind: Literal["age"]
    column: str
    at: str
    per: Literal["second", "minute", "hour", "day"] = "hour"
    unit: Unit = "s"
    on_future: Literal["error", "zero", "null"] = "error"


class Lookup(_Derived):
    """The value of a key in a map column; null if the map lacks the key.

    Args:
        key: For `lookup`: column with the key of each row. For `entity` and `events`: column of the table with the
            keys.
        value: For `lookup`, instead of `key`: the same key for all rows.
    """

    kind: Literal["lookup"]
    column: str
    key: str | None = None
    value: str | int | None = None

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.key is None) == (self.value is None):
            raise ValueError(f"derived column {self.name!r}: give either `key` (a column) or `value`")
        return self


class Expression(_Derived):
    """Arithmetic, comparisons and functions over columns of numbers.

    Args:
        expression: For `expression`, e.g. `(clicks + 1) / (views + 10)` or `log1p(price) - log1p(col("last price"))`.
    """

    kind: Literal["expression"]
    expression: str

    @field_validator("expression")
    @classmethod
    def _parses(cls, text: str) -> str:
        names_in(text)
        return text

    @property
    def inputs(self) -> list[str]:
        return names_in(self.expression)


class Tokens(_Derived):
    """Splits texts into tokens: a list of texts, or of distinct tokens with their counts.

    Args:
        separator: For `tokens`: regular expression (RE2) that separates tokens.
        lower: For `tokens`: convert to lower case.
        ngrams: For `tokens`: numbers of consecutive tokens that form an id, e.g. [1, 2].
        counts: For `tokens`: list each distinct token once, weighted by its count.
    """

    kind: Literal["tokens"]
    column: str
    separator: str = r"[^\pL\pN]+"
    lower: bool = True
    ngrams: list[Annotated[int, Field(ge=1, le=8)]] = Field(default=[1], min_length=1)
    counts: bool = False


class Overlap(_Derived):
    """Distinct ids of the first list that are also in the second.

    Args:
        measure: For `overlap`: "count", "ratio" (count / distinct ids of the first list; 0 if it is empty), or "any"
            (0 or 1).
    """

    kind: Literal["overlap"]
    columns: list[str] = Field(min_length=2, max_length=2)
    measure: Literal["count", "ratio", "any"] = "count"


class Pairs(_Derived):
    """The keys of a map column as ids with its values as weights, for `kind: weighted_id_list`."""

    kind: Literal["pairs"]
    column: str


class Entity(_Derived):
    """A column of a table of entities, for the key of each row, or of each element of a list of keys.

    Args:
        path: For `entity` and `events`: file, folder or glob of the table.
        take: For `entity` and `events`: column of the table with the values.
        valid_from: For `entity`: column of the table with the time when a version of an entity becomes valid; a row
            gets the last version that is valid at its time, `at`. Default: one version per key.
        on_missing: For `entity`: for a key that the table lacks, "error" reports it, "null" leaves it to `on_null` or
            `default` of the feature.
    """

    kind: Literal["entity"]
    column: str
    path: str
    key: str
    take: str
    valid_from: str | None = None
    at: str | None = None
    unit: Unit = "s"
    on_missing: Literal["error", "null"] = "error"

    @model_validator(mode="after")
    def _time_of_both(self) -> Self:
        if (self.valid_from is None) != (self.at is None):
            raise ValueError(
                f"derived column {self.name!r}: give both valid_from (the time of a version) and at (the time of a "
                "row), or neither"
            )
        return self

    @property
    def inputs(self) -> list[str]:
        return [self.column] + ([self.at] if self.at is not None else [])


class Events(_Derived):
    """A list of a column of events: the last ones of the key of each row that are earlier than the row.

    Args:
        time: For `events`: column of the table with the time of each event.
        last: For `events`: most events of a row; the latest ones.
        where: For `events`: columns of the table with the values of the events that count, e.g. `{action: [like]}`.
    """

    kind: Literal["events"]
    column: str
    path: str
    key: str
    time: str
    take: str
    at: str
    last: int = Field(ge=1)
    where: dict[str, list[int | str]] = Field(default={})
    unit: Unit = "s"

    @property
    def inputs(self) -> list[str]:
        return [self.column, self.at]


class Custom(_Derived):
    """Your own function from Arrow arrays to one Arrow array of the same length.

    Its result for a row must not depend on the other rows, and it must accept empty arrays.

    Args:
        function: For `custom`: `module:function`, called with one array per column.
    """

    kind: Literal["custom"]
    columns: list[str] = Field(min_length=1)
    function: str = Field(pattern=r"^[\w.]+:\w+$")


Derived = Annotated[
    Buckets
    | Missing
    | Cross
    | TimePart
    | Age
    | Lookup
    | Expression
    | Tokens
    | Overlap
    | Pairs
    | Entity
    | Events
    | Custom,
    Field(discriminator="kind"),
]


def needed(derived: list[Derived], columns: list[str]) -> list[Derived]:
    """The derived columns that `columns` depend on, in their order."""
    names, specs = set(columns), []
    for spec in reversed(derived):
        if spec.name in names:
            names.update(spec.inputs)
            specs.append(spec)
    return specs[::-1]


def sources(derived: list[Derived], columns: list[str]) -> list[str]:
    """The columns of the data that `columns` depend on, without duplicates."""
    if not derived:
        return list(dict.fromkeys(columns))
    specs: dict[str, Any] = {spec.name: spec for spec in derived}
    source_columns: list[str] = []
    for name in columns:
        source_columns += sources(derived, specs[name].inputs) if name in specs else [name]
    return list(dict.fromkeys(source_columns))


def check_order(derived: list[Derived]) -> None:
    """Checks that names are unique, and that derived columns read only those above them.

    Raises:
        ValueError: names the column.
    """
    names = [spec.name for spec in derived]
    for position, spec in enumerate(derived):
        if spec.name in names[:position]:
            raise ValueError(f"names of derived columns must be unique; {spec.name!r} appears more than once")
        if later := sorted({*spec.inputs} & {*names[position:]}):
            raise ValueError(
                f"derived column {spec.name!r} reads {later[0]!r}: list that one above it, under a different name"
            )
