"""Days, or other values of a column that folders give, one after another: train on one, evaluate on the next."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.data.errors import DataError
from rayrec.data.source.dataset import DataSet
from rayrec.data.source.filters import parse_all
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.partitioned import find_partitioned

Value = int | str
Only = tuple[str, Value]


@dataclass(frozen=True, slots=True)
class Periods:
    """The values of a column, ascending: epoch `k` trains on the `k`-th and is evaluated on the next.

    Args:
        rows: of each period, before filters.
    """

    column: str
    values: tuple[Value, ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, manifest: Manifest, column: str) -> Periods:
        """Those of a data set.

        Raises:
            DataError: files that lie in no folder `column=…`.
        """
        values = _ascending(column, [(dict(partition), folder) for folder, partition in manifest.files.folders])
        return cls(column, values, tuple(manifest.only((column, value)).rows for value in values))

    def train(self, epoch: int) -> Only:
        """What an epoch trains on."""
        return self.column, self.values[epoch]

    def eval(self, epoch: int) -> Only:
        """What it is evaluated on."""
        return self.column, self.values[epoch + 1]


def count_periods(data: DataSet, column: str) -> int:
    """How many there are, by the names of folders.

    Raises:
        DataError: as `Periods.of`, or a single one.
    """
    found = find_partitioned(data.listed(), {column, *(condition[0] for condition in data.filters)})
    kept = found.that_pass(parse_all(data.filters)).files
    values = _ascending(column, [(one.values, one.file.uri) for one in kept])
    if len(values) < 2:
        raise DataError(
            f"data.progressive: there is one folder {column}=… or none, and the last one is only evaluated on",
            file=str(data),
            fix="wait for the next one, or train without data.progressive",
        )
    return len(values)


def _ascending(column: str, found: list[tuple[dict[str, int | str | None], str]]) -> tuple[Value, ...]:
    values: set[Value] = set()
    for partition, file in found:
        value = partition.get(column)
        if value is None:
            raise DataError(
                f"data.progressive: it lies in no folder {column}=…", file=file, fix="move it there, or filter it out"
            )
        values.add(value)
    return tuple(sorted(values))
