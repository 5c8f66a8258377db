"""Ranks in texts."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges: `0–3, 6`."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    return ", ".join(str(start) if start == end else f"{start}–{end}" for start, end in ranges)
