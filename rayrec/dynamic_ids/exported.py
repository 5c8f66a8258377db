"""The file of a map that evaluation elsewhere, services and C++ read.

64 bytes of header (the text `rayrec.dynamic`, padded with zero bytes to 16, then little-endian int64: version, buckets,
rows of a bucket, own rows of a bucket, clock, 0), then the identity of each row as int64. A reader hashes an id by
MurmurHash3's 64-bit finalizer h, looks for it in the first `own` rows from row `(h >> 32) · buckets >> 32` times `rows
of a bucket`, and takes the row where it is; if it is in none, the fallback row `own + ((h & (2³² - 1)) · (rows of a
bucket - own) >> 32)` of the bucket, or what else it does for unseen ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rayrec.dynamic_ids.id_map import HASHED, IdMap, find
from rayrec.dynamic_ids.layout import Layout

MAGIC, VERSION = b"rayrec.dynamic\0\0", 1


def export(whole: IdMap, path: str | Path) -> None:
    """Writes the ids of a table that have not expired."""
    layout = whole.layout
    head = np.array([VERSION, layout.buckets, layout.bucket_rows, layout.own_rows, whole.clock, 0], "<i8")
    identity = np.where(whole.used(), whole.identity, layout.empty(whole.buckets)).astype("<i8")
    Path(path).write_bytes(MAGIC + head.tobytes() + identity.tobytes())


class ExportedIds:
    """A map as it was exported; read in place, so that processes of a machine share its memory.

    Raises:
        ValueError: The file is no exported map, is of another version or is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        raw = np.memmap(path, np.uint8, "c")  # numba's loops take no read-only array; nobody writes
        head = np.frombuffer(raw[16:64].tobytes(), "<i8")
        if raw[:16].tobytes() != MAGIC:
            raise ValueError(f"{path} is not an exported map of dynamic ids: export the model again")
        if head[0] != VERSION:
            raise ValueError(
                f"{path} has version {head[0]}; this rayrec reads version {VERSION}: export the model again"
            )
        buckets, bucket_rows, own_rows, self.clock = (int(number) for number in head[1:5])
        self.layout = Layout(buckets=buckets, bucket_rows=bucket_rows, own_rows=own_rows)
        if raw.size != 64 + 8 * self.layout.rows:
            raise ValueError(f"{path} has {raw.size} bytes instead of {64 + 8 * self.layout.rows}: copy it again")
        self.identity = raw[64:].view(np.int64)

    def find(self, ids: np.ndarray, unseen: int = HASHED) -> np.ndarray:
        """As `IdMap.find`."""
        return find(ids, self.identity, self.layout, unseen=unseen)
