"""A number of steps or a duration, as `trainer.checkpoint_every` and similar fields take it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

UNITS = {"h": 3600, "min": 60, "s": 1}  # largest first
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(UNITS)})")


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something repeats: every `steps` steps or every `seconds` seconds; the other one is None."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: Any) -> Interval:
        """The interval for `500` (steps) or `"15min"` (a duration in `s`, `min` or `h`).

        Raises:
            PydanticCustomError: anything else, or not positive.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(steps=value)
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is not None:
            seconds = float(f"{float(match[1]) * UNITS[match[2]]:.15g}")  # 1.1h are 3960 s, not 3960.0000000000005
            if 0 < seconds < math.inf:
                return cls(seconds=seconds)
        text = "Input should be a number of steps, e.g. 500, or a duration, e.g. 10s, 15min or 1.5h"
        raise PydanticCustomError("interval", text)

    @property
    def plain(self) -> int | str:
        """The value in YAML; equal intervals have equal values."""
        if self.seconds is None:
            assert self.steps is not None
            return self.steps
        for unit, scale in UNITS.items():
            if self.seconds % scale == 0:
                return f"{int(self.seconds) // scale}{unit}"
        return f"{Decimal(repr(self.seconds)):f}s"

    def __str__(self) -> str:
        return str(self.plain)


IntervalField = Annotated[Interval, PlainValidator(Interval.parse), PlainSerializer(lambda interval: interval.plain)]
