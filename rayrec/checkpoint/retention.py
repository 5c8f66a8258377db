"""Which checkpoints of a folder stay: the newest, and the best by the scores that were noted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint.attempt import order_of
from rayrec.checkpoint.errors import DamagedScoresError
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.storage.folder import Folder

_FILE = "scores.json"


@dataclass(frozen=True, slots=True)
class Best:
    """A metric by which the best checkpoint is kept.

    Args:
        larger: whether more of it is better.
    """

    metric: str
    larger: bool


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


def note_scores(root: Folder, name: str, scores: Mapping[str, Any]) -> None:
    """Keep the scores of the checkpoint in folder `name`; one process of a run calls it."""
    numbers = {key: value for key, value in scores.items() if isinstance(value, int | float)}
    there = set(root.names())
    earlier = {name: of for name, of in read_scores(root).items() if name in there}
    root.write(_FILE, json.dumps({**earlier, name: numbers}).encode())


def read_scores(root: Folder) -> dict[str, dict[str, float]]:
    """Scores by folder name; nothing where none were noted.

    Raises:
        DamagedScoresError: the file is not what was written.
        OSError: it cannot be read.
    """
    try:
        raw = json.loads(root.read(_FILE))
    except FileNotFoundError:
        return {}
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise DamagedScoresError(
            f"{root.path}/{_FILE} is not what was written, so it is not known which checkpoint is the best and none is "
            f"removed; remove the file to begin anew with the next evaluation"
        )
    return raw


def best_of(root: Folder, names: Iterable[str], best: Best) -> str | None:
    """The best of some checkpoints' folders, the earliest of equally good ones; None where none has the metric."""
    scores = read_scores(root)
    found = [(scores[name][best.metric], name) for name in names if best.metric in scores.get(name, {})]
    finite = [(value if best.larger else -value, name) for value, name in found if math.isfinite(value)]
    return max(finite, key=lambda one: one[0])[1] if finite else None
