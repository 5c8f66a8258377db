"""Config of the mappings from ids to table rows and from values to labels. `sparse.py` and `targets.py` apply them."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


IdMapping = Annotated[Identity | Hash | Vocabulary, Field(discriminator="kind")]


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
