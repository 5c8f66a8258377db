"""Config of windows of rows or of time, which a run trains on one after the other."""

from __future__ import annotations

import re

from pydantic import Field

from rayrec._runtime.strict import Section


class WindowsConfig(Section):
    """Windows of `data.order: time`: either `rows` or `time`."""

    rows: int | None = Field(default=None, ge=1)
    """Rows of a window. The last window has the rest."""
    time: str | None = Field(default=None, pattern=r"^[1-9][0-9]* ?(s|min|h|d)$")
    """Length of a window, e.g. 1d, 6h, 30min or 90s, counted from 1970 in UTC. Lengths without rows are left out."""
    eval_every: int = Field(default=1, ge=1)
    """Windows between evaluations. The last evaluation of a run is always made."""
    eval_share: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the next window's rows that an evaluation reads."""

    @property
    def seconds(self) -> int:
        """Seconds of a window of `time`."""
        number, unit = re.fullmatch(r"([0-9]+) ?([a-z]+)", self.time or "").groups()  # type: ignore[union-attr]
        return int(number) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[unit]
