"""Config of the mappings from ids to table rows and from values to labels. `sparse.py` and `targets.py` apply them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rayrec._runtime.strict import Strict
from rayrec.storage.locations import Place


class Identity(Strict):
    """The id is the table row.

    Args:
        bounds: For an id outside `[0, rows)`: "error" reports it, "clip" uses the nearest row, "drop" removes it from
            its bag.
    """

    kind: Literal["identity"] = "identity"
    bounds: Literal["error", "clip", "drop"] = "error"


TextLaw = Literal[1, 2]
FIRST_TEXT_LAW: TextLaw = 1  # of everything that records none
TEXT_LAW: TextLaw = 2  # of new runs


class Hash(Strict):
    """Hashes integers and strings to table rows; different ids may collide.

    Args:
        seed: Seed of the hash.
        text_law: Version of the hash of strings. Default: 2, the fast one, which a new run writes into its config; a
            run that starts from the weights of another takes the version of that one. 1 where nothing is recorded: in
            runs and exports of earlier releases, and in a schema that is used without a run.
    """

    kind: Literal["hash"] = "hash"
    seed: int = 0
    text_law: TextLaw | None = None


MAX_SPREAD = 1 << 32


class Vocabulary(Strict):
    """Gives each id of a vocabulary its own row; all other ids share the first `oov_rows` rows.

    Args:
        path: Parquet file with a column `id`, or text file with one id per line; relative to the config's folder.
        oov_rows: Rows to which ids outside the vocabulary are hashed; with 0, these ids are errors.
        spread_over: Number of rows among which the ids are spread, so that ranks that share a table get equally many
            lookups. Default: the table's rows, which a new run writes into its config; a run that starts from the
            weights of another takes the number of that one. With 0, the k-th id has row `oov_rows + k`; so it is
            where nothing is recorded: in runs and exports of earlier releases, and in a schema that is used without a
            run.
    """

    kind: Literal["vocabulary"] = "vocabulary"
    path: Place
    oov_rows: int = Field(default=1, ge=0)
    spread_over: int | None = Field(default=None, ge=0, le=MAX_SPREAD)


_DURATION = re.compile(r"([0-9]+) ?(w|d|h|min|s)")
_UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "min": 60, "s": 1}
LATEST_CLOCK = 2**32 - 1  # seconds, in the year 2106


def duration_s(text: str) -> int | None:
    """Seconds of a duration such as `30d`; None for other texts."""
    match = _DURATION.fullmatch(text)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def _age(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if (seconds := duration_s(value)) is None:
        raise ValueError("write a duration such as 30d, 12h, 15min or 45s, or without `time` a number of steps")
    return seconds


Age = Annotated[int, BeforeValidator(_age), Field(ge=1, le=LATEST_CLOCK)]


class Admit(Strict):
    """When an id gets a row of its own. Set one of the two; `{min_count: 1}` gives every id a row at once.

    Args:
        min_count: Lookups of an id before it gets a row. A filter counts them approximately and forgets old ones; it
            takes 3 bytes per row.
        probability: Probability with which each lookup gives the id a row; needs no memory.
    """

    min_count: int = Field(default=1, ge=1, le=255)
    probability: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.min_count > 1 and self.probability < 1:
            raise ValueError("`min_count` and `probability` are two ways to admit an id: set one of them")
        return self


class Dynamic(Strict):
    """Gives ids a row of the table when they appear, and takes it away from ids that are no longer looked up.

    An id without a row of its own uses one of the fallback rows, which it shares by hash. Features that share a table
    need equal rules; `evict` and `admit` may be set for one of them. Ids are integers or strings; a string is one by
    its 64-bit hash.

    Args:
        rows: Rows of the table, among them the fallback rows. Default: `rows` of the table, and equal to it if set.
        time: Column with the time of a row: an Arrow timestamp or date, or integers in seconds; for other units set
            `schema.timestamp` to this column. It is the clock of `ttl`, `half_life` and of the order in which ids were
            seen, and never goes back: train on rows in the order of time (`data.shuffle: none`, or
            `data.progressive`). Without it, the clock counts steps.
        ttl: Age after which an id that was not looked up loses its row, e.g. 30d, 12h or 15min; without `time` a number
            of steps. Default: never.
        evict: Which id of a full bucket loses its row to a new one: "lfu": the one with the fewest lookups; "lru": the
            one not looked up for the longest time; "lfu_decay": as "lfu", but counts halve every `half_life`;
            "lfu_aged": as "lfu", but the id that keeps its row against a new one loses as many counts as that has, so
            that popular ids which are no longer looked up make room. Default: "lfu_aged", which a new run writes into
            its config; a run of an earlier release keeps the "lfu" that it began with.
        half_life: Half-life of counts, in the form of `ttl`; for "lfu_decay" only.
        admit: When an id gets a row. Default: `{min_count: 2}`, at its second lookup, which a new run writes into its
            config; a run of an earlier release, or one that takes over its ids by `init_from`, keeps `{min_count: 1}`.
        fallback: Share of the rows that ids without a row of their own share. At least one row of every 64 is shared,
            also with 0, the default.
        unseen: Evaluation of an id without a row: "hashed" uses its fallback row, as in training; "zero" leaves the id
            out, so that a feature with one id has a vector of zeros.
        path: File with the rows of ids, which exports have. A training run has its own.
    """

    kind: Literal["dynamic"] = "dynamic"
    rows: int | None = Field(default=None, ge=4)
    time: str | None = Field(default=None, min_length=1)
    ttl: Age | None = None
    evict: Literal["lfu", "lru", "lfu_decay", "lfu_aged"] | None = None
    half_life: Age | None = None
    admit: Admit | None = None
    fallback: float = Field(default=0.0, ge=0, lt=1)
    unseen: Literal["hashed", "zero"] = "hashed"
    path: Place | None = None

    @model_validator(mode="before")
    @classmethod
    def _durations_need_a_time(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("time") is None:
            for name in ("ttl", "half_life"):
                if isinstance(data.get(name), str):
                    raise ValueError(
                        f"`{name}: {data[name]}` needs `time`, the column with the time of a row; without it, give a "
                        "number of steps"
                    )
        return data

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if (self.evict == "lfu_decay") != (self.half_life is not None):
            raise ValueError("`half_life` and `evict: lfu_decay` belong together: set both or neither")
        return self

    @property
    def resolved(self) -> Self:
        """The rule with the defaults of new runs."""
        return self.model_copy(update={"evict": self.evict or "lfu_aged", "admit": self.admit or Admit(min_count=2)})


IdMapping = Annotated[Identity | Hash | Vocabulary | Dynamic, Field(discriminator="kind")]


LabelKind = Literal["binary", "number"]


class LabelRule(Strict):
    """The kind of a label, and which values of its column count as 1.

    Args:
        kind: "binary": 0 or 1 (integers, floats, booleans, or derived by `positive` or `at_least`), trained by
            cross-entropy. "number": any finite number (a rating, minutes watched), trained by squared error; scale it
            to about 1.
        positive: Value of a text or integer column that is label 1; all others are 0.
        negative: With `positive`: the only value that is label 0; any third value is an error.
        at_least: Threshold in a column of numbers: label 1 from this number on, 0 below.
    """

    kind: LabelKind = "binary"
    positive: str | int | None = None
    negative: str | int | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.positive is not None and self.at_least is not None:
            raise ValueError("give `positive` (a value) or `at_least` (a number), not both")
        if self.kind == "number" and self.made_of_values:
            raise ValueError("`positive` and `at_least` need a binary label; remove them, or set `kind: binary`")
        if self.negative is not None and (
            type(self.negative) is not type(self.positive) or self.negative == self.positive
        ):
            raise ValueError("`negative` needs `positive`: another value of the same type")
        if self.at_least is not None and not math.isfinite(self.at_least):
            raise ValueError(f"at_least={self.at_least} must be a finite number")
        return self

    @property
    def made_of_values(self) -> bool:
        """True if the label is derived from the column's values."""
        return self.positive is not None or self.at_least is not None
