"""Criteo's click logs, tab-separated, to Parquet: streamed, in constant memory, one file at a time.

Both published layouts have the same 40 columns: the label, 13 counts, 26 categories as 8 hexadecimal digits, any but
the label empty. Kaggle's is one file, the 1TB set one file a day; `.gz` is read as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from rayrec.data.errors import DataError
from rayrec.data.tools.parquet_parts import Layout, write_parts

NUMBERS = tuple(f"I{n}" for n in range(1, 14))
CATEGORIES = tuple(f"C{n}" for n in range(1, 27))
COLUMNS = ("label", *NUMBERS, *CATEGORIES)

_READ_BYTES = 16 << 20


def convert(source: str | os.PathLike[str], folder: str | os.PathLike[str], layout: Layout | None = None) -> list[Path]:
    """Writes one input file as `<its name>-00000.parquet` and so on, rows in their order.

    Categories become integers (a null where they are empty), counts int32.

    Returns:
        the files; each appears under its name only when it is whole.

    Raises:
        DataError: a file that is missing, has other columns, or holds something that is no number or category.
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
        fix = "give Criteo's train.txt or day_N files (40 columns, with the label)"
        raise DataError(f"not a Criteo file: {message}", file=str(source), fix=fix) from error


def _converted(batch: pa.RecordBatch, source: Path, first_row: int) -> pa.RecordBatch:
    arrays = [batch.column(name) for name in ("label", *NUMBERS)]
    arrays += [_hexadecimal(batch.column(name), name, source, first_row) for name in CATEGORIES]
    return pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS))


def _hexadecimal(texts: pa.Array, column: str, source: Path, first_row: int) -> pa.Array:
    """Strings of 8 hexadecimal digits as int64, nulls kept."""
    filled = texts.fill_null("00000000")
    right = pc.fill_null(pc.equal(pc.binary_length(filled), 8), False)
    wrong = np.flatnonzero(~right.to_numpy(zero_copy_only=False))
    if not len(wrong):
        digits = np.frombuffer(b"".join(_data(filled)), dtype=np.uint8).reshape(-1, 8)
        values, valid = _parse(digits)
        wrong = np.flatnonzero(~valid)
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            "a category must be 8 hexadecimal digits or empty",
            file=str(source),
            row=first_row + at,
            column=column,
            value=repr(texts[at].as_py()),
            fix="give Criteo's train.txt or day_N files",
        )
    mask = texts.is_null().to_numpy(zero_copy_only=False) if texts.null_count else None
    return pa.array(values, mask=mask)


def _data(texts: pa.StringArray) -> Iterator[bytes]:
    """The bytes of all strings of a string array, one after the other."""
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    yield texts.buffers()[2][int(offsets[0]) : int(offsets[-1])].to_pybytes() if len(texts) else b""


def _parse(digits: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    lower = digits | 0x20
    number, letter = (digits >= 48) & (digits <= 57), (lower >= 97) & (lower <= 102)
    nibbles = np.where(letter, lower - 87, digits - 48).astype(np.int64)
    values: npt.NDArray[np.int64] = nibbles @ (16 ** np.arange(7, -1, -1, dtype=np.int64))
    return values, np.logical_and.reduce(number | letter, axis=1)
