"""Takes a run back to a time before it trained on wrong data."""

from __future__ import annotations

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

    Writes a full copy of it, which is newer than the others by its attempt. Nothing is removed, so a rewind can be
    taken back by another one, until the run's `storage.keep` removes checkpoints.

    Args:
        run: a run folder; the run must not be training.
        to: seconds since 1970.

    Raises:
        TrainError: the run has no checkpoint of that time or before.
        InUseError: the run is training.
        DamagedCheckpointError: the checkpoint is damaged.
    """
    store = CheckpointStore(RunFolder(Path(run).absolute()).checkpoints)
    checkpoints, _ = store.candidates()
    chosen = max((one for one in checkpoints if one.manifest.time <= to), key=_age, default=None)
    if chosen is None:
        times = ", ".join(f"{_text(one.manifest.time)} (step {one.step})" for one in checkpoints[:-6:-1])
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


def _age(checkpoint: Checkpoint) -> tuple[float, int, int]:
    return checkpoint.manifest.time, checkpoint.manifest.attempt, checkpoint.step


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")
