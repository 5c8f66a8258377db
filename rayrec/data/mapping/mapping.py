"""`Mapping`: raw values to batches, in a service or a notebook, as in training.

Imports neither Ray nor training code. The first batch imports torch and fbgemm.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.data.mapping.arrow_input import as_expected, inferred
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.map_rows import check_rows_of, map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows
from rayrec.data.mapping.schema import Schema
from rayrec.storage.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from rayrec.data.mapping.arrow_input import Tabular
    from rayrec.models.batch import Batch


@dataclass(frozen=True)
class Mapping:
    """Maps raw rows to batches for a model.

    Args:
        schema: the schema of the columns.
        rows_of: number of table rows for each sparse feature.
        labels: True if rows have labels and weights. If False, labels are NaN and their columns may be missing.
        max_pairs: pairs of ids that a cross of lists may have in all rows that are mapped at once; rows after that
            many are bad rows. Default: no limit.

    Raises:
        DataError: a feature without a table, a vocabulary that cannot be read or is too long for its table.
    """

    schema: Schema
    rows_of: Dict[str, int]
    labels: bool = field(default=True, kw_only=True)
    max_pairs: int | None = field(default=None, kw_only=True)
    # Types that passed the check: a service sees the same few again and again.
    _accepted: deque[pa.Schema] = field(default_factory=lambda: deque(maxlen=4), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rows_of(self.schema, self.rows_of)
        if without := [name for name, rule in self.schema.dynamic.items() if rule.path is None]:
            raise DataError(
                f"features {without} have dynamic ids: which id has which row is in the checkpoints of a run",
                fix="export the run (`rayrec export`), and use the mapping of the export",
            )

    @classmethod
    def from_config(cls, config: Any, *, labels: bool = True, folder: str | os.PathLike[str] | None = None) -> Mapping:
        """The mapping of a run.

        Args:
            config: a `TrainConfig`, its plain values, or the path of a YAML file. `schema` and `tables` are read. Use
                `config.yaml` of the run folder: it names what the run chose, e.g. the `text_law` of hashed ids.
            labels: False for rows to be scored.
            folder: base of relative vocabulary paths; default: the folder of the file, or the working folder.

        Raises:
            OSError: the file cannot be read.
            ValueError: the schema is malformed.
            DataError: as the class.
        """
        if isinstance(config, str | os.PathLike):
            import yaml

            folder = folder or Path(config).parent
            config = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        if isinstance(config, Dict):
            schema = Schema(**config["schema"])
            tables = [(table["rows"], table["features"]) for table in config["tables"]]
        else:
            schema = config.data_schema
            tables = [(table.rows, table.features) for table in config.tables]
        schema = schema.for_training.with_paths_from(Path(folder or "."))
        return cls(schema, rows_of_tables(tables), labels=labels)

    def to_batch(self, data: Tabular) -> Batch:
        """Maps all rows to one batch, in order.

        Args:
            data: an Arrow table or record batch, a pandas DataFrame, a dict of columns, or a list of rows (dicts).

        Raises:
            DataError: a missing column, a wrong type, or the first bad row.
        """
        rows, problems = self._rows(self.to_table(data))
        if problems:
            raise problems.error(int(problems.rows()[0]))
        return self._batch(rows)

    def to_batch_and_errors(self, data: Tabular) -> tuple[Batch, dict[int, DataError]]:
        """As `to_batch`, with the errors of bad rows by row. The batch holds meaningless but valid values for them.

        Raises:
            DataError: a missing column or a wrong type.
        """
        return self.map_table(self.to_table(data))

    @cached_property
    def columns(self) -> list[str]:
        """The columns that are read, without duplicates."""
        return self.schema.columns if self.labels else self.schema.feature_columns

    @cached_property
    def _histories(self) -> list[str]:
        """Columns that rows may have: lists of events, in place of those of a store."""
        return self.schema.histories

    def to_table(self, data: Tabular) -> pa.Table:
        """The columns that are mapped, as typed Arrow columns.

        Raises:
            DataError: a missing column or a wrong type.
        """
        table = inferred(data, self.schema, [*self.columns, *self._histories])
        if self._accepts(table.schema):
            return table
        table = as_expected(table, self.schema)
        if not self._accepts(table.schema):
            check_types(self.schema, table.schema, "the given rows", labelled=self.labels, columns=self.columns)
            self._accepted.append(table.schema)
        return table

    def _accepts(self, types: pa.Schema) -> bool:
        """Whether these types need no conversion and have passed the check."""
        return any(types.equals(accepted) for accepted in tuple(self._accepted))  # threads may append

    def map_table(self, table: pa.Table) -> tuple[Batch, dict[int, DataError]]:
        """As `to_batch_and_errors`, of a table that `to_table` returned."""
        rows, problems = self._rows(table)
        return self._batch(rows), {row: problems.error(row) for row in problems.rows().tolist()}

    def _rows(self, table: pa.Table) -> tuple[Rows, Problems]:
        problems = Problems()
        rows = map_rows(
            table,
            self.schema,
            self.rows_of,
            problems,
            labelled=self.labels,
            max_pairs=self.max_pairs,
            columns=[*self.columns, *(name for name in self._histories if name in table.column_names)],
        )
        return rows, problems

    def _batch(self, rows: Rows) -> Batch:
        from rayrec.data.mapping.collate import collate

        return collate([(rows, 0, len(rows))], self.schema if self.labels else self.schema.for_scoring)


def to_batch(data: Tabular, schema: Schema, rows_of: Dict[str, int]) -> Batch:
    """Maps all rows, with labels, to one batch; see `Mapping.to_batch`."""
    return Mapping(schema, rows_of).to_batch(data)


def rows_of_tables(tables: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """The number of rows that each feature's ids map to: the rows of the smallest table that reads the feature.

    Args:
        tables: rows and features of each table.
    """
    rows_of: dict[str, int] = {}
    for rows, features in tables:
        for name in features:
            rows_of[name] = min(rows, rows_of.get(name, rows))
    return rows_of
