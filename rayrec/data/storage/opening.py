"""Opens Parquet files and says what is wrong with one that does not open."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.errors import DataError
from rayrec.data.storage.formats import format_of, how_to_convert
from rayrec.data.storage.locations import open_filesystem


def open_parquet(uri: str, size_bytes: int | None = None) -> pq.ParquetFile:
    """Opens a file for reading, its footer read.

    Args:
        size_bytes: what its size must be.

    Raises:
        DataError: the file is gone, is not Parquet, or has another size than it had.
    """
    filesystem, path = open_filesystem(uri)
    try:
        source = filesystem.open_input_file(path)
        if size_bytes is not None and source.size() != size_bytes:
            raise DataError(
                f"the file changed while the run was going on: {source.size()} bytes now, {size_bytes} before",
                file=uri,
                fix="do not write to files that are being read; start the run again",
            )
        return pq.ParquetFile(source, pre_buffer=not path.startswith("/"))
    except FileNotFoundError as error:
        raise DataError("the file is gone", file=uri, fix="restore it, and check that every node sees it") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(uri, error) from error


def unreadable(uri: str, error: Exception) -> DataError:
    """The error of a file that is there but cannot be read."""
    first_line = str(error).strip().split("\n")[0]
    fix = "write the file again, or remove it" if format_of(uri) is None else how_to_convert(uri)
    return DataError(f"the file is not readable as Parquet: {first_line}", file=uri, fix=fix)
