"""`rayrec init`: makes a train config for files: converts, inspects and splits them, and chooses sizes.

Rows for evaluation are the last ones by time, or chosen by a hash of the row number.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import UNITS, decoded, without_views
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.arrays.hashing import mix64_array, seed_of
from rayrec.data.arrays.widening import common_types, widened, widened_table
from rayrec.data.formats.convert import convert
from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.data.formats.text_options import TextOptions
from rayrec.data.source.filters import Condition
from rayrec.data.source.partitions import READ_ROWS, Partitioned, PartitionedFile, tables_of, with_partitions
from rayrec.data.source.row_share import ROW_SHARE, row_shares
from rayrec.data.tools.init.inspect import Inspection, inspect
from rayrec.data.tools.init.stated_roles import StatedRoles
from rayrec.data.tools.init.text_files import find_text_options
from rayrec.data.tools.init.times import TimeColumn
from rayrec.storage.errors import DataError
from rayrec.storage.files import PARQUET, SUFFIXES, find_files
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_columns

# Fraction of rows for evaluation.
SHARE = 0.1
# Rows of the rarer value of a label in the evaluation; with fewer, the AUC is known to 0.06 at most (2 / √(12 rows)).
FEW_OF_A_LABEL = 100
# Approximate steps of an epoch.
_STEPS = 200
# Rows for which separate worker processes pay off.
_MANY_ROWS = 1_000_000
_LAYOUT = Layout(row_group_rows=1 << 16)

Tell = Callable[[str], object]
HoldOut = Callable[[pa.Table, int], Mask]
"""True for rows of a table that are held out; the second argument is the number of its first row in the data set."""
# Seed that distinguishes these draws from other hashes.
_HOLD_OUT_SEED = 4
_MAX_TIMES = 1 << 21
_RANDOM = (
    "in a log, a random split overstates the metrics: the model has seen later rows; name the time with "
    "--time COLUMN[=FORMAT]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources for a run."""

    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A config as plain values, the inspection of the data, and lines for the head of the config."""

    config: dict[str, Any]
    inspection: Inspection
    comments: tuple[str, ...] = ()


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Removes the folder if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def start(
    sources: Sequence[str],
    name: str,
    folder: Path,
    machine: Machine,
    label: str | Sequence[str] | None = None,
    tell: Tell = print,
    keep: Collection[str] = (),
    time: str | None = None,
    roles: StatedRoles | None = None,
) -> Started:
    """Makes a config that is ready to train.

    Args:
        sources: Parquet files, or files that can be converted.
        name: name of the config.
        folder: folder for vocabularies, and for converted or split rows; must not exist.
        machine: the resources for the run.
        label: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER, or several of them; None: the column that looks like a label.
        tell: called with a line about each action.
        keep: columns that stay features although they seem to be known only after the label.
        time: COLUMN or COLUMN=FORMAT with the time of a row; None: recognized by its values.
        roles: columns by what they are, as in `inspect`.

    Raises:
        DataError: unreadable files, no label, no ids, too few rows, a label, a time or a stated role that does not fit.
    """
    folder = folder.absolute()
    paths, text = _as_parquet(sources, folder / "rows", tell, roles or {})
    converted = paths == [str(folder / "rows")]
    inspection = inspect(paths, label=label, keep=keep, time=time, roles=roles)
    dim = 8 if inspection.rows < 20_000 else 16 if inspection.rows < 2 * _MANY_ROWS else 32
    if not inspection.proposal(dim)["tables"]:
        fix = "rayrec trains embedding tables; use data with a column of users, items or categories"
        raise DataError("no column contains ids or categories", fix=fix)
    chosen_time = inspection.time
    division = _divided(paths, chosen_time, folder, copy=converted, tell=tell)
    data = division.data
    for line in _few_in_evaluation(inspection, division.eval_share):
        tell(line)
    if chosen_time is None:
        for question in inspection.questions:
            tell(question)
    if converted:
        shutil.rmtree(folder / "rows")
    if written := text.model_dump(exclude_defaults=True):
        data["read"] = {"text": written}
    train = data["train"] if isinstance(data["train"], dict) else {"path": data["train"]}
    # Held-out rows must not influence the schema.
    train_inspection = inspect(
        train["path"],
        filters=train.get("filters", ()),
        label=label,
        keep=keep,
        time=None if chosen_time is None else chosen_time.option,
        roles=roles,
    )
    proposal = train_inspection.proposal(dim, folder / "vocabularies", division.train_seconds)
    model = _model(inspection.rows, dim, len(proposal["schema"]["dense"]), len(train_inspection.labels))
    config = {"name": name, "data": data, **proposal, "model": model, **_training(inspection.rows, machine)}
    used = {facts.name: facts for facts in train_inspection.columns}
    columns = tuple(
        replace(facts, role=used[facts.name].role, note=used[facts.name].note) for facts in inspection.columns
    )
    return Started(config, replace(inspection, columns=columns), division.comments)


def _as_parquet(sources: Sequence[str], out: Path, tell: Tell, roles: StatedRoles) -> tuple[list[str], TextOptions]:
    """The sources, or the folder with their conversions; and how text files were read."""
    uris = [file.uri for file in find_files(sources, (*PARQUET, *SUFFIXES))]
    others = [uri for uri in uris if not uri.endswith(PARQUET)]
    if not others:
        _refuse_inside(out.parent, sources)
        return [path if "://" in path else str(Path(path).expanduser().absolute()) for path in sources], TextOptions()
    if len(others) < len(uris):
        parquet = next(uri for uri in uris if uri.endswith(PARQUET))
        raise DataError(f"this file is not Parquet, but {parquet} is", file=others[0], fix="use files of one format")
    options, lines = find_text_options(uris, roles)
    for line in lines:
        tell(line)
    for result in convert(sources, out, text=options):
        tell(f"{result.source}: {result.rows:,} rows{result.note and f'; {result.note}'}")
        if not result.rows:
            raise DataError("the file has no rows", file=result.source, fix="remove it")
    return [str(out)], options


def _refuse_inside(folder: Path, sources: Sequence[str]) -> None:
    """Refuses an output folder inside the data, where its files would be read as data."""
    for path in sources:
        if "://" not in path and folder.is_relative_to(Path(path).expanduser().absolute()):
            fix = "run the command in another folder, or name the files"
            raise DataError(f"the output folder {folder.name} would be inside the data", file=path, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """The rows in training and evaluation.

    Args:
        data: section `data` of a train config.
        comments: lines for the head of the config.
        train_seconds: times of the training rows, or of an even sample; None without a time.
        eval_share: fraction of the rows in the evaluation.
    """

    data: dict[str, Any]
    comments: tuple[str, ...]
    train_seconds: I64 | None
    eval_share: float


@dataclass(frozen=True, slots=True)
class _LastRows:
    """The evaluation rows by time.

    Args:
        first: their first time, as in a filter, or as text.
        hold_out: holds out these rows.
        train_seconds, share: as in `_Division`.
    """

    first: int | str
    hold_out: HoldOut
    train_seconds: I64
    share: float


def _divided(paths: Sequence[str], time: TimeColumn | None, folder: Path, *, copy: bool, tell: Tell) -> _Division:
    """Divides the rows: by filters, or into two folders if they are converted or training cannot read the time."""
    partitioned = Partitioned.of(find_files(paths))
    path = list(paths) if len(paths) > 1 else paths[0]
    comments: tuple[str, ...] = ()
    last = None if time is None else _last_rows(partitioned, time)
    if time is not None and last is not None:
        cut, hold_out = last.first, last.hold_out
        tell(f"evaluation: the last rows by {time.column!r}, from {cut} on")
        if not copy and time.is_readable:
            sides = _by_filters(path, time.column, cut)
            return _Division(data=sides, comments=(), train_seconds=last.train_seconds, eval_share=last.share)
    else:
        reason = "there is no time column" if time is None else f"{time.column!r} has too few distinct times"
        lines = [f"evaluation: a tenth of the rows by a hash of their number, because {reason}"]
        if time is None:
            lines.append(_RANDOM)
        for line in lines:
            tell(line)
        comments, hold_out = tuple(lines), by_hash(SHARE)
        if not copy:
            _check_both_sides(partitioned)
            sides = _by_filters(path, ROW_SHARE, 1 - SHARE)
            return _Division(data=sides, comments=comments, train_seconds=None, eval_share=SHARE)
    train, evaluation = folder / "train", folder / "eval"
    train_rows, eval_rows = write_split(partitioned, hold_out, train, evaluation, _LAYOUT)
    tell(f"{train_rows:,} training rows and {eval_rows:,} evaluation rows in {folder}")
    return _Division(
        data={"train": str(train), "eval": str(evaluation)},
        comments=comments,
        train_seconds=None if last is None else last.train_seconds,
        eval_share=eval_rows / (train_rows + eval_rows),
    )


def _by_filters(path: str | list[str], column: str, first: Any) -> dict[str, Any]:
    """Both sides of a data set, divided at the first value of the evaluation."""
    operators = {"train": "<", "eval": ">="}
    return {side: {"path": path, "filters": [[column, operator, first]]} for side, operator in operators.items()}


def _check_both_sides(partitioned: Partitioned) -> None:
    """
    Raises:
        DataError: no training row, or no evaluation row.
    """
    trained = held_out = False
    for file in partitioned.files:
        with open_parquet(file.file.uri) as parquet:
            rows = min(parquet.metadata.num_rows, READ_ROWS)
        is_held_out = row_shares(file.file.uri, file.file.size_bytes, np.arange(rows)).to_numpy() >= 1 - SHARE
        trained, held_out = trained or not is_held_out.all(), held_out or bool(is_held_out.any())
        if trained and held_out:
            return
    raise _too_few_rows(partitioned)


def _few_in_evaluation(inspection: Inspection, share: float) -> Iterator[str]:
    """A line for each label with few evaluation rows of its rarer value."""
    for label in inspection.labels:
        positives = float(label.positives.mean())
        rarer = int(positives <= 0.5)
        rows = round(min(positives, 1 - positives) * share * inspection.rows)
        if rows < FEW_OF_A_LABEL:
            yield (
                f"evaluation: about {rows} of its rows have label {rarer} ({label.column}): too few for a reliable "
                "AUC; use more rows, or evaluate on more of them (data.train and data.eval in the config)"
            )


def _last_rows(partitioned: Partitioned, time: TimeColumn) -> _LastRows | None:
    """The evaluation rows by time; None if there are too few distinct times."""
    if time.is_readable:
        times, kind = _times(partitioned, time.column)
        if (cut := _first_of_last(times, SHARE)) is None:
            return None
        first = _as_in_filter(cut, kind)
        seconds = _in_seconds(times[times < cut], kind, time.format or "s")
        return _LastRows(first, from_time(time.column, first), seconds, float(np.mean(times >= cut)))
    tables = _tables(partitioned, time.column, _schemas(partitioned))
    seconds = _sampled(time.seconds(table) for table in tables)
    first_s = _first_of_last(seconds, SHARE)
    if first_s is None:
        return None
    moment = datetime.fromtimestamp(first_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    share = float(np.mean(seconds >= first_s))
    return _LastRows(moment, lambda table, _: time.seconds(table) >= first_s, seconds[seconds < first_s], share)


def _model(rows: int, dim: int, num_dense: int, num_labels: int) -> dict[str, Any]:
    """DLRM; without dense features DCN, because DLRM sees ids only in products of two, never alone."""
    top = [*((64, 32) if rows < 2 * _MANY_ROWS else (256, 128)), num_labels]
    if num_dense:
        return {"name": "dlrm", "args": {"dense_arch": [64, dim], "over_arch": top}}
    return {"name": "dcn", "args": {"dense_arch": [], "over_arch": top, "cross_layers": 2}}


def _training(rows: int, machine: Machine) -> dict[str, Any]:
    """The sections `optimizers`, `trainer` and `storage` for this number of rows on this machine."""
    workers = machine.gpus or (0 if rows < _MANY_ROWS else max(1, min(machine.cores // 2, rows // (_MANY_ROWS // 2))))
    batch = max(workers, 1 << max(3, min(13, (rows // _STEPS).bit_length() - 1)))
    return {
        "optimizers": {
            "dense": {"kind": "adam", "lr": 0.001},
            "sparse": {"kind": "rowwise_adagrad", "lr": 0.02},
        },
        "trainer": {
            "num_workers": workers,
            "batch_size": batch,
            "epochs": 5 if rows < _MANY_ROWS else 3 if rows < 10 * _MANY_ROWS else 1,
            "threads_per_worker": 1,  # small layers gain nothing from more
            "log_every": max(1, min(20, rows // batch // 5)),
            "early_stopping": {"metric": "ne", "patience": 2},
        },
        "storage": {"path": "runs", "keep_best": "ne"},
    }


def by_hash(share: float) -> HoldOut:
    """Holds out a fraction of the rows by a hash of their number, reproducibly."""

    def hold_out(table: pa.Table, first: int) -> Mask:
        draws = mix64_array(np.arange(first, first + table.num_rows), seed_of(_HOLD_OUT_SEED))
        mask: Mask = draws < np.uint64(int(share * 2**64))
        return mask

    return hold_out


def from_time(column: str, first: int | str) -> HoldOut:
    """Holds out the rows from a time on, given as in a filter."""
    condition = Condition(column, ">=", (first,))
    return lambda table, _: condition.holds(table.column(column))


def last_by_time(partitioned: Partitioned, column: str, share: float) -> int | str | None:
    """The time that about a fraction `share` of the rows reach, as in a filter. Of many rows, uses a sample.

    Returns:
        None if there are too few distinct times: no row, or more than half of them, would be held out.
    """
    times, kind = _times(partitioned, column)
    cut = _first_of_last(times, share)
    return None if cut is None else _as_in_filter(cut, kind)


def _as_in_filter(time: int, kind: pa.DataType) -> int | str:
    """A value of `_times` as in a filter."""
    if pat.is_integer(kind):
        return time
    seconds = _in_seconds(np.array([time]), kind, "")[0]
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))
    return moment.date().isoformat() if pat.is_date(kind) else moment.strftime("%Y-%m-%d %H:%M:%S")


def _in_seconds(times: I64, kind: pa.DataType, unit: str) -> I64:
    """Values of `_times` in seconds since 1970, rounded down.

    Args:
        unit: of integers.
    """
    if pat.is_date32(kind):
        return times * 86_400
    unit = "ms" if pat.is_date64(kind) else kind.unit if pat.is_timestamp(kind) else unit
    seconds: I64 = times // UNITS[unit]
    return seconds


def _first_of_last(times: npt.NDArray[np.int64], share: float) -> int | None:
    """The time that about a fraction `share` reach; None if that would be none, or more than half of them."""
    if not len(times):
        return None
    cut = int(np.quantile(times, 1 - share, method="higher"))
    return cut if 0 < np.count_nonzero(times >= cut) <= len(times) / 2 else None


def _times(partitioned: Partitioned, column: str) -> tuple[npt.NDArray[np.int64], pa.DataType]:
    """The values of the column, or an even sample of very many, in one unit for all files."""
    schemas = _schemas(partitioned)
    kind = common_types((file.file.uri, schemas[file.file.uri]) for file in partitioned.files).field(column).type
    kind = kind.value_type if pat.is_dictionary(kind) else kind

    def values() -> Iterator[npt.NDArray[np.int64]]:
        for table in _tables(partitioned, column, schemas):
            array = widened(decoded(table.column(column).combine_chunks()), kind)
            numbers = array.cast(pa.int32() if pat.is_date32(kind) else pa.int64(), safe=False)
            yield numbers.drop_null().to_numpy().astype(np.int64)

    return _sampled(values()), kind


def _tables(partitioned: Partitioned, column: str, schemas: Mapping[str, pa.Schema]) -> Iterator[pa.Table]:
    """One column of all files that have it."""
    files = (file for file in partitioned.files if column in schemas[file.file.uri].names)
    return (table for file in files for table in tables_of(file, partitioned.types, [column]))


def _sampled(parts: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """All values, or an even sample of very many."""
    samples: list[npt.NDArray[np.int64]] = []
    stride = 1
    for part in parts:
        samples.append(part[::stride])
        if sum(map(len, samples)) > _MAX_TIMES:
            samples, stride = [np.concatenate(samples)[::2]], 2 * stride
    return np.concatenate([np.empty(0, np.int64), *samples])


def _schemas(partitioned: Partitioned) -> dict[str, pa.Schema]:
    """The columns of all files, by URI. Opens the footer of each file."""
    return {file.file.uri: _schema_of(file, partitioned) for file in partitioned.files}


def _schema_of(file: PartitionedFile, partitioned: Partitioned) -> pa.Schema:
    """The columns of a file as `tables_of` reads them."""
    with open_parquet(file.file.uri) as parquet:
        arrow = with_partitions(
            leaf_columns(parquet.schema_arrow), {name: partitioned.types[name] for name in file.values}
        )
    return pa.schema([(field.name, without_views(field.type)) for field in arrow])


def write_split(
    partitioned: Partitioned, hold_out: HoldOut, train: Path, evaluation: Path, layout: Layout
) -> tuple[int, int]:
    """Writes all rows, in order, into one of two folders.

    Returns:
        the numbers of training rows and of held-out rows.

    Raises:
        DataError: one of them would be empty, or a column has no common type.
    """
    is_held_out = {train: False, evaluation: True}
    rows = dict.fromkeys(is_held_out, 0)
    schema = common_types((file.file.uri, _schema_of(file, partitioned)) for file in partitioned.files)

    def rows_of(folder: Path) -> Iterator[pa.RecordBatch]:
        first_row = 0
        for file in partitioned.files:
            for part in tables_of(file, partitioned.types):
                table = widened_table(part, schema, file.file.uri)
                selected = table.filter(pa.array(hold_out(table, first_row) == is_held_out[folder]))
                first_row, rows[folder] = first_row + table.num_rows, rows[folder] + selected.num_rows
                yield from selected.to_batches()

    for folder in is_held_out:
        write_parts(rows_of(folder), folder, "part", layout)
        if not rows[folder]:
            raise _too_few_rows(partitioned)
    return rows[train], rows[evaluation]


def _too_few_rows(partitioned: Partitioned) -> DataError:
    file = partitioned.files[0].file.uri
    return DataError("too few rows to hold some out for evaluation", file=file, fix="provide more rows")
