"""The mapping as a function: raw values to batches, in a service or a notebook, byte for byte as in training.

Neither Ray nor anything of training is loaded; torch and fbgemm are when the first batch is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.data.mapping.arrow_input import to_table
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.map_rows import check_rows_of, map_rows
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Rows
from rayrec.data.mapping.schema import Schema
from rayrec.storage.errors import DataError

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular
    from rayrec.models.batch import Batch


@dataclass(frozen=True)
class Mapping:
    """Turns raw rows into the batches that a model was trained on.

    Args:
        schema: what the columns mean.
        rows_of: rows of the table that each sparse feature is looked up in.
        labels: whether rows come with their labels (and weights); without, labels are NaN and those columns need not be
            there.

    Raises:
        DataError: a feature without a table, a vocabulary that cannot be read or is too long for its table.
    """

    schema: Schema
    rows_of: Dict[str, int]
    labels: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_rows_of(self.schema, self.rows_of)

    @classmethod
    def from_config(cls, config: Any, *, labels: bool = True, folder: str | os.PathLike[str] | None = None) -> Mapping:
        """That of a run.

        Args:
            config: a `TrainConfig`, the plain values of one, or the path of a file of them (as `config.yaml` of a run
                folder), of which `schema` and `tables` are read.
            labels: False for rows that are to be scored.
            folder: that relative paths of vocabularies start from; default that of the file, or the working folder.

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
        """One batch of all rows, in their order.

        Args:
            data: an Arrow table or record batch, a pandas frame, a dict of columns, or a list of rows (dicts).

        Raises:
            DataError: a missing column, a wrong type, or the first row with a value that cannot be mapped.
        """
        rows, problems = self._rows(data)
        if problems:
            raise problems.error(int(problems.rows()[0]))
        return self._batch(rows)

    def to_batch_and_errors(self, data: Tabular) -> tuple[Batch, dict[int, DataError]]:
        """As `to_batch`, with what is wrong with each row that cannot be used: those hold meaningless, valid values.

        Raises:
            DataError: a missing column or a wrong type, which concerns all rows.
        """
        rows, problems = self._rows(data)
        return self._batch(rows), {row: problems.error(row) for row in problems.rows().tolist()}

    def _rows(self, data: Tabular) -> tuple[Rows, Problems]:
        table = to_table(data, self.schema, self.schema.columns if self.labels else self.schema.feature_columns)
        check_types(self.schema, table.schema, "the given rows", labelled=self.labels)
        problems = Problems()
        return map_rows(table, self.schema, self.rows_of, problems, labelled=self.labels), problems

    def _batch(self, rows: Rows) -> Batch:
        from rayrec.data.mapping.collate import collate

        return collate([(rows, 0, len(rows))], self.schema if self.labels else self.schema.for_scoring)


def to_batch(data: Tabular, schema: Schema, rows_of: Dict[str, int]) -> Batch:
    """One batch of all rows, labels among them, as `Mapping.to_batch` makes it."""
    return Mapping(schema, rows_of).to_batch(data)


def rows_of_tables(tables: Iterable[tuple[int, Iterable[str]]]) -> dict[str, int]:
    """Feature → rows that its ids map to: those of the smallest table that reads it.

    Args:
        tables: rows and features of each.
    """
    found: dict[str, int] = {}
    for rows, features in tables:
        for name in features:
            found[name] = min(rows, found.get(name, rows))
    return found
