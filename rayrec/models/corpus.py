"""The corpus of a retriever: which rows of its item table are items."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST_SPREAD = 1 << 31  # products of two smaller numbers fit an int64


@dataclass(frozen=True, slots=True)
class Corpus:
    """Items k in [0, `count`). Item k has row `first + k * multiplier mod spread`, or `first + k` from `spread` on.

    The rows are computed, because an array of them may not fit the memory of a device.

    Args:
        count: Number of items.
        first: Rows before the first item.
        spread, multiplier: The order in which the mapping of ids spreads a vocabulary over the rows. Default: in order.

    Raises:
        ValueError: `spread` is above 2^31.
    """

    count: int
    first: int = 0
    spread: int = 1
    multiplier: int = 1

    def __post_init__(self) -> None:
        if self.spread > _MOST_SPREAD:
            raise ValueError(f"an item table has at most 2^31 rows over which ids are spread, not {self.spread}")

    def __len__(self) -> int:
        return self.count

    def rows(self, items: torch.Tensor) -> torch.Tensor:
        """The table rows of items."""
        return self.first + self._moved(items, self.multiplier)

    def all_rows(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The table row of each item, `[count]`."""
        return self.rows(torch.arange(self.count, device=device))

    def items(self, rows: torch.Tensor) -> torch.Tensor:
        """The items with these table rows; -1 for rows of no item."""
        items = self._moved(rows - self.first, pow(self.multiplier, -1, self.spread))
        return torch.where((items >= 0) & (items < self.count), items, -1)

    def _moved(self, places: torch.Tensor, factor: int) -> torch.Tensor:
        if self.spread == 1:  # in order, as in most corpora; each step asks twice
            return places
        inside = (places >= 0) & (places < self.spread)
        return torch.where(inside, places.clamp(0, self.spread - 1) * factor % self.spread, places)


class ListedCorpus:
    """The items with these rows; as `Corpus`, for tables whose ids come and go.

    Args:
        rows: `[I]`, distinct, in order.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, items: torch.Tensor) -> torch.Tensor:
        """The table rows of items."""
        return self._rows.to(items.device)[items]

    def all_rows(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The table row of each item, `[I]`."""
        return self._rows.to(device or self._rows.device)

    def items(self, rows: torch.Tensor) -> torch.Tensor:
        """The items with these table rows; -1 for rows of no item."""
        listed = self.all_rows(rows.device)
        if not len(listed):
            return torch.full_like(rows, -1)
        places = torch.searchsorted(listed, rows).clamp(max=len(listed) - 1)
        return torch.where(listed[places] == rows, places, -1)
