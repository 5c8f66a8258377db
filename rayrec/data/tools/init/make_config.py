"""From files of unknown columns to a whole train config: converted, looked at, divided, with sizes that fit.

Rows to evaluate on are the last by time, or some by a hash of their number.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import UNITS, decoded
from rayrec.data.arrays.buffers import Mask
from rayrec.data.arrays.hashing import mix64_array, seed_of
from rayrec.data.formats.convert import convert
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.source.filters import Condition
from rayrec.data.source.partitions import Partitioned, tables_of
from rayrec.data.tools.init.inspect import Inspection, inspect
from rayrec.storage.errors import DataError
from rayrec.storage.files import PARQUET, SUFFIXES, find_files

SHARE = 0.1  # of the rows, to evaluate on
_STEPS = 200  # of an epoch, about
_MANY = 1_000_000  # rows from which on workers beside this process are worth their start
_LAYOUT = Layout(row_group_rows=1 << 16)

Tell = Callable[[str], object]
Held = Callable[[pa.Table, int], Mask]
"""Which rows of a table, whose first one has this number in the data set, are held out."""
_HELD = 4  # keeps these draws apart from other hashes
_MOST_TIMES = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run may use here."""

    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A config as plain values, and what was found in the data."""

    config: dict[str, Any]
    inspection: Inspection


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Removes a folder that is made inside, should that fail or be interrupted."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def start(
    sources: Sequence[str], name: str, folder: Path, machine: Machine, label: str | None = None, tell: Tell = print
) -> Started:
    """Makes a config that trains as it is.

    Args:
        sources: Parquet files, or files that can be converted.
        folder: takes vocabularies, and rows that were converted or divided; must not exist.
        label: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER; None: the column that looks like it.
        tell: takes a line on each thing that was done.

    Raises:
        DataError: files that cannot be read, no label, no ids, too few rows.
    """
    folder = folder.absolute()
    paths = _as_parquet(sources, folder / "rows", tell)
    converted = paths == [str(folder / "rows")]
    found = inspect(paths, label=label)
    dim = 8 if found.rows < 20_000 else 16 if found.rows < 2 * _MANY else 32
    if not found.proposal(dim)["tables"]:
        fix = "rayrec trains embedding tables; give data with a column of users, items or categories"
        raise DataError("no column holds ids or categories", fix=fix)
    time = next((column.name for column in found.columns if column.role == "timestamp"), None)
    data = _divided(paths, time, folder, copy=converted, tell=tell)
    if converted:
        shutil.rmtree(folder / "rows")
    train = data["train"] if isinstance(data["train"], dict) else {"path": data["train"]}
    seen = inspect(train["path"], filters=train.get("filters", ()), label=label)  # held-out rows shape nothing
    proposal = seen.proposal(dim, folder / "vocabularies")
    model = _model(found.rows, dim, len(proposal["schema"]["dense"]))
    return Started({"name": name, "data": data, **proposal, "model": model, **_training(found.rows, machine)}, found)


def _as_parquet(sources: Sequence[str], out: Path, tell: Tell) -> list[str]:
    """The sources, or the folder with what they were converted to."""
    uris = [file.uri for file in find_files(sources, (*PARQUET, *SUFFIXES))]
    others = [uri for uri in uris if not uri.endswith(PARQUET)]
    if not others:
        find_files(sources)  # refuses the folder of a table
        _refuse_inside(out.parent, sources)
        return [path if "://" in path else str(Path(path).expanduser().absolute()) for path in sources]
    if len(others) < len(uris):
        parquet = next(uri for uri in uris if uri.endswith(PARQUET))
        raise DataError(
            f"this file is no Parquet, but {parquet} is", file=others[0], fix="begin with files of one kind"
        )
    for done in convert(sources, out):
        tell(f"{done.source}: {done.rows:,} rows{done.note and f'; {done.note}'}")
        if not done.rows:
            raise DataError("the file has no rows", file=done.source, fix="leave it out")
    return [str(out)]


def _refuse_inside(folder: Path, sources: Sequence[str]) -> None:
    """What is written must not be found again as data."""
    for path in sources:
        if "://" not in path and folder.is_relative_to(Path(path).expanduser().absolute()):
            fix = "run the command in another folder, or name the files"
            raise DataError(f"{folder.name} would lie among the data that it is made of", file=path, fix=fix)


def _divided(paths: Sequence[str], time: str | None, folder: Path, *, copy: bool, tell: Tell) -> dict[str, Any]:
    """`data` of a train config."""
    found = Partitioned.of(find_files(paths))
    cut = None if time is None else last_by_time(found, time, SHARE)
    if cut is not None and time is not None:
        tell(f"evaluation: the last rows by {time!r}, from {cut} on")
        if not copy:
            given = list(paths) if len(paths) > 1 else paths[0]
            return {
                "train": {"path": given, "filters": [[time, "<", cut]]},
                "eval": {"path": given, "filters": [[time, ">=", cut]]},
            }
        held = from_time(time, cut)
    else:
        why = "there is no column of times" if time is None else f"too few different times in {time!r}"
        tell(f"evaluation: a tenth of the rows by a hash of their number, for {why}")
        held = by_hash(SHARE)
    train, evaluation = folder / "train", folder / "eval"
    trained, evaluated = write_split(found, held, train, evaluation, _LAYOUT)
    tell(f"{trained:,} rows to train on and {evaluated:,} to evaluate on, in {folder}")
    return {"train": str(train), "eval": str(evaluation)}


def _model(rows: int, dim: int, num_dense: int) -> dict[str, Any]:
    """DLRM; without numbers DCN, for DLRM sees ids only through products of two of them, and no id by itself."""
    top = [64, 32, 1] if rows < 2 * _MANY else [256, 128, 1]
    if num_dense:
        return {"name": "dlrm", "args": {"dense_arch": [64, dim], "over_arch": top}}
    return {"name": "dcn", "args": {"dense_arch": [], "over_arch": top, "cross_layers": 2}}


def _training(rows: int, machine: Machine) -> dict[str, Any]:
    """Optimizers, trainer and storage for so many rows on such a machine."""
    workers = machine.gpus or (0 if rows < _MANY else max(1, min(machine.cores // 2, rows // (_MANY // 2))))
    batch = max(workers, 1 << max(3, min(13, (rows // _STEPS).bit_length() - 1)))
    return {
        "optimizers": {
            "dense": {"kind": "adam", "lr": 0.001},
            "sparse": {"kind": "rowwise_adagrad", "lr": 0.02},
        },
        "trainer": {
            "num_workers": workers,
            "batch_size": batch,
            "epochs": 5 if rows < _MANY else 3 if rows < 10 * _MANY else 1,
            "threads_per_worker": 1,  # layers this small gain nothing from more
            "log_every": max(1, min(20, rows // batch // 5)),
            "early_stopping": {"metric": "ne", "patience": 2},
        },
        "storage": {"path": "runs", "keep_best": "ne"},
    }


def by_hash(share: float) -> Held:
    """A share of the rows, by a hash of their number: always the same ones."""

    def held(table: pa.Table, first: int) -> Mask:
        draws = mix64_array(np.arange(first, first + table.num_rows), seed_of(_HELD))
        mask: Mask = draws < np.uint64(int(share * 2**64))
        return mask

    return held


def from_time(column: str, first: int | str) -> Held:
    """The rows from a moment on, which is written as in a filter."""
    condition = Condition(column, ">=", (first,))
    return lambda table, _: condition.holds(table.column(column))


def last_by_time(found: Partitioned, column: str, share: float) -> int | str | None:
    """The moment from which on about a share of the rows lie, as a filter writes it; of many rows, by some of them.

    Returns:
        None where the times are too few to cut there: nothing, or more than half of the rows, would be held out.
    """
    times, kind = _times(found, column)
    if not len(times):
        return None
    cut = int(np.quantile(times, 1 - share, method="higher"))
    if not 0 < np.count_nonzero(times >= cut) <= len(times) / 2:
        return None
    if pat.is_integer(kind):
        return cut
    if pat.is_date(kind):
        days = cut // (86_400_000 if pat.is_date64(kind) else 1)
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days)).date().isoformat()
    return datetime.fromtimestamp(cut // UNITS[kind.unit], UTC).strftime("%Y-%m-%d %H:%M:%S")


def _times(found: Partitioned, column: str) -> tuple[npt.NDArray[np.int64], pa.DataType]:
    """The column's values, or evenly chosen ones of very many."""
    kept: list[npt.NDArray[np.int64]] = []
    stride, kind = 1, pa.int64()
    for table in (table for one in found.files for table in tables_of(one, found.types, [column])):
        array = decoded(table.column(column).combine_chunks())
        kind, numbers = array.type, array.cast(pa.int32() if pat.is_date32(array.type) else pa.int64(), safe=False)
        kept.append(numbers.drop_null().to_numpy()[::stride].astype(np.int64))
        if sum(map(len, kept)) > _MOST_TIMES:
            kept, stride = [np.concatenate(kept)[::2]], 2 * stride
    return np.concatenate([np.empty(0, np.int64), *kept]), kind


def write_split(found: Partitioned, held: Held, train: Path, evaluation: Path, layout: Layout) -> tuple[int, int]:
    """Writes all rows, in their order, into one of two folders.

    Returns:
        rows to train on, rows held out.

    Raises:
        DataError: one of them would be empty, or the columns differ between files.
    """
    sides = {train: False, evaluation: True}
    rows = dict.fromkeys(sides, 0)

    def chosen(folder: Path) -> Iterator[pa.RecordBatch]:
        first, schema = 0, None
        for table in (table for one in found.files for table in tables_of(one, found.types)):
            schema = schema or table.schema
            try:
                part = table.select(schema.names).cast(schema)
            except (KeyError, ValueError) as error:
                raise DataError(f"the files' columns differ: {error}", fix="begin with files of one kind") from error
            part = part.filter(pa.array(held(table, first) == sides[folder]))
            first, rows[folder] = first + table.num_rows, rows[folder] + part.num_rows
            yield from part.to_batches()

    for folder in sides:
        write_parts(chosen(folder), folder, "part", layout)
        if not rows[folder]:
            file = found.files[0].file.uri
            raise DataError("too few rows to set some aside for evaluation", file=file, fix="give more rows")
    return rows[train], rows[evaluation]
