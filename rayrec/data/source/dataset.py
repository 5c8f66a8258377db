"""Config of data sets: files, filters, and the weights of a mix."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rayrec._runtime.strict import Strict
from rayrec.data.source.filters import Condition
from rayrec.data.source.lake import TableFiles, TableFormat, open_table
from rayrec.storage.secrets import without_credentials, without_secrets


class DataSet(Strict):
    """Files and filters. A path, or a list of paths, is short for all of their rows.

    Args:
        path: Parquet file, folder or glob, or a list of them. CSV, JSON lines, Avro and ORC are converted once. Paths
            are relative to the working folder, or URIs of `s3://`, `gs://`, `hdfs://`. Folders named `key=value` are
            columns of the files below them.
        table: "delta" or "iceberg" if the path is a table: folder or URI of a Delta table; `….metadata.json` of an
            Iceberg table, or `iceberg://CATALOG/NAMESPACE.TABLE`. Needs `rayrec[delta]` or `rayrec[iceberg]`.
        version: Delta version or Iceberg snapshot id. Default: the newest at the start of the run, which then keeps it.
        filters: Conditions `[column, operator, value]`; rows that satisfy all of them are read. Example:
            `[[day, '>=', '2024-01-01'], [country, in, [de, fr]]]`. Operators: `= != < <= > >= in`, `not in`. A null
            satisfies no condition. Files and row groups that cannot contain matching rows are not opened. The column
            `row_share`, which every file has, divides rows at random: `[row_share, '<', 0.9]` are nine tenths of them,
            the same in every epoch, `[row_share, '>=', 0.9]` the others.
        index: File written by `rayrec data index`, so that a run reads only the footers of new and changed files.
            Default: the index in the folder, if it exists.
    """

    path: str | list[str]
    table: TableFormat | None = None
    version: int | None = Field(default=None, ge=0)
    filters: list[list[Any]] = Field(default=[])
    index: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _paths_alone(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(path, str) for path in value)):
            return {"path": value}
        if isinstance(value, list | int | float):
            raise ValueError(
                f"{without_secrets(repr(value))} is not a path, a list of paths, or a section with path and filters"
            )
        return value

    @field_validator("filters", mode="before")
    @classmethod
    def _conditions(cls, conditions: Any) -> Any:
        return (
            [Condition.parse(condition).to_list() for condition in conditions]
            if isinstance(conditions, list | tuple)
            else conditions
        )

    @field_validator("path", "index")
    @classmethod
    def _no_secret(cls, value: str | list[str] | None) -> str | list[str] | None:
        for path in [value] if isinstance(value, str) else value or []:
            without_credentials(path)
        return value

    @model_validator(mode="after")
    def _parquet_or_table(self) -> Self:
        if self.table is not None:
            if not isinstance(self.path, str):
                raise ValueError(f"a {self.table} table is one path; for several tables, list several data sets")
            return self
        if self.version is not None:
            raise ValueError(f"version={self.version} needs table: delta or table: iceberg")
        return self

    def pinned(self) -> Self:
        """A copy with the table's current version, if it is a table without a version. Raises as `lake.open_table`."""
        if self.table is None or self.version is not None:
            return self
        assert isinstance(self.path, str)
        return self.model_copy(update={"version": open_table(self.table, self.path).pin()})

    def listed(self) -> str | list[str] | TableFiles:
        """The paths, or the files of the table's version. Raises as `lake.open_table`."""
        if self.table is None:
            return self.path
        assert isinstance(self.path, str)
        return open_table(self.table, self.path).files(self.version)

    def __str__(self) -> str:
        paths = self.path if isinstance(self.path, str) else ", ".join(self.path)
        if self.version is not None:
            paths += f" at version {self.version}"
        conditions = " and ".join(str(Condition.parse(condition)) for condition in self.filters)
        return f"{paths} where {conditions}" if conditions else paths


class WeightedDataSet(DataSet):
    """A data set of a mix.

    Args:
        weight: Sampling weight in a mix. The longest set defines the epoch; others repeat.
    """

    weight: float = Field(default=1.0, gt=0)


def _form(value: Any) -> str:
    several = isinstance(value, list) and any(isinstance(item, dict | WeightedDataSet) for item in value)
    return "mix" if several else "one"


Mixed = Annotated[list[WeightedDataSet], Field(min_length=1)]
TrainingData = Annotated[Annotated[DataSet, Tag("one")] | Annotated[Mixed, Tag("mix")], Discriminator(_form)]


def data_sets(data: DataSet | list[WeightedDataSet]) -> list[DataSet]:
    """The data sets of `data.train`."""
    return [data] if isinstance(data, DataSet) else [*data]
