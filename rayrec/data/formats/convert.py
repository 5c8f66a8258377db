"""Converts CSV, JSON lines, Avro and ORC files to Parquet: into a folder, or into the cache of a run.

Training needs Parquet: resumption finds rows by the row groups that Parquet footers list. Files are streamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from rayrec.data.arrays.widening import common_types
from rayrec.data.formats.binary_files import Avro, Orc
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.formats.text_files import Csv, JsonLines, looks_like_json
from rayrec.data.formats.text_options import TextOptions, TextReading, text_reading
from rayrec.storage.column_names import check_names
from rayrec.storage.errors import DataError, suggestion
from rayrec.storage.files import SUFFIXES, Found, find_files, format_of, is_unnamed_text
from rayrec.storage.locations import cache_folder, local_path, locate, plain_path
from rayrec.storage.parallel import in_threads, one_by_one
from rayrec.storage.parquet import file_kind
from rayrec.storage.struct_fields import leaf_columns, with_types

Format = Csv | JsonLines | Avro | Orc
_RULES = 2  # version of the rules by which text is read: files that were converted by others are converted again


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of one file: its URI, its rows, the Parquet files, and a note for the user."""

    source: str
    rows: int
    files: list[Path]
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Task:
    """A file to convert."""

    uri: str
    folder: Path
    stem: str
    format: Format
    note: str


