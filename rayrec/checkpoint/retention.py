"""Retention of checkpoints: keeps the newest ones, and the best ones by recorded metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint.errors import DamagedScoresError
from rayrec.checkpoint.manifest import MANIFEST
from rayrec.checkpoint.ownership import SHOWN_WITHIN_S, base_of, order_of
from rayrec.storage.folder import Folder

_FILE = "scores.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The metric that selects the best checkpoints.

    Args:
        larger: whether a larger value is better.
        count: number of best checkpoints to keep.
    """

    metric: str
    larger: bool
    count: int = 1


def checkpoint_names(root: Folder) -> list[str]:
    """Folders of checkpoints, complete or not, oldest first."""
    folders = [(order, name) for name in root.names() if (order := order_of(name))]
    return [name for _, name in sorted(folders)]


def remove_old(root: Folder, keep: int, best: Best | None, held: Collection[str] = ()) -> None:
    """Remove all but the `keep` newest full checkpoints, the best ones and `held`, and unfinished older folders.

    Increments stay and go with the full checkpoint at the start of their chain; the chain of the newest checkpoint
    stays, also if a full checkpoint that its attempt did not resume from has a later step. A process that reads a
    removed checkpoint raises `RemovedCheckpointError` (`reader.py`).

    Raises:
        OSError, DamagedScoresError: the best checkpoints cannot be determined; nothing is removed.
    """
    names = checkpoint_names(root)
    committed = [name for name in names if _is_committed(root.sub(name))]
    full = [name for name in committed if base_of(name) == name]
    keep_names = {*held, *full[-max(keep, 1) :], *committed[-1:]}
    if best is not None:
        keep_names.update(_ranked(root, committed, best)[: best.count])
    older = names[: names.index(committed[-1])] if committed else []
    recent = _recent(root, set(older).difference(committed))
    keep_bases = {base_of(name) for name in keep_names}
    for name in reversed(older):  # an increment before those that it needs
        unfinished = name != base_of(name) and name not in committed
        if (unfinished or base_of(name) not in keep_bases) and name not in recent:
            root.sub(name).remove(MANIFEST)  # no longer a checkpoint, even if the removal is interrupted
            root.sub(name).remove_all()


def remove_unfinished(root: Folder) -> None:
    """Remove folders of earlier attempts without a manifest: they may fill the disk.

    Folders of the last minute are left to `remove_old`.
    """
    unfinished = [name for name in checkpoint_names(root) if not _is_committed(root.sub(name))]
    for name in set(unfinished) - _recent(root, unfinished):
        root.sub(name).remove_all()


def _is_committed(folder: Folder) -> bool:
    """Whether a checkpoint has a manifest. Opens the file: an NFS client may list a folder as it was a minute ago."""
    try:
        with folder.open(MANIFEST):
            return True
    except FileNotFoundError:
        return False


def _recent(root: Folder, unfinished: Collection[str]) -> set[str]:
    """Those of the folders that changed so recently that an NFS client may not see their manifests yet.

    The time now is that of the newest file in `root`, where the owner writes every few seconds: the clock of this
    machine may differ from the clock of the file system.
    """
    if not unfinished:
        return set()
    changes = {entry: changed for entry in root.names() if (changed := root.changed_at(entry)) is not None}
    now = max(changes.values(), default=0.0)
    return {name for name in unfinished if name in changes and changes[name] > now - SHOWN_WITHIN_S}


def note_scores(root: Folder, name: str, scores: Mapping[str, Any]) -> None:
    """Record the metrics of the checkpoint in folder `name`. Call from one process of a run only."""
    numbers = {key: value for key, value in scores.items() if isinstance(value, int | float)}
    existing = set(root.names())
    earlier = {folder: metrics for folder, metrics in read_scores(root).items() if folder in existing}
    root.write(_FILE, json.dumps({**earlier, name: numbers}).encode())


def read_scores(root: Folder) -> dict[str, dict[str, float]]:
    """Recorded metrics by folder name.

    Raises:
        DamagedScoresError: the file was changed.
        OSError: the file cannot be read.
    """
    try:
        raw = json.loads(root.read(_FILE))
    except FileNotFoundError:
        return {}
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        raise DamagedScoresError(
            f"{root.path}/{_FILE} is damaged, so the best checkpoint is unknown and none is removed. Delete the file "
            f"to start over with the next evaluation."
        )
    return raw


def best_of(root: Folder, names: Iterable[str], best: Best) -> str | None:
    """The folder of the best checkpoint, the earliest on a tie; None if no checkpoint has the metric."""
    return next(iter(_ranked(root, names, best)), None)


def _ranked(root: Folder, names: Iterable[str], best: Best) -> list[str]:
    """The folders of checkpoints with the metric, best first, in their order on a tie."""
    scores = read_scores(root)
    values = [(scores[name][best.metric], name) for name in names if best.metric in scores.get(name, {})]
    finite = [(value if best.larger else -value, name) for value, name in values if math.isfinite(value)]
    return [name for _, name in sorted(finite, key=lambda pair: pair[0], reverse=True)]
