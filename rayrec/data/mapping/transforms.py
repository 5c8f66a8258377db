"""What is done to numbers on their way to `Batch.dense`, as the config says it; `dense.py` does it."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec.data.strict import Strict


class Log1p(Strict):
    """log(1 + x); x must be above -1.

    Args:
        kind: `log1p`: log(1 + x), x above -1; `clip`: the nearest number between two ends; `standardize`: (x - mean) /
            std; `bucketize`: how many of some boundaries the number reaches.
    """

    kind: Literal["log1p"] = "log1p"


class Clip(Strict):
    """The nearest number between two ends.

    Args:
        lowest, highest: of `clip`, the ends; one that is left out is open.
    """

    kind: Literal["clip"] = "clip"
    lowest: float | None = None
    highest: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Clip:
        if self.lowest is None and self.highest is None:
            raise ValueError("clip needs lowest, highest, or both")
        if self.lowest is not None and self.highest is not None and self.lowest > self.highest:
            raise ValueError(f"clip: lowest={self.lowest} is above highest={self.highest}")
        return self


class Standardize(Strict):
    """`(x - mean) / std`.

    Args:
        mean, std: of `standardize`, the mean and the deviation.
    """

    kind: Literal["standardize"] = "standardize"
    mean: float
    std: float = Field(gt=0)


class Bucketize(Strict):
    """How many boundaries the number reaches.

    Args:
        boundaries: of `bucketize`, ascending numbers.
    """

    kind: Literal["bucketize"] = "bucketize"
    boundaries: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Bucketize:
        if any(a >= b for a, b in pairwise(self.boundaries)):
            raise ValueError("bucketize: the boundaries must ascend")
        return self


Transform = Annotated[Log1p | Clip | Standardize | Bucketize, Field(discriminator="kind")]
# What was a field of its own once, and how it is written now.
ONCE_FIELDS = {
    "log1p": "{kind: log1p}",
    "clip": "{kind: clip, lowest: 0.0}",
    "standardize": "{kind: standardize, mean: 0.0, std: 1.0}",
    "bucketize": "{kind: bucketize, boundaries: [1.0]}",
}
