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
            std; `min_max`: 0 at the lowest number and 1 at the highest; `quantile`: the place among the quantiles of
            the training data.
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


class _Statistical(Strict):
    @property
    def fitted(self) -> bool:
        """Whether its statistics are there."""
        return None not in self.model_dump().values()


class Standardize(_Statistical):
    """`(x - mean) / std`.

    Args:
        mean, std: of `standardize`, mean and deviation; `rayrec data fit` computes those left out.
    """

    kind: Literal["standardize"] = "standardize"
    mean: float | None = None
    std: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Standardize:
        if (self.mean is None) != (self.std is None):
            raise ValueError("standardize: give mean and std, or neither, to have both fitted")
        return self


class MinMax(_Statistical):
    """`(x - lowest) / (highest - lowest)`, cut to [0, 1].

    Args:
        lowest, highest: of `min_max`, the ends; fitted where they are left out.
    """

    kind: Literal["min_max"] = "min_max"
    lowest: float | None = None
    highest: float | None = None

    @model_validator(mode="after")
    def _check(self) -> MinMax:
        if (self.lowest is None) != (self.highest is None):
            raise ValueError("min_max: give lowest and highest, or neither, to have both fitted")
        if self.lowest is not None and self.highest is not None and not self.lowest < self.highest:
            raise ValueError(f"min_max: lowest={self.lowest} must be below highest={self.highest}")
        return self


class Quantile(_Statistical):
    """The place among the training data's different quantiles, in [0, 1], by a line between two of them.

    Args:
        quantiles: of `quantile`, how many parts of equal frequency.
        boundaries: of `quantile`, the ends of the parts, ascending; fitted where they are left out.
    """

    kind: Literal["quantile"] = "quantile"
    quantiles: int = Field(default=100, ge=1)
    boundaries: list[float] | None = Field(default=None, min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Quantile:
        if any(a >= b for a, b in pairwise(self.boundaries or [])):
            raise ValueError("quantile: the boundaries must ascend")
        return self


Fitted = Standardize | MinMax | Quantile
Transform = Annotated[Log1p | Clip | Standardize | MinMax | Quantile, Field(discriminator="kind")]
