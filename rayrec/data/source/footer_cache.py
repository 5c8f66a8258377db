"""Footers of Parquet files that were read before: a run that is started again reads only those that are new or changed.

What a footer says about a data set is `manifest.py`'s matter.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.storage.files import Found
from rayrec.data.storage.opening import open_parquet

_COLUMNS = pa.schema(
    [("uri", pa.string()), ("size_bytes", pa.int64()), ("changed_ns", pa.int64()), ("footer", pa.large_binary())]
)


@dataclass(slots=True)
class FooterCache:
    """The footers that one file holds, and those that were read since.

    A footer counts as long as its file's bytes and time of change are the same.

    Args:
        path: the file; None keeps nothing beyond this process.
    """

    path: Path | None = None
    _kept: dict[Found, bytes] = field(default_factory=dict)
    _used: dict[Found, bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> FooterCache:
        """What the file holds; nothing where it is missing or damaged."""
        try:
            with pa.OSFile(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
        except (pa.ArrowException, OSError):
            return cls(path)
        if table.schema != _COLUMNS:
            return cls(path)
        *found, footers = (column.to_pylist() for column in table.columns)
        return cls(path, {Found(*file): footer for *file, footer in zip(*found, footers, strict=True)})

    def read(self, file: Found) -> pq.FileMetaData:
        """The footer of a file; safe to call from several threads.

        Raises:
            DataError: the file is gone or is not Parquet.
        """
        if (raw := self._kept.get(file)) is not None:
            try:
                footer = pq.read_metadata(pa.BufferReader(raw))
            except (pa.ArrowException, OSError):
                pass  # damaged in a way that the file does not show: read it anew
            else:
                self._used[file] = raw
                return footer
        with open_parquet(file.uri) as parquet:
            footer = parquet.metadata
        if self.path is not None and file.changed_ns is not None:
            sink = io.BytesIO()
            footer.write_metadata_file(sink)
            self._used[file] = sink.getvalue()
        return footer

    def save(self) -> None:
        """Writes what was asked for, unless the file holds just that. A folder that cannot be written costs nothing."""
        if self.path is None or not self._used or self._used == self._kept:
            return
        rows = [(file.uri, file.size_bytes, file.changed_ns, footer) for file, footer in self._used.items()]
        columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), _COLUMNS.types, strict=True)]
        partial = self.path.with_name(f".{self.path.name}.part")
        try:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, _COLUMNS, options=options) as writer:
                writer.write_batch(pa.record_batch(columns, schema=_COLUMNS))
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
