"""The file format of an exported map, which services and C++ programs read.

The file has a header of 64 bytes, then the id of each row as a little-endian int64:

| bytes | content |
|---|---|
| 0 to 16 | the text `rayrec.dynamic`, padded with zero bytes |
| 16 to 64 | int64 each: version, buckets, rows per bucket, own rows per bucket, clock, 0 |

To find the row of an id, a reader

1. computes `h`, MurmurHash3's 64-bit finalizer of the id;
2. computes the first row of the id's bucket: `((h >> 32) * buckets >> 32) * rows per bucket`;
3. compares the id with the own rows of the bucket, which come first, and returns the row with an equal id;
4. otherwise returns the fallback row, `own rows + ((h & 0xFFFFFFFF) * (rows per bucket - own rows) >> 32)` rows after
   the bucket's first row, or handles the unseen id in another way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayrec.dynamic_ids.id_map import IdMap, find, hints_of
from rayrec.dynamic_ids.layout import HASHED, Layout

MAGIC, VERSION = b"rayrec.dynamic\0\0", 1


def export(whole: IdMap, path: str | Path) -> None:
    """Writes the ids of a whole table. Expired ids are left out."""
    layout = whole.layout
    head = np.array([VERSION, layout.buckets, layout.bucket_rows, layout.own_rows, whole.clock, 0], "<i8")
    identity = np.where(whole.used(), whole.identity, layout.empty(whole.buckets)).astype("<i8")
    Path(path).write_bytes(MAGIC + head.tobytes() + identity.tobytes())


class ExportedIds:
    """An exported map. The file is mapped into memory, so all processes of a machine share it.

    Raises:
        ValueError: The file is not an exported map, has another version, or is incomplete.
    """

    def __init__(self, path: str | Path) -> None:
        # Mode "c", because numba's loops do not accept read-only arrays. Nothing is written.
        raw = np.memmap(path, np.uint8, "c")
        head = np.frombuffer(raw[16:64].tobytes(), "<i8")
        if raw[:16].tobytes() != MAGIC:
            raise ValueError(f"{path} is not an exported map of dynamic ids: export the model again")
        if head[0] != VERSION:
            raise ValueError(
                f"{path} has version {head[0]}; this rayrec reads version {VERSION}: export the model again"
            )
        buckets, bucket_rows, own_rows, self.clock = (int(number) for number in head[1:5])
        # A search does not check the rows that it reads, so a header must not lead it outside the file.
        if not (0 < buckets < 1 << 32 and 0 <= own_rows < bucket_rows < 1 << 16):
            raise ValueError(f"{path} is damaged: copy it again")
        self.layout = Layout(buckets=buckets, bucket_rows=bucket_rows, own_rows=own_rows)
        if raw.size != 64 + 8 * self.layout.rows:
            raise ValueError(f"{path} has {raw.size} bytes instead of {64 + 8 * self.layout.rows}: copy it again")
        self.identity = raw[64:].view(np.int64)
        self._hints = hints_of(min(self.layout.rows, 1 << 16))  # each process has its own, for the ids in demand

    def find(self, ids: np.ndarray, unseen: int = HASHED) -> np.ndarray:
        """As `IdMap.find`."""
        return find(ids, self.identity, self.layout, self._hints, unseen=unseen)
