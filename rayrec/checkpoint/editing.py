"""Writes a copy of a checkpoint in which some numbers are changed. Needs memory for one block of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from rayrec.checkpoint.format import INDEX
from rayrec.checkpoint.manifest import MANIFEST, Checkpoint, sha256
from rayrec.checkpoint.ownership import Attempt, Lease, folder_name
from rayrec.checkpoint.store import CheckpointStore
from rayrec.checkpoint.writer import Item, write

Edit = Callable[[str, slice, torch.Tensor], object]
"""Changes a block in place: (key, range of rows, `[rows, ...]`)."""


def edited(store: CheckpointStore, checkpoint: Checkpoint, edit: Edit, notify: Callable[[str], object]) -> Checkpoint:
    """Commits a changed copy of a checkpoint, of the same step and time, as a new attempt of its run.

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
                items = [
                    Item(
                        key,
                        saved.size,
                        (0,) * len(saved.size),
                        torch.empty(saved.size, dtype=saved.dtype, device="meta"),
                    )
                    for key, saved in reader.index.tensors.items()
                ]

                def changed(item: Item, rows: slice) -> torch.Tensor:
                    block = reader.tensor(item.key, rows)
                    edit(item.key, rows, block)
                    return block

                index = write(folder, 0, items, block_of=changed).to_json()
            folder.write(INDEX, index)
            attempt.check(store.root)
            manifest = replace(
                checkpoint.manifest,
                attempt=attempt.number,
                link=None,
                index_size=len(index),
                index_sha256=sha256(index),
            )
            folder.write(MANIFEST, manifest.to_json())
        except BaseException:
            with suppress(OSError):
                folder.remove_all()
            raise
    return Checkpoint(folder.path, folder.name, checkpoint.step, checkpoint.extra, manifest)