def convert(
    sources: str | Sequence[str],
    out: str | os.PathLike[str],
    *,
    text: TextOptions | None = None,
    layout: Layout | None = None,
    on_ray: bool = False,
) -> Iterator[Converted]:
    """Converts files to Parquet, keeping the order of rows; yields the result of each file.

    Keeps the folder structure below the sources' common folder, with partitions like `day=…`.

    Args:
        sources: files, folders or globs: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json`, `.avro`, `.orc`; text files also
            with `.gz`, `.bz2` or `.zst`.
        out: a folder without Parquet files, visible to every node.
        text: how to read text files; None: the options of `reading_text`.
        on_ray: run one Ray task per file.

    Raises:
        DataError: an unreadable file (with the line), a mix of CSV files with and without a header, a column whose type
            differs between files, an unknown type, a folder that cannot be created.
    """
    files = find_files(sources, SUFFIXES)
    reading = text_reading() if text is None else TextReading(text)
    formats = {file.uri: _format(file.uri, reading) for file in files}
    notes = _notes(formats)
    folder = local_path(out).expanduser().absolute()
    if folder.exists() and any(folder.rglob("*.parquet")):
        raise DataError(
            "the folder already contains Parquet files", file=str(folder), fix="name a new folder, or empty this one"
        )
    schema = _common_schema(formats, reading)
    tasks = _tasks(files, folder, formats, notes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot create the folder: {error.strerror}"
        raise DataError(problem, file=str(folder), fix="name a folder that every node can write") from error
    yield from one_by_one(partial(_convert, schema=schema, layout=layout or Layout()), tasks, on_ray=on_ray)


def convert_once(files: Sequence[Found], cache_path: str) -> Iterator[tuple[list[Found], str | None]]:
    """Yields each file's Parquet files in the cache, and a note for the user if they were written now.

    The cache key is the file (path, size, modification time) and the common schema. After an interruption only the
    unfinished file is converted again. Folders `key=value` above the file are kept.

    Args:
        cache_path: path or URI of the cache. In a local cache, one process writes at a time.

    Raises:
        DataError: as `convert`.
        OSError: the cache cannot be written.
    """
    reading = text_reading()
    formats = {file.uri: _format(file.uri, reading) for file in files}
    notes, schema = _notes(formats), _common_schema(formats, reading)
    cache = locate(cache_path)
    # Object stores cannot rename, so files are written to a local folder first.
    staging = cache_folder("converting") if cache.root else Path(cache.path)

    def cached_or_converted(file: Found) -> tuple[list[Found], str | None]:
        key = hashlib.sha256(f"{_RULES}{file}{schema}{reading.key}".encode()).hexdigest()[:16]
        target, temporary, note = f"{cache.path}/{key}", staging / f"_{key}", None
        marker = f"{target}/_whole" if cache.root else target
        if cache.filesystem.get_file_info(marker).type == pafs.FileType.NotFound:
            shutil.rmtree(temporary, ignore_errors=True)  # left by an interrupted conversion
            temporary.mkdir(parents=True)
            start_s, (*parents, name) = time.monotonic(), plain_path(file.uri).split("/")
            folder = temporary.joinpath(*(parent for parent in parents if "=" in parent))
            header_note = notes.get(file.uri, "")
            task = _Task(file.uri, folder, name.split(".")[0], formats[file.uri], header_note)
            converted = _convert(task, schema, Layout())
            if cache.root:
                pafs.copy_files(str(temporary), target, destination_filesystem=cache.filesystem)
                cache.filesystem.open_output_stream(marker).close()
                shutil.rmtree(temporary)
            else:
                temporary.rename(target)
            seconds = time.monotonic() - start_s
            note = f"{file.uri}: converted {converted.rows:,} rows to Parquet in {seconds:.1f} s"
            note += f"; {header_note}" if header_note else ""
        entries = cache.filesystem.get_file_info(pafs.FileSelector(target, recursive=True))
        parquet = sorted((entry for entry in entries if entry.path.endswith(".parquet")), key=lambda entry: entry.path)
        return [Found(cache.uri_of(entry.path), entry.size, entry.mtime_ns) for entry in parquet], note

    staging.mkdir(parents=True, exist_ok=True)
    with (staging / "_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from in_threads(cached_or_converted, files, os.cpu_count() or 1)


def reader_of(uri: str) -> Format:
    """The reader of a file, by its name.

    Raises:
        DataError: an unknown suffix.
    """
    return _format(uri, text_reading())


def _format(uri: str, reading: TextReading) -> Format:
    kind = format_of(uri)
    if kind is None:
        if (known := file_kind(uri)) is not None:
            raise DataError(f"cannot read the file: it is {known[0]}", file=uri, fix=known[1])
        fix = "rename the file: text with a separator is read as .txt"
        raise DataError(f"unknown format; supported: {', '.join(SUFFIXES)}", file=uri, fix=fix)
    if kind == "Avro":
        return Avro()
    if kind == "ORC":
        return Orc()
    if kind == "JSON lines" or (is_unnamed_text(uri) and looks_like_json(uri)):
        return JsonLines(reading)
    return Csv("\t" if kind == "TSV" else ",", reading)


def _notes(formats: Mapping[str, Format]) -> dict[str, str]:
    """What was found about each text file, for the user.

    Raises:
        DataError: some CSV files have a header and some do not.
    """
    layouts = {uri: reader.layout(uri) for uri, reader in formats.items() if isinstance(reader, Csv)}
    without = [uri for uri, layout in layouts.items() if not layout.header]
    if without and len(without) < len(layouts):
        named = next(uri for uri in layouts if uri not in without)
        problem = f"the first line looks like data, but {named} has a header"
        raise DataError(problem, file=without[0], fix="pass --header or --no-header for all files")
    return {uri: "; ".join(layout.notes) for uri, layout in layouts.items()}


def _tasks(
    files: Sequence[Found], folder: Path, formats: Mapping[str, Format], notes: Mapping[str, str]
) -> list[_Task]:
    """The output folder and name of each file."""
    paths = [plain_path(file.uri) for file in files]
    top = os.path.commonpath([os.path.dirname(path) for path in paths])
    tasks: dict[Path, _Task] = {}
    for file, path in zip(files, paths, strict=True):
        stem, below = os.path.basename(path).split(".")[0], folder / os.path.relpath(os.path.dirname(path), top)
        task = _Task(file.uri, below, stem, formats[file.uri], notes.get(file.uri, ""))
        earlier = tasks.setdefault(below / stem, task)
        if earlier.uri != file.uri:
            problem = f"its conversion would overwrite the conversion of {earlier.uri}"
            raise DataError(problem, file=file.uri, fix="rename one of them")
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


def _common_schema(formats: Mapping[str, Format], reading: TextReading) -> pa.Schema:
    """The widest type of each column over all files, except for the given types.

    Raises:
        DataError: types that have no common one, or a given type of a column that no file has.
    """
    schemas = {uri: reader.schema(uri) for uri, reader in formats.items()}
    check_names((uri, schema.names) for uri, schema in schemas.items())
    given = dict(reading.types)
    # One file may show ids that need it. As a common type of both, a decimal would be no id.
    leaves = [field for schema in schemas.values() for field in leaf_columns(schema)]
    given |= {field.name: field.type for field in leaves if field.type == pa.uint64()}
    typed = ((uri, with_types(schema, given)) for uri, schema in schemas.items())
    columns = common_types(typed, fix="set its type, e.g. --type COLUMN=string")
    names = leaf_columns(columns).names
    for name in (*reading.options.types, *reading.options.lists, *reading.options.times):
        if name not in names:
            problem = f"no file has this column, whose type is given{suggestion(name, names)}"
            raise DataError(problem, column=name, fix=f"use one of the columns {', '.join(names)}")
    empty = [field.name for field in leaf_columns(columns) if pa.types.is_null(field.type)]
    return with_types(columns, {name: reading.type_without_values(name) for name in empty})
