"""How good checkpoints are, so that the best one stays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint.errors import DamagedScoresError
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
