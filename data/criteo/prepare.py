#!/usr/bin/env python
"""Converts Criteo's click logs to Parquet: `python data/criteo/prepare.py train.txt` or `… day_*.gz --ray`.

Download the logs under Criteo's terms; see README.md in this folder. Both published layouts have the same 40 columns:
the label, 13 counts, and 26 categories of 8 hexadecimal digits; all but the label may be empty. Kaggle's data is one
file, the 1TB data one file per day, optionally `.gz`. Files are streamed in constant memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from rayrec.data.formats.parquet_writer import Layout, write_parts
from rayrec.storage.errors import DataError
from rayrec.storage.parallel import one_by_one

NUMBERS = tuple(f"I{n}" for n in range(1, 14))
CATEGORIES = tuple(f"C{n}" for n in range(1, 27))
COLUMNS = ("label", *NUMBERS, *CATEGORIES)

_READ_BYTES = 16 << 20
_CHUNK_ROWS = 65_536


def convert(source: str | os.PathLike[str], folder: str | os.PathLike[str], layout: Layout | None = None) -> list[Path]:
    """Writes an input file to `<name>-00000.parquet` and so on, keeping the order of rows.

    Categories become int64, counts int32; empty values are null.

    Returns:
        the files; each gets its name when it is complete.

    Raises:
        DataError: a missing file, other columns, or an invalid number or category.
    """
    layout, source, folder = layout or Layout(), Path(source), Path(folder)
    written = write_parts(_batches(source), folder, source.name.split(".")[0], layout)
    if not written:
        raise DataError("the file has no rows", file=str(source), fix="check the download")
    return written


def _batches(source: Path) -> Iterator[pa.RecordBatch]:
    types = {"label": pa.int8(), **dict.fromkeys(NUMBERS, pa.int32()), **dict.fromkeys(CATEGORIES, pa.string())}
    try:
        stream = pa.input_stream(str(source), compression="detect")
        reader = pacsv.open_csv(
            stream,
            read_options=pacsv.ReadOptions(column_names=list(COLUMNS), block_size=_READ_BYTES),
            parse_options=pacsv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pacsv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
        )
        row = 0
        for batch in reader:
            yield _converted(batch, source, row)
            row += batch.num_rows
    except FileNotFoundError as error:
        raise DataError("the file does not exist", file=str(source), fix="check the path") from error
    except (pa.ArrowInvalid, OSError) as error:
        message = str(error).strip().splitlines()[0]
        fix = "use Criteo's train.txt or day_N files (40 columns, with the label)"
        raise DataError(f"not a Criteo file: {message}", file=str(source), fix=fix) from error


def _converted(batch: pa.RecordBatch, source: Path, first_row: int) -> pa.RecordBatch:
    arrays = [batch.column(name) for name in ("label", *NUMBERS)]
    arrays += [_hexadecimal(batch.column(name), name, source, first_row) for name in CATEGORIES]
    return pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS))


def _hexadecimal(texts: pa.Array, column: str, source: Path, first_row: int) -> pa.Array:
    """Converts strings of 8 hexadecimal digits to int64; nulls stay null."""
    filled = texts.fill_null("00000000")
    valid_length = pc.fill_null(pc.equal(pc.binary_length(filled), 8), False)
    invalid = np.flatnonzero(~valid_length.to_numpy(zero_copy_only=False))
    if not len(invalid):
        digits = np.frombuffer(b"".join(_data(filled)), dtype=np.uint8).reshape(-1, 8)
        values, valid = _parse(digits)
        invalid = np.flatnonzero(~valid)
    if len(invalid):
        index = int(invalid[0])
        raise DataError(
            "a category must be 8 hexadecimal digits or empty",
            file=str(source),
            row=first_row + index,
            column=column,
            value=repr(texts[index].as_py()),
            fix="use Criteo's train.txt or day_N files",
        )
    mask = texts.is_null().to_numpy(zero_copy_only=False) if texts.null_count else None
    return pa.array(values, mask=mask)


def _data(texts: pa.StringArray) -> Iterator[bytes]:
    """The concatenated bytes of a string array."""
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    yield texts.buffers()[2][int(offsets[0]) : int(offsets[-1])].to_pybytes() if len(texts) else b""


def _parse(digits: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    lower = digits | 0x20
    number, letter = (digits >= 48) & (digits <= 57), (lower >= 97) & (lower <= 102)
    nibbles = np.where(letter, lower - 87, digits - 48).astype(np.int64)
    values: npt.NDArray[np.int64] = nibbles @ (16 ** np.arange(7, -1, -1, dtype=np.int64))
    return values, np.logical_and.reduce(number | letter, axis=1)


def hold_out(files: Sequence[Path], share: float, train: Path, held: Path, layout: Layout) -> tuple[int, int]:
    """Moves files to `train`, and those with the last rows to `held`. Splits the file that has both.

    Args:
        files: files in the order of their rows.
        share: fraction of rows to hold out; each side gets at least one row.

    Returns:
        the numbers of training rows and of held-out rows.

    Raises:
        DataError: fewer than two rows.
    """
    rows = [pq.read_metadata(file).num_rows for file in files]
    total = sum(rows)
    if total < 2:
        raise DataError(f"cannot split {total} rows", file=str(files[0]), fix="provide more rows")
    first_held = total - min(max(1, round(total * share)), total - 1)
    train.mkdir(parents=True, exist_ok=True)
    held.mkdir(parents=True, exist_ok=True)
    position = 0
    for file, size in zip(files, rows, strict=True):
        if first_held <= position:
            file.rename(held / file.name)
        elif position + size <= first_held:
            file.rename(train / file.name)
        else:
            _cut(file, first_held - position, train, held, layout)
        position += size
    return first_held, total - first_held


def _cut(file: Path, rows: int, train: Path, held: Path, layout: Layout) -> None:
    for folder, start, stop in ((train, 0, rows), (held, rows, None)):
        with pq.ParquetFile(file) as parquet:
            write_parts(_between(parquet, start, stop), folder, file.stem, layout)
    file.unlink()


def _between(parquet: pq.ParquetFile, start_row: int, stop: int | None) -> Iterator[pa.RecordBatch]:
    position = 0
    for batch in parquet.iter_batches(_CHUNK_ROWS):
        begin, end = (
            max(start_row - position, 0),
            batch.num_rows if stop is None else min(stop - position, batch.num_rows),
        )
        if begin < end:
            yield batch.slice(begin, end - begin)
        position += batch.num_rows
        if stop is not None and position >= stop:
            return


def main(argv: list[str] | None = None) -> int:
    """Converts the files, then holds out the last rows for evaluation. Leaves no files after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="train.txt, or day_0 … day_23, with or without .gz")
    parser.add_argument("--out", type=Path, default=Path("data/criteo/parquet"))
    parser.add_argument("--eval-share", type=float, default=1 / 7, help="fraction of the last rows, for evaluation")
    parser.add_argument("--rows-per-file", type=int, default=4 << 20)
    parser.add_argument("--ray", action="store_true", help="convert the inputs in parallel, one Ray task each")
    args = parser.parse_args(argv)
    if not 0 < args.eval_share < 1:
        parser.error(f"--eval-share {args.eval_share} must be between 0 and 1")
    existed = args.out.exists()
    args.out.mkdir(parents=True, exist_ok=True)
    incoming = Path(tempfile.mkdtemp(prefix="_incoming-", dir=args.out.absolute()))
    try:
        train_rows, eval_rows = _prepare(args, incoming)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
        if not existed and not any(args.out.iterdir()):
            args.out.rmdir()
    print(f"{train_rows:,} training rows and {eval_rows:,} evaluation rows in {args.out}")
    return 0


def _prepare(args: argparse.Namespace, incoming: Path) -> tuple[int, int]:
    """Writes both splits; returns the numbers of training and of evaluation rows."""
    train, evaluation = (args.out.absolute() / part for part in ("train", "eval"))
    for folder in (train, evaluation):
        if any(folder.glob("*.parquet")):
            raise DataError(
                "the folder already contains data", file=str(folder), fix="remove it, or choose another --out"
            )
    layout = Layout(rows_per_file=args.rows_per_file)
    files: list[Path] = []
    work = partial(convert, folder=incoming, layout=layout)
    sources = [source.absolute() for source in args.sources]
    for source, converted in zip(sources, one_by_one(work, sources, on_ray=args.ray), strict=True):
        print(f"{source}: {len(converted)} files", flush=True)
        files += converted
    if len(set(files)) < len(files):
        raise DataError("two inputs have the same name", file=str(sources[0]), fix="rename one of them")
    return hold_out(files, args.eval_share, train, evaluation, layout)


if __name__ == "__main__":
    sys.exit(main())
