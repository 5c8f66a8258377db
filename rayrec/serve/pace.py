"""How long scoring takes, and how many rows are worth scoring together."""

from __future__ import annotations

ENOUGH = 0.1  # fixed costs below this share of a batch's time are not worth a larger batch
DEADLINE_S = 0.02  # the rows of several requests together are planned to take no longer, nor is an event loop kept


class Pace:
    """Seconds of a batch: a fixed part, measured on every batch, and a row's, measured when a version is loaded.

    Args:
        fixed_s: the first guess.
        row_s: of the model.
        longest_s: that a batch of several requests may take.
    """

    def __init__(self, fixed_s: float, row_s: float, longest_s: float = DEADLINE_S) -> None:
        self._longest_s = longest_s
        self._fixed_s, self._row_s = max(fixed_s, 0.0), max(row_s, 1e-9)

    def observe(self, rows: int, seconds: float) -> None:
        """A batch has been scored."""
        self._fixed_s += 0.05 * (max(seconds - rows * self._row_s, 0.0) - self._fixed_s)

    def seconds(self, rows: int) -> float:
        """Of a batch, as far as is known."""
        return self._fixed_s + rows * self._row_s

    def most_rows(self) -> int:
        """Of a batch of several requests: beyond, it gains nothing, or takes too long."""
        worth = self._fixed_s * (1 - ENOUGH) / (ENOUGH * self._row_s)
        return max(1, round(min(worth, self._longest_s / self._row_s)))
