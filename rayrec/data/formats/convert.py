"""CSV, JSON lines, Avro and ORC to Parquet, whose footers tell rows and row groups, without which no row could be
found again after a stop: into a folder, or into the cache of a run that is given such files. Each file is a stream.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.formats.binary_files import Avro, Orc
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.formats.text_files import Csv, JsonLines
from rayrec.storage.errors import DataError
from rayrec.storage.files import SUFFIXES, Found, find_files, format_of
from rayrec.storage.locations import cache_folder, local_path, locate, plain_path
from rayrec.storage.parallel import in_threads, one_by_one

Format = Csv | JsonLines | Avro | Orc
FORMATS: dict[str, Format] = {"CSV": Csv(), "TSV": Csv("\t"), "JSON lines": JsonLines(), "Avro": Avro(), "ORC": Orc()}


@dataclass(frozen=True, slots=True)
class Converted:
    """One file that was converted: its URI, its rows, what they were written to, and what a user should know of it."""

    source: str
    rows: int
    files: list[Path]
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Task:
    """One file to convert."""

    uri: str
    folder: Path
    stem: str
    format: Format
    note: str


def convert(
    sources: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    types: Mapping[str, str] | None = None,
    layout: Layout | None = None,
    header: bool | None = None,
    on_ray: bool = False,
) -> Iterator[Converted]:
    """Converts files to Parquet, rows in their order; gives each file's result when it is done.

    Folders below the common folder of the sources are kept, so that partitions (`day=…`) stay.

    Args:
        sources: files, folders or globs; `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json`, `.avro`, `.orc`, text also with
            `.gz`, `.bz2` or `.zst`.
        out: a folder that every node sees, without Parquet files yet.
        types: Arrow types by column, where the first rows do not show them.
        header: whether CSV and TSV files begin with the names of their columns; None: judged by their first lines.
            Without names, columns are `c0`, `c1`, …
        on_ray: one Ray task a file.

    Raises:
        DataError: a file that cannot be read (with the line), CSV files with and without a header, columns of different
            types in different files, an unknown type, a folder that cannot be made.
    """
    found = find_files(sources, SUFFIXES)
    formats = {file.uri: _format(file.uri, header) for file in found}
    notes = _headers(formats)
    folder = local_path(out).expanduser().absolute()
    if folder.exists() and any(folder.rglob("*.parquet")):
        raise DataError(
            "the folder holds Parquet files already", file=str(folder), fix="name a new folder, or empty it"
        )
    schema = _common_schema(formats, types or {})
    tasks = _tasks(found, folder, formats, notes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder cannot be made: {error.strerror}"
        raise DataError(problem, file=str(folder), fix="name another one, on every node the same") from error
    yield from one_by_one(partial(_convert, schema=schema, layout=layout or Layout()), tasks, on_ray=on_ray)


def convert_once(found: Sequence[Found], place: str) -> Iterator[tuple[list[Found], str | None]]:
    """The Parquet files that each file has become, and a line to tell where that was done now.

    They lie in a folder that is named by the file (path, size, time of change) and the columns of all; what a kill
    leaves is made again, of that file alone. Folders `key=value` above the file are kept.

    Args:
        place: path or URI of the cache; on a path one process at a time writes.

    Raises:
        DataError: as `convert`.
        OSError: the cache cannot be written.
    """
    formats = {file.uri: _format(file.uri, None) for file in found}
    notes, schema = _headers(formats), _common_schema(formats, {})
    cache = locate(place)
    folder = cache_folder("converting") if cache.root else Path(cache.path)  # objects cannot be renamed

    def one(file: Found) -> tuple[list[Found], str | None]:
        name = hashlib.sha256(f"{file}{schema}".encode()).hexdigest()[:16]
        whole, making, told = f"{cache.path}/{name}", folder / f"_{name}", None
        mark = f"{whole}/_whole" if cache.root else whole
        if cache.filesystem.get_file_info(mark).type == pafs.FileType.NotFound:
            shutil.rmtree(making, ignore_errors=True)  # what a kill left
            making.mkdir(parents=True)
            began, (*above, last) = time.monotonic(), plain_path(file.uri).split("/")
            below = making.joinpath(*(part for part in above if "=" in part))
            note = notes.get(file.uri, "")
            done = _convert(_Task(file.uri, below, last.split(".")[0], formats[file.uri], note), schema, Layout())
            if cache.root:
                pafs.copy_files(str(making), whole, destination_filesystem=cache.filesystem)
                cache.filesystem.open_output_stream(mark).close()
                shutil.rmtree(making)
            else:
                making.rename(whole)
            seconds = time.monotonic() - began
            told = f"{file.uri}: {done.rows:,} rows made Parquet in {seconds:.1f} s{note and f'; {note}'}"
        there = cache.filesystem.get_file_info(pafs.FileSelector(whole, recursive=True))
        parts = sorted((part for part in there if part.path.endswith(".parquet")), key=lambda part: part.path)
        return [Found(cache.uri_of(part.path), part.size, part.mtime_ns) for part in parts], told

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from in_threads(one, found, os.cpu_count() or 1)


def _format(uri: str, header: bool | None) -> Format:
    kind = format_of(uri)
    if kind is None:
        raise DataError(f"unknown format; known are {', '.join(SUFFIXES)}", file=uri, fix="rename the file")
    known = FORMATS[kind]
    return replace(known, header=header) if isinstance(known, Csv) else known


def _headers(formats: Mapping[str, Format]) -> dict[str, str]:
    """A note for each CSV file without a header.

    Raises:
        DataError: others have one.
    """
    looks = {uri: one.look(uri) for uri, one in formats.items() if isinstance(one, Csv)}
    without = {uri: len(look.columns) for uri, look in looks.items() if not look.header}
    if without and len(without) < len(looks):
        named = next(uri for uri in looks if uri not in without)
        problem = f"the first line seems to be data, but that of {named} names columns"
        raise DataError(problem, file=next(iter(without)), fix="say what is right for all: --header or --no-header")
    return {uri: f"no header line: columns are named c0 to c{width - 1}" for uri, width in without.items()}


def _tasks(
    found: Sequence[Found], folder: Path, formats: Mapping[str, Format], notes: Mapping[str, str]
) -> list[_Task]:
    """Where each file goes."""
    paths = [plain_path(file.uri) for file in found]
    top = os.path.commonpath([os.path.dirname(path) for path in paths])
    tasks: dict[Path, _Task] = {}
    for file, path in zip(found, paths, strict=True):
        stem, below = os.path.basename(path).split(".")[0], folder / os.path.relpath(os.path.dirname(path), top)
        task = _Task(file.uri, below, stem, formats[file.uri], notes.get(file.uri, ""))
        other = tasks.setdefault(below / stem, task)
        if other.uri != file.uri:
            raise DataError(f"would be written over what {other.uri} becomes", file=file.uri, fix="rename one of them")
    return list(tasks.values())


def _convert(task: _Task, schema: pa.Schema, layout: Layout) -> Converted:
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in task.format.batches(task.uri, schema):
            rows += batch.num_rows
            yield batch

    files = write_parts(counted(), task.folder, task.stem, layout)
    return Converted(task.uri, rows, files, task.note)


def _common_schema(formats: Mapping[str, Format], types: Mapping[str, str]) -> pa.Schema:
    """One type for each column in all files, whole numbers and fractions taken together as fractions."""
    fields: dict[str, pa.Field] = {}
    seen: dict[str, str] = {}
    for uri, one in formats.items():
        for field in one.schema(uri):
            if field.name in types:
                continue
            first = fields.setdefault(field.name, field)
            try:
                merged = pa.unify_schemas([pa.schema([first]), pa.schema([field])], promote_options="permissive")
            except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
                problem = f"the column is {field.type} here and {first.type} in {seen[field.name]}"
                fix = f"say what it holds, e.g. --type {field.name}=string"
                raise DataError(problem, file=uri, column=field.name, fix=fix) from error
            fields[field.name] = merged.field(0)
            seen.setdefault(field.name, uri)
    given = [pa.field(name, _named_type(name, text)) for name, text in types.items()]
    return pa.schema([*fields.values(), *given])


def _named_type(column: str, text: str) -> pa.DataType:
    inner = text[5:-1] if text.startswith("list<") and text.endswith(">") else None
    try:
        return pa.list_(pa.type_for_alias(inner)) if inner is not None else pa.type_for_alias(text)
    except ValueError as error:
        fix = "use one of int64, double, string, bool, timestamp[s], date32, list<int64>, …"
        raise DataError(f"{text!r} is not a type", column=column, fix=fix) from error
