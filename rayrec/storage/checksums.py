"""CRC-32 of files."""

from __future__ import annotations

import zlib
from pathlib import Path

_CHUNK_BYTES = 16 << 20


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
