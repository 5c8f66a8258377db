"""Which checkpoints of a folder stay: the newest, and the best."""

from __future__ import annotations

from rayrec.checkpoint.attempt import order_of
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.scores import Best, best_of
from rayrec.storage.folder import Folder


def checkpoint_names(root: Folder) -> list[str]:
    """Folders of checkpoints, complete or not, the oldest first."""
    found = [(order, name) for name in root.names() if (order := order_of(name))]
    return [name for _, name in sorted(found)]


def thin_out(root: Folder, keep: int, best: Best | None) -> None:
    """Remove all but the `keep` newest committed checkpoints and the best, and older folders that are none.

    A reader of a removed one finds its manifest gone, and says so (`reader.py`).

    Raises:
        OSError, DamagedScoresError: it is not known which is the best; nothing is removed.
    """
    names = checkpoint_names(root)
    committed = [name for name in names if MANIFEST in root.sub(name).names()]
    kept = set(committed[-max(keep, 1) :])
    if best is not None:
        kept.add(best_of(root, committed, best) or "")
    newest = order_of(committed[-1]) if committed else None
    for name in names:
        order = order_of(name)
        if name not in kept and newest is not None and order is not None and order <= newest:
            root.sub(name).remove(MANIFEST)  # no longer a checkpoint, even if removal is cut short
            root.sub(name).remove_all()


def remove_unfinished(root: Folder) -> None:
    """Remove what earlier attempts left without a manifest: it may be what fills the disk."""
    for name in checkpoint_names(root):
        if MANIFEST not in root.sub(name).names():
            root.sub(name).remove_all()
