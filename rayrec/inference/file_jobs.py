"""Jobs over Parquet files, such as `predict` and `retrieve`: a file of output per part of the input, resumably.

The rows are divided into parts by the files' footers. The output file of a part is written atomically and has the
part's number in its name, so that an interrupted job skips the parts that exist. A record in the output folder says
what the parts are made of; a job that differs is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rayrec.data import DataError, Manifest
from rayrec.data.source.slices import Columns, FileSlice, read_slices, slices_of
from rayrec.inference.part_files import PartFiles
from rayrec.storage.parallel import in_tasks
from rayrec.storage.parquet import open_parquet
from rayrec.storage.retries import Patience
from rayrec.storage.struct_fields import leaf_columns

DONE = "_done.json"
ROWS_PER_FILE = 1 << 18
Slices = tuple[FileSlice, ...]
Part = tuple[int, Slices]
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    """A job.

    Args:
        output: The output folder.
        manifest: The input; each of its windows is a part.
        record_file: Name of the file with the record.
        made_of: What the output is made of, other than the input.
        here: Processes a part in this process: reads it, writes its file, and returns counts.
        in_worker: The same in a Ray worker; must be picklable.
    """

    output: PartFiles
    manifest: Manifest
    record_file: str
    made_of: Mapping[str, Any]
    here: Callable[[Part], dict[str, Any]]
    in_worker: Callable[[Part], dict[str, Any]]

    def run(self, workers: int, say: Say) -> Iterator[dict[str, Any]]:
        """Processes the parts that do not exist; yields the counts of each.

        Args:
            workers: Concurrent Ray tasks, with a CPU each; 0: this process.
            say: Gets a message about parts that exist.

        Raises:
            ValueError: The folder has the output of another job, or cannot be written.
        """
        count = len(self.manifest.windows)
        with self.output.locked():
            self._check_record({**self.made_of, "data": self.manifest.fingerprint, "parts": count})
            existing = self.output.parts()
            parts = [(number, slices_of(self.manifest, number)) for number in range(count) if number not in existing]
            if len(parts) < count:
                say(f"{count - len(parts)} of {count} parts exist already")
            if workers == 0 or not parts:
                yield from map(self.here, parts)
            else:
                yield from in_tasks(self.in_worker, parts, cpus=1.0, at_once=workers)
            self.output.write(DONE, {"rows": self.manifest.rows, "parts": count, **self.made_of})

    def _check_record(self, record: dict[str, Any]) -> None:
        previous = self.output.read(self.record_file)
        if previous is None:
            if self.output.parts():
                raise ValueError(f"{self.output.path} has parts without {self.record_file}; choose another folder")
            self.output.write(self.record_file, record)
            return
        differing = [key for key, value in record.items() if previous.get(key) != value]
        if differing:
            text = f"{self.output.path} has the output of another job (different {', '.join(differing)})"
            raise ValueError(f"{text}; choose another folder")


def kept_columns(manifest: Manifest, names: Sequence[str] | None, added: Sequence[str]) -> Columns:
    """The columns to copy with their types, partitions included, by the first file's footer.

    Args:
        names: Default: all.
        added: Columns that the output has in addition.

    Raises:
        DataError: A column does not exist, or is one of `added`.
    """
    file = manifest.files[0]
    with open_parquet(file.uri, file.version) as parquet:
        arrow = parquet.schema_arrow
    fields = {field.name: field.type for field in leaf_columns(arrow) if field.name not in arrow.names}
    types = fields | dict(zip(arrow.names, arrow.types, strict=True))
    types |= {name: pa.string() if isinstance(value, str) else pa.int64() for name, value in file.partition}
    types |= dict(manifest.columns)
    for name in names or []:
        if name not in types:
            raise DataError(f"unknown column {name!r} to keep; the data has {', '.join(types)}", file=file.uri)
    names = [name for name in types if name not in fields] if names is None else list(names)
    for name in added:
        if name in names:
            raise DataError(
                f"the data already has a column {name!r}", file=file.uri, fix="rename it, or keep other columns only"
            )
    return tuple((name, types[name]) for name in names)


def read_part(slices: Slices, kept: Columns, names: Sequence[str]) -> pa.Table:
    """The kept columns and those of `names`.

    Raises:
        DataError: A file cannot be read.
    """
    types = dict(kept)
    columns = kept + tuple((name, _type_of(slices, name)) for name in dict.fromkeys(names) if name not in types)
    table, missing = read_slices(slices, columns, Patience())
    if missing:
        raise missing[0].error
    return table


def _type_of(slices: Slices, name: str) -> pa.DataType:
    partition = dict(slices[0].file.partition)
    if name in partition:
        return pa.string() if isinstance(partition[name], str) else pa.int64()
    with open_parquet(slices[0].uri, slices[0].file.version) as parquet:
        schema = leaf_columns(parquet.schema_arrow)
        return schema.field(name).type if name in schema.names else pa.null()  # a column of nulls fits any type
