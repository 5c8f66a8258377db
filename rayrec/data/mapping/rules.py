"""How ids become table rows and values labels, as the config says it; `sparse.py` and `targets.py` do it."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rayrec.data.strict import Strict
from rayrec.storage.locations import Place


class Identity(Strict):
    """The id is the table row.

    Args:
        bounds: what happens to an id outside `[0, rows)`: "error" reports it, "clip" takes the nearest row, "drop"
            leaves it out of its bag.
    """

    kind: Literal["identity"] = "identity"
    bounds: Literal["error", "clip", "drop"] = "error"


class Hash(Strict):
    """Integers and strings are hashed onto the table's rows; unequal ids may share one.

    Args:
        seed: another seed gives another hash.
    """

    kind: Literal["hash"] = "hash"
    seed: int = 0


class Vocabulary(Strict):
    """Every id of a vocabulary has a row of its own; all others share the first rows of the table.

    Args:
        path: Parquet file with a column `id`, or text with one id a line; a relative path starts from the config's
            folder. Its k-th id has row `oov_rows + k`.
        oov_rows: rows that ids outside the vocabulary are hashed onto; with 0 such an id is reported.
    """

    kind: Literal["vocabulary"] = "vocabulary"
    path: Place
    oov_rows: int = Field(default=1, ge=0)


IdMapping = Annotated[Identity | Hash | Vocabulary, Field(discriminator="kind")]


LabelKind = Literal["binary", "number"]


class LabelRule(Strict):
    """What a label is, and which values of its column count as 1.

    Args:
        kind: "binary": 0 or 1 (integers, floats or booleans, or what `positive` or `at_least` make of the column),
            trained by cross-entropy; "number": any finite number (a rating, minutes watched), trained by squared error;
            bring it to a scale of about 1.
        positive: of a column of texts or integers: this value is label 1, all others are 0.
        negative: beside `positive`: the one value that is label 0; a row with a third value is bad.
        at_least: of a column of numbers: label 1 from this number on, 0 below it.
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
            raise ValueError("`positive` and `at_least` make a binary label; take them out, or say `kind: binary`")
        if self.negative is not None and (
            type(self.negative) is not type(self.positive) or self.negative == self.positive
        ):
            raise ValueError("`negative` stands beside `positive`: another value of the same type")
        if self.at_least is not None and not math.isfinite(self.at_least):
            raise ValueError(f"at_least={self.at_least} must be a finite number")
        return self

    @property
    def made_of_values(self) -> bool:
        """Whether the column itself holds something else than the label."""
        return self.positive is not None or self.at_least is not None
