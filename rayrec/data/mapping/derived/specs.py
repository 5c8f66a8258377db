"""Derived columns: what the schema says about columns that are made of others; `derive.py` makes them.

A feature is source columns → a chain of small pure functions on Arrow arrays → ids (lists, weights) or numbers. Each
link of the chain is one entry of `schema.derived`: it reads columns of the data, or derived columns listed above it,
and gives a new column, which features name like any other. There is one implementation, called by
`map_rows`, so that training, `evaluate`, `predict` and the service get equal values. `deploy/cpp` repeats some of them.

Statistics (boundaries of quantiles, means) are part of the schema. `rayrec data fit` computes those left out from the
training data alone and writes them into the config; so they are in the run, the export and the fingerprint.

A null stays null, and the feature that reads the column says what becomes of it. Lists are mapped element by element.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from rayrec.data.mapping.derived.expressions import names_in
from rayrec.data.strict import Strict

Unit = Literal["s", "ms", "us", "ns"]


class _Derived(Strict):
    name: str = Field(min_length=1)

    @property
    def inputs(self) -> list[str]:
        """The columns that it is made of."""
        given = [getattr(self, field, None) for field in ("column", "columns", "at", "key")]
        return [name for one in given if one is not None for name in ([one] if isinstance(one, str) else one)]


class Buckets(_Derived):
    """Numbers as ids: how many boundaries a number reaches, an integer in `[0, boundaries]`.

    Args:
        kind: what is made of the columns; the README of the data has a table of all kinds.
        name: of the new column.
        column: a column that it is made of, in the data or above it in the list.
        boundaries: of `buckets`, ascending numbers.
        quantiles: of `buckets`, in place of boundaries: so many buckets of equal frequency, of which `rayrec data fit`
            computes the boundaries.
        log_base: of `buckets`, in place of boundaries: the powers base⁰, base¹, …
        buckets: of `buckets` by logarithm, how many there are; larger numbers are in the last one.
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
            raise ValueError(f"derived column {self.name!r}: log_base stands in place of boundaries")
        ends = self.boundaries or []
        if not all(map(math.isfinite, ends)) or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"derived column {self.name!r}: the boundaries must be finite and ascend")
        return self

    @property
    def edges(self) -> list[float] | None:
        """The boundaries; None where they are yet to be fitted."""
        return self.boundaries if self.log_base is None else [self.log_base**k for k in range(self.buckets - 1)]


class Missing(_Derived):
    """1 where a column is null (or NaN), 0 elsewhere."""

    kind: Literal["missing"]
    column: str


class Cross(_Derived):
    """Ids of columns' combinations, as 64-bit hashes; of lists, of each element with each. Map them with `hash`.

    Args:
        columns: of `cross`, two or more columns of ids or lists, whose order matters; of `overlap`, two lists; of
            `custom`, the arguments.
    """

    kind: Literal["cross"]
    columns: list[str] = Field(min_length=2)


class TimePart(_Derived):
    """A part of a time in a zone, an integer: hour 0 to 23, weekday 0 (Monday) to 6, day of the month, month, minute.

    Args:
        part: of `time_part`, which one.
        zone: of `time_part`, an IANA name such as Europe/Berlin.
        unit: of `time_part` and `age`, of times in integers, counted from 1970.
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
            raise ValueError(f"there is no time zone {zone!r}; give an IANA name such as Europe/Berlin") from error
        return zone


class Age(_Derived):
    """How long before the row's time events happened, a number.

    Args:
        at: of `age`, the column with the row's time.
        per: of `age`, the unit of the result.
        on_future: of `age`, for an event after the row's time: "error" reports it (it may be a leak), "zero", "null".
    """

    kind: Literal["age"]
    column: str
    at: str
    per: Literal["second", "minute", "hour", "day"] = "hour"
    unit: Unit = "s"
    on_future: Literal["error", "zero", "null"] = "error"


class Lookup(_Derived):
    """The value that a map column has for a key; null where it has none.

    Args:
        key: of `lookup`, the column with each row's key.
        value: of `lookup`, in place of `key`: one key for all rows.
    """

    kind: Literal["lookup"]
    column: str
    key: str | None = None
    value: str | int | None = None

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if (self.key is None) == (self.value is None):
            raise ValueError(f"derived column {self.name!r}: give `key` (a column) or `value`, one of them")
        return self


class Expression(_Derived):
    """Arithmetic, comparisons and a few functions over columns of numbers, in Arrow.

    Args:
        expression: of `expression`, e.g. `(clicks + 1) / (views + 10)` or `log1p(price) - log1p(col("last price"))`.
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
    """The tokens of texts: a list of texts, or of tokens with how often each comes.

    Args:
        separator: of `tokens`, a regular expression (RE2) of what lies between tokens.
        lower: of `tokens`, whether letters become small ones.
        ngrams: of `tokens`, how many tokens in a row make an id, e.g. [1, 2].
        counts: of `tokens`, whether each different one comes once, with its count as its weight.
    """

    kind: Literal["tokens"]
    column: str
    separator: str = r"[^\pL\pN]+"
    lower: bool = True
    ngrams: list[Annotated[int, Field(ge=1, le=8)]] = Field(default=[1], min_length=1)
    counts: bool = False


class Overlap(_Derived):
    """How much of a first list's different ids a second list has.

    Args:
        measure: of `overlap`: "count", "ratio" (of the first list's; 0 of an empty one) or "any" (0 or 1).
    """

    kind: Literal["overlap"]
    columns: list[str] = Field(min_length=2, max_length=2)
    measure: Literal["count", "ratio", "any"] = "count"


class Pairs(_Derived):
    """A map column's keys as ids with its values as weights, for `kind: weighted_id_list`."""

    kind: Literal["pairs"]
    column: str


class Custom(_Derived):
    """A function of yours: Arrow arrays in, one Arrow array of as many rows out. It must treat rows alike however they
    are put together, also none at all.

    Args:
        function: of `custom`, `module:function`, called with an array a column.
    """

    kind: Literal["custom"]
    columns: list[str] = Field(min_length=1)
    function: str = Field(pattern=r"^[\w.]+:\w+$")


Derived = Annotated[
    Buckets | Missing | Cross | TimePart | Age | Lookup | Expression | Tokens | Overlap | Pairs | Custom,
    Field(discriminator="kind"),
]


def needed(derived: list[Derived], columns: list[str]) -> list[Derived]:
    """Those that the columns are made of, in their order."""
    wanted, found = set(columns), []
    for spec in reversed(derived):
        if spec.name in wanted:
            wanted.update(spec.inputs)
            found.append(spec)
    return found[::-1]


def sources(derived: list[Derived], columns: list[str]) -> list[str]:
    """The columns of the data that the columns are made of, each once."""
    specs: dict[str, Any] = {spec.name: spec for spec in derived}
    found: list[str] = []
    for name in columns:
        found += sources(derived, specs[name].inputs) if name in specs else [name]
    return list(dict.fromkeys(found))


def check_order(derived: list[Derived]) -> None:
    """That names are unique and every column is made of those above it.

    Raises:
        ValueError: names the column.
    """
    names = [spec.name for spec in derived]
    for place, spec in enumerate(derived):
        if spec.name in names[:place]:
            raise ValueError(f"derived columns must have names of their own; {spec.name!r} appears more than once")
        if later := sorted({*spec.inputs} & {*names[place:]}):
            raise ValueError(
                f"derived column {spec.name!r} is made of {later[0]!r}: list that above it, by another name"
            )
