"""A committed checkpoint, and how its manifest is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint.attempt import order_of
from rayrec.checkpoint.errors import Damage, DamagedCheckpointError
from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.storage.folder import Folder


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: its folder, a path or URI; `name`: the folder's.
        step: training steps behind it.
        extra: what the caller saved with it (JSON).
        manifest: all that is known of it without reading tensors.
    """

    path: str
    name: str
    step: int
    extra: dict[str, Any]
    manifest: Manifest


def read_checkpoint(folder: Folder) -> Checkpoint | None:
    """The checkpoint in a folder of its own; None where there is no manifest.

    Raises:
        DamagedCheckpointError: its manifest is not what was written.
        OSError: it cannot be read.
    """
    try:
        manifest = Manifest.from_json(folder.read(MANIFEST))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedCheckpointError(folder.path, [Damage(MANIFEST, str(error))]) from error
    return Checkpoint(folder.path, folder.name, manifest.step, manifest.extra, manifest)


def newer_damaged(checkpoint: Checkpoint, damaged: Iterable[DamagedCheckpointError]) -> list[DamagedCheckpointError]:
    """Those of the damaged ones that are newer than a checkpoint, the oldest first."""
    at = order_of(checkpoint.name) or (0, 0)
    found = [(order, error) for error in damaged if (order := order_of(error.name) or (0, 0)) > at]
    return [error for _, error in sorted(found, key=lambda one: one[0])]
