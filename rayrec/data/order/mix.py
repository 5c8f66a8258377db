"""`Mix`: several data sets with sampling weights. `stream/mixed_stream.py` reads them."""

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
    """Data sets with sampling weights. Picklable; the driver creates it once.

    An epoch is one pass over the data set that lasts longest at its weight; the others repeat.

    Args:
        parts: the data sets.
        weights: integer weights.
        passing: rows of each data set that pass its filters.
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
        """The mix of a config. Reads the columns of filters to count the rows that pass, unless partitions suffice.

        Args:
            reading: index of earlier footers, and options for reading.

        Raises:
            DataError: as `Manifest.read`; a data set without passing rows; ids of different types.
        """
        first_manifest = Manifest.of(data[0], schema, reading, window_rows)
        typed_schema = fill_id_types(schema, dict(first_manifest.columns))
        parts = (first_manifest, *(Manifest.of(data_set, typed_schema, reading, window_rows) for data_set in data[1:]))
        reading_options = reading or FooterReading()
        use_ray = sum(len(manifest.windows) for manifest in parts if manifest.filters) > _WINDOWS_FOR_RAY
        with reading_options.connect() if use_ray else nullcontext():
            passing = tuple(count_rows(manifest, reading_options.patience) for manifest in parts)
        for data_set, rows in zip(data, passing, strict=True):
            if not rows:
                fix = "correct the filters, or remove it from the mix"
                raise DataError(f"no row of {data_set} passes the filters", fix=fix)
        return cls(parts, whole([data_set.weight for data_set in data]), passing)

    @property
    def longest(self) -> int:
        """The index of the data set that lasts longest at its weight."""
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
        """Maximum passes over a data set in an epoch; 1 for the longest.

        Args:
            leaves_out: True if rows counted in `passing` may be skipped.
        """
        if number == self.longest:
            return 1
        ratio = Fraction(self.weights[number], self.weights[self.longest])
        margin = world_size * (ratio + world_size + 2)  # shares of ranks differ by a few rows
        needed = ceil((self.passing[self.longest] * ratio + margin) / self.passing[number])
        uneven = leaves_out or any(manifest.leaves_out for manifest in self.parts)
        return 2 * needed + 1 if uneven else needed


def manifest_of(
    data: DataSet | Sequence[WeightedDataSet],
    schema: Schema,
    reading: FooterReading | None = None,
    window_rows: int = WINDOW_ROWS,
) -> Manifest | Mix:
    """The manifest, or the mix, of `data.train`. Raises as `Manifest.of` and `Mix.of`."""
    if isinstance(data, DataSet):
        return Manifest.of(data, schema, reading, window_rows)
    return Mix.of(data, schema, reading, window_rows)


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Integers in the same proportions."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return tuple(int(weight * scale) for weight in exact)


def shares(weights: Sequence[int], rows: int) -> list[int]:
    """How many of the first `rows` rows of a mix belong to each data set.

    The next row is of the data set that is furthest behind, with the smallest (2 count + 1) / weight (Webster,
    Sainte-Laguë), so counts are monotonic in `rows`.
    """
    total, n = sum(weights), len(weights)
    counts = [max(0, ((2 * rows - n) * weight - total) // (2 * total)) for weight in weights]  # a lower bound
    for _ in range(rows - sum(counts)):
        counts[min(range(n), key=lambda i: Fraction(2 * counts[i] + 1, weights[i]))] += 1
    return counts


def batch_shares(
    weights: Sequence[int], rows_given: int, batch_rows: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """Yields the rows of each data set in a rank's batches, after `given` rows of all ranks.

    Ranks take consecutive ranges of the mix's sequence, so each global batch has the right proportions.
    """
    own_rows = dealt(batch_rows, rank, world_size)
    position = (
        sum(dealt(batch_rows, lower_rank, world_size) for lower_rank in range(rank))
        + rows_given * own_rows // batch_rows
    )
    previous = shares(weights, position)
    while True:
        position += own_rows
        current = shares(weights, position)
        yield [new - old for new, old in zip(current, previous, strict=True)]
        previous = current
