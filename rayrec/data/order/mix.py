"""Several data sets that are mixed by weight: how long an epoch is, and whose row comes next.

How many rows pass the filters is read here; the batches are `mixed_stream.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, lcm

from rayrec.data.mapping.column_types import fill_id_types
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.epoch import dealt
from rayrec.data.source.dataset import DataSet, WeightedDataSet
from rayrec.data.source.footers import FooterReading
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.row_counts import count_rows
from rayrec.data.source.windows import WINDOW_ROWS
from rayrec.storage.errors import DataError

_WINDOWS_FOR_RAY = 64


@dataclass(frozen=True)
class Mix:
    """Data sets and how many rows of each come for how many of the others. Picklable; made once, by the driver.

    An epoch is one pass over the data set that lasts longest at its weight; the others begin again.

    Args:
        parts: the data sets.
        weights: of each, whole numbers.
        passing: rows of each that pass its filters.
    """

    parts: tuple[Manifest, ...]
    weights: tuple[int, ...]
    passing: tuple[int, ...]

    @classmethod
    def of(
        cls,
        data: Sequence[WeightedDataSet],
        schema: Schema,
        reading: FooterReading | None = None,
        window_rows: int = WINDOW_ROWS,
    ) -> Mix:
        """That of a config. Where filters ask more than partitions, their columns are read here, to count.

        Args:
            reading: footers read earlier, and how others are read.

        Raises:
            DataError: as `Manifest.read`, a data set of whose rows none passes, or ids that differ in type.
        """
        first = Manifest.of(data[0], schema, reading, window_rows)
        alike = fill_id_types(schema, dict(first.columns))
        parts = (first, *(Manifest.of(one, alike, reading, window_rows) for one in data[1:]))
        how = reading or FooterReading()
        many = sum(len(part.windows) for part in parts if part.filters) > _WINDOWS_FOR_RAY
        with how.connect() if many else nullcontext():
            passing = tuple(count_rows(part, how.patience) for part in parts)
        for one, rows in zip(data, passing, strict=True):
            if not rows:
                raise DataError(f"no row of {one} passes the filters", fix="correct them, or take it out of the mix")
        return cls(parts, whole([one.weight for one in data]), passing)

    @property
    def longest(self) -> int:
        """The number of the data set that lasts longest at its weight."""
        lasting = [Fraction(rows, weight) for rows, weight in zip(self.passing, self.weights, strict=True)]
        return lasting.index(max(lasting))

    @property
    def num_files(self) -> int:
        return sum(part.num_files for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows of one epoch, before the filters of the longest data set."""
        return self.parts[self.longest].rows * sum(self.weights) // self.weights[self.longest]

    def passes(self, number: int, world_size: int, leaves_out: bool) -> int:
        """How often a data set comes in an epoch at most; 1 for the longest.

        Args:
            leaves_out: rows may be left out that `passing` counts.
        """
        if number == self.longest:
            return 1
        ratio = Fraction(self.weights[number], self.weights[self.longest])
        spare = world_size * (ratio + world_size + 2)  # ranks' parts differ by rows
        needed = ceil((self.passing[self.longest] * ratio + spare) / self.passing[number])
        uneven = leaves_out or any(part.leaves_out for part in self.parts)
        return 2 * needed + 1 if uneven else needed


def manifest_of(
    data: DataSet | Sequence[WeightedDataSet],
    schema: Schema,
    reading: FooterReading | None = None,
    window_rows: int = WINDOW_ROWS,
) -> Manifest | Mix:
    """What a config's `data.train` consists of; raises as `Manifest.of` and `Mix.of`."""
    if isinstance(data, DataSet):
        return Manifest.of(data, schema, reading, window_rows)
    return Mix.of(data, schema, reading, window_rows)


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the same proportions."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return tuple(int(weight * scale) for weight in exact)


def shares(weights: Sequence[int], rows: int) -> list[int]:
    """How many of the first `rows` rows of a mix come from each data set.

    Row by row the next comes from the data set that is furthest behind (smallest (2 given + 1) / weight, the method of
    Webster and Sainte-Laguë), so no share ever shrinks as `rows` grow.
    """
    total, n = sum(weights), len(weights)
    given = [max(0, ((2 * rows - n) * weight - total) // (2 * total)) for weight in weights]  # never too many
    for _ in range(rows - sum(given)):
        given[min(range(n), key=lambda i: Fraction(2 * given[i] + 1, weights[i]))] += 1
    return given


def batch_shares(
    weights: Sequence[int], given: int, batch_rows: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """Rows of each data set in a rank's batches, one after another, after `given` rows of all ranks.

    Each rank goes along the mix's order at its own place, so that the batches of all ranks together have their shares
    too.
    """
    mine = dealt(batch_rows, rank, world_size)
    at = sum(dealt(batch_rows, other, world_size) for other in range(rank)) + given * mine // batch_rows
    before = shares(weights, at)
    while True:
        at += mine
        after = shares(weights, at)
        yield [new - old for new, old in zip(after, before, strict=True)]
        before = after
