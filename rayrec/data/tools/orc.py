"""Reads ORC files as a stream of Arrow batches, a stripe at a time, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.orc as paorc

from rayrec.data.errors import DataError
from rayrec.data.storage.locations import open_filesystem


@dataclass(frozen=True, slots=True)
class Orc:
    """ORC files."""

    def schema(self, uri: str) -> pa.Schema:
        """The file's own."""
        return _open(uri).schema

    def batches(self, uri: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """All rows; a column that the file lacks is null.

        Raises:
            DataError: a stripe that cannot be decoded, or a value that does not fit its column's type.
        """
        file = _open(uri)
        for number in range(file.nstripes):
            try:
                stripe = file.read_stripe(number)
                arrays = [
                    stripe.column(name).cast(kind) if name in stripe.schema.names else pa.nulls(stripe.num_rows, kind)
                    for name, kind in zip(schema.names, schema.types, strict=True)
                ]
            except (pa.ArrowException, OSError) as error:
                text = str(error).splitlines()[0]
                raise DataError(f"stripe {number} is not readable: {text}", file=uri, fix="write it again") from error
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _open(uri: str) -> paorc.ORCFile:
    filesystem, path = open_filesystem(uri)
    try:
        return paorc.ORCFile(filesystem.open_input_file(path))
    except (pa.ArrowException, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"the file is not readable as ORC: {text}", file=uri, fix="write the file again") from error
