"""Writes a copy of a checkpoint in which some numbers are changed. Needs memory for one block of a tensor."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from rayrec.checkpoint.format import (
    BLOCK_BYTES,
    INDEX,
    VERSION,
    DataFile,
    Index,
    Piece,
    SavedTensor,
    data_file,
    header,
    host_bytes,
)
from rayrec.checkpoint.manifest import MANIFEST, Checkpoint, sha256
from rayrec.checkpoint.ownership import Attempt, Lease, folder_name
from rayrec.checkpoint.store import CheckpointStore

Edit = Callable[[str, slice, torch.Tensor], object]
"""Changes a block in place: (key, range of rows, `[rows, ...]`)."""


def edited(store: CheckpointStore, checkpoint: Checkpoint, edit: Edit, notify: Callable[[str], object]) -> Checkpoint:
    """Commits a changed copy of a checkpoint, at the same step, as a new attempt of its run.

    Args:
        notify: called with a line when another process may hold the checkpoints.

    Raises:
        InUseError: the run is training.
        DamagedCheckpointError, OSError: the checkpoint cannot be read, or the copy cannot be written.
    """
    with Lease(store.root, notify).take() as lease:
        attempt = Attempt.claim(store.root, lease.launch)
        folder = store.root.sub(folder_name(checkpoint.step, attempt.number))
        try:
            with store.reader(checkpoint) as reader:
                # The largest numbers first, so that all are aligned.
                saved = dict(sorted(reader.index.tensors.items(), key=lambda item: -item[1].dtype.itemsize))
                offsets = {key: (0,) * len(tensor.size) for key, tensor in saved.items()}
                names = {key: f"{key}@{','.join(map(str, offsets[key]))}" for key in saved}
                head = header((names[key], tensor.dtype, tensor.size) for key, tensor in saved.items())
                name, begin, tensors = data_file(0), len(head), {}
                with folder.create(name) as file:
                    file.write(head)
                    for key, tensor in saved.items():
                        start, checksums, block_rows = begin, [], _block_rows(tensor)
                        for row in range(0, _rows(tensor), block_rows):
                            rows = slice(row, min(row + block_rows, _rows(tensor)))
                            block = reader.tensor(key, rows)
                            edit(key, rows, block)
                            data = host_bytes(block)
                            checksums.append(zlib.crc32(data))
                            file.write(data)
                            begin += len(data)
                        piece = Piece(offsets[key], tensor.size, name, start, block_rows, tuple(checksums))
                        tensors[key] = SavedTensor(tensor.dtype, tensor.size, (piece,))
            index = Index({name: DataFile(begin, len(head), zlib.crc32(head))}, tensors, version=VERSION).to_json()
            folder.write(INDEX, index)
            attempt.check(store.root)
            manifest = replace(
                checkpoint.manifest,
                attempt=attempt.number,
                time=time.time(),
                index_size=len(index),
                index_sha256=sha256(index),
            )
            folder.write(MANIFEST, manifest.to_json())
        except BaseException:
            with suppress(OSError):
                folder.remove_all()
            raise
    return Checkpoint(folder.path, folder.name, checkpoint.step, checkpoint.extra, manifest)


def _rows(tensor: SavedTensor) -> int:
    """Rows to write; 1 for a single number, 0 for a tensor without numbers."""
    return 0 if not math.prod(tensor.size) else tensor.size[0] if tensor.size else 1


def _block_rows(tensor: SavedTensor) -> int:
    row_bytes = math.prod(tensor.size[1:]) * tensor.dtype.itemsize
    return max(1, BLOCK_BYTES // max(1, row_bytes))
