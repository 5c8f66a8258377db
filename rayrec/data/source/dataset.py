"""What a config says of a data set: where its files are, and which of their rows are meant; and of several."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from rayrec.data.source.filters import Condition
from rayrec.data.source.lake import TableFiles, TableFormat, open_table
from rayrec.data.strict import Strict
from rayrec.storage.locations import without_credentials, without_secrets


class DataSet(Strict):
    """Files and which of their rows are read; a path, or a list of paths, stands for all rows of those.

    Args:
        path: Parquet file, folder or glob, or a list of them; CSV, JSON lines, Avro and ORC are converted once.
            Paths relative to the folder the command runs in, or URIs of `s3://`, `gs://`, `hdfs://`. Folders named
            `key=value` are columns of the files below them.
        table: "delta" or "iceberg" where the path is a table: folder or URI of a Delta table, `….metadata.json` of an
            Iceberg table or `iceberg://CATALOG/NAMESPACE.TABLE`. Needs `rayrec[delta]` or `rayrec[iceberg]`.
        version: of such a table, which one is read: a Delta version, or an Iceberg snapshot's id; default the one that
            is newest when the run begins. The run keeps to it.
        filters: conditions `[column, operator, value]` that a row must meet, all of them, to be read, as
            `[[day, '>=', '2024-01-01'], [country, in, [de, fr]]]`; operators `= != < <= > >= in`, `not in`.
            A null meets none. Files and row groups without such rows are not opened.
        index: file that `rayrec data index` wrote, so that a run reads only the footers of new and changed files;
            default: the one in the folder, if there is one.
    """

    path: str | list[str]
    table: TableFormat | None = None
    version: int | None = Field(default=None, ge=0)
    filters: list[list[Any]] = Field(default=[])
    index: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _paths_alone(cls, given: Any) -> Any:
        if isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given)):
            return {"path": given}
        if isinstance(given, list | int | float):
            raise ValueError(
                f"{without_secrets(repr(given))} is not a path, a list of paths, or a section with path and filters"
            )
        return given

    @field_validator("filters", mode="before")
    @classmethod
    def _conditions(cls, given: Any) -> Any:
        return [Condition.parse(one).to_list() for one in given] if isinstance(given, list | tuple) else given

    @field_validator("path", "index")
    @classmethod
    def _no_secret(cls, given: str | list[str] | None) -> str | list[str] | None:
        for path in [given] if isinstance(given, str) else given or []:
            without_credentials(path)
        return given

    @model_validator(mode="after")
    def _parquet_or_table(self) -> Self:
        if self.table is not None:
            if not isinstance(self.path, str):
                raise ValueError(f"a {self.table} table is one path; name several as data sets of a mix")
            return self
        if self.version is not None:
            raise ValueError(f"version={self.version} is of a table; also set table: delta or table: iceberg")
        return self

    def pinned(self) -> Self:
        """With the version that the table has now, where it is a table and names none; raises as `lake.open_table`."""
        if self.table is None or self.version is not None:
            return self
        assert isinstance(self.path, str)
        return self.model_copy(update={"version": open_table(self.table, self.path).newest()})

    def listed(self) -> str | list[str] | TableFiles:
        """What is to be read: paths, or the files of a table; raises as `lake.LakeTable.files`."""
        if self.table is None:
            return self.path
        assert isinstance(self.path, str)
        table = open_table(self.table, self.path)
        return table.files(table.newest() if self.version is None else self.version)

    def __str__(self) -> str:
        paths = self.path if isinstance(self.path, str) else ", ".join(self.path)
        if self.version is not None:
            paths += f" at version {self.version}"
        where = " and ".join(str(Condition.parse(one)) for one in self.filters)
        return f"{paths} where {where}" if where else paths


class WeightedDataSet(DataSet):
    """One of several data sets that are mixed.

    Args:
        weight: of several data sets: rows of this one come in proportion to it. The one that lasts longest comes once
            an epoch, the others begin again.
    """

    weight: float = Field(default=1.0, gt=0)


def _form(given: Any) -> str:
    several = isinstance(given, list) and any(isinstance(one, dict | WeightedDataSet) for one in given)
    return "mix" if several else "one"


Mixed = Annotated[list[WeightedDataSet], Field(min_length=1)]
TrainingData = Annotated[Annotated[DataSet, Tag("one")] | Annotated[Mixed, Tag("mix")], Discriminator(_form)]


def data_sets(data: DataSet | list[WeightedDataSet]) -> list[DataSet]:
    """All that `data.train` names."""
    return [data] if isinstance(data, DataSet) else [*data]
