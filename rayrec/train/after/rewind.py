"""Takes a run back to a time before it trained on wrong data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.checkpoint.editing import edited
from rayrec.train.errors import TrainError
from rayrec.train.run.folder import RunFolder
from rayrec.train.terminal import notice


@dataclass(frozen=True, slots=True)
class Rewound:
    """The outcome of `rewind_run`.

    Args:
        before: the newest checkpoint until then.
        chosen: the newest of the time.
        checkpoint: a copy of it, which the run resumes from; None if it was the newest one.
    """

    before: Checkpoint
    chosen: Checkpoint
    checkpoint: Checkpoint | None


def rewind_run(run: str | Path, to: float) -> Rewound:
    """Makes a run resume from its newest checkpoint, or increment, that was saved at or before a time.

    Writes a full copy of it, which is newer than the others by its attempt. Nothing is removed, but what a rewind has
    discarded is not chosen by a later one: a time means what the run had learned then as it is now. Checkpoints with a
    damaged manifest, whose time is unknown, are ignored, and named on stderr.

    Args:
        run: a run folder; the run must not be training.
        to: seconds since 1970.

    Raises:
        TrainError: the run has no checkpoint of that time or before.
        InUseError: the run is training.
        DamagedCheckpointError: the checkpoint is damaged.
    """
    store = CheckpointStore(RunFolder(Path(run).absolute()).checkpoints)
    checkpoints, damaged = store.candidates()
    line = [*_present_line(checkpoints)]
    chosen = next((one for one in line if one.manifest.time <= to), None)
    for error in damaged:
        notice(f"ignored, because its time is unknown: {error}")
    if chosen is None:
        times = ", ".join(f"{_text(one.manifest.time)} (step {one.step})" for one in line[:-6:-1])
        raise TrainError(f"{run} has no checkpoint of {_text(to)} or before; it has {times or 'none'}")
    if chosen.name == checkpoints[0].name:
        return Rewound(chosen, chosen, None)
    return Rewound(checkpoints[0], chosen, edited(store, chosen, lambda *_: None, notice))


def parse_time(text: str) -> float:
    """Seconds since 1970 of `2026-11-28T21:00`, which is UTC without an offset.

    Raises:
        ValueError: it is not a time.
    """
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _present_line(checkpoints: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
    """The checkpoints that the newest one goes on from, newest first.

    The copy that a rewind writes has the time of its original. So what it discarded is older, but has a later time.
    """
    time = math.inf
    for checkpoint in checkpoints:
        if checkpoint.manifest.time <= time:
            time = checkpoint.manifest.time
            yield checkpoint


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
