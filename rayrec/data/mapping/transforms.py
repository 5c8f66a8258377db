"""Config of the transforms of dense features. `dense.py` applies them."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec._runtime.strict import Strict


class Log1p(Strict):
    """log(1 + x) for x above -1.

    Args:
        kind: `log1p`: log(1 + x) for x above -1; `clip`: limits to a range; `standardize`: (x - mean) / std;
            `min_max`: scales a range to [0, 1]; `quantile`: rank among the quantiles of the training data, in [0, 1].
    """

    kind: Literal["log1p"] = "log1p"


class Clip(Strict):
    """Limits numbers to a range.

    Args:
        lowest, highest: For `clip`: bounds of the range; either may be omitted.
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
        """True if all of its statistics are set."""
        return None not in self.model_dump().values()


class Standardize(_Statistical):
    """`(x - mean) / std`.

    Args:
        mean, std: For `standardize`: mean and standard deviation; `rayrec data fit` computes them if omitted.
    """

    kind: Literal["standardize"] = "standardize"
    mean: float | None = None
    std: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Standardize:
        if (self.mean is None) != (self.std is None):
            raise ValueError("standardize: give both mean and std, or neither to have them fitted")
        return self


class MinMax(_Statistical):
    """`(x - lowest) / (highest - lowest)`, clipped to [0, 1].

    Args:
        lowest, highest: For `min_max`: bounds of the range; fitted if omitted.
    """

    kind: Literal["min_max"] = "min_max"
    lowest: float | None = None
    highest: float | None = None

    @model_validator(mode="after")
    def _check(self) -> MinMax:
        if (self.lowest is None) != (self.highest is None):
            raise ValueError("min_max: give both lowest and highest, or neither to have them fitted")
        if self.lowest is not None and self.highest is not None and not self.lowest < self.highest:
            raise ValueError(f"min_max: lowest={self.lowest} must be below highest={self.highest}")
        return self


class Quantile(_Statistical):
    """Rank among the quantiles of the training data, in [0, 1], interpolated linearly between them.

    Args:
        quantiles: For `quantile`: number of intervals of equal frequency.
        boundaries: For `quantile`: ascending bounds of the intervals; fitted if omitted.
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
