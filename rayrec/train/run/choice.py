"""Selects the checkpoint that a command reads: newest, newest undamaged, best, or of a given step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayrec.checkpoint import Best, Checkpoint, CheckpointStore, DamagedCheckpointError, newer_damaged, no_whole
from rayrec.checkpoint.config import StorageConfig
from rayrec.checkpoint.ownership import order_of
from rayrec.checkpoint.retention import read_scores
from rayrec.checkpoint.store import Listing
from rayrec.train.config.difference import value_at
from rayrec.train.config.trainer import lower_is_better
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.run.folder import RunFolder

NEWEST, WHOLE, BEST = "newest", "whole", "best"
Tell = Callable[[str], object]


def best_metric(config: Mapping[str, Any] | None) -> Best | None:
    """`storage.keep_best` as the checkpoint store takes it; None if the run keeps no best checkpoint.

    Args:
        config: plain values as in the YAML file, maybe of an older version; None if the run has no config yet.
    """
    value = value_at(config, "storage.keep_best")
    if value is None:
        return None
    keep = StorageConfig(keep_best=value).keep_best
    assert keep is not None
    larger = not lower_is_better(keep.metric, value_at(config, "trainer.metrics") or ())
    return Best(keep.metric, larger, keep.count)


def choose(folder: RunFolder, which: str = NEWEST, tell: Tell = lambda text: None) -> Checkpoint:
    """Select a checkpoint of a run.

    Args:
        which: "newest", "whole" (the newest undamaged one; reads each candidate completely), "best" by the run's
            `storage.keep_best`, or a step number.
        tell: called with a message for each newer checkpoint that "whole" skips.

    Raises:
        TrainError: the checkpoint or its score is missing (the message lists the available steps), or its manifest is
            damaged.
        NoWholeCheckpointError: all manifests are damaged; with "whole", all checkpoints are damaged.
        StorageError: the checkpoints cannot be read.
    """
    if which not in (NEWEST, WHOLE, BEST) and not which.isdecimal():
        raise TrainError(f"--checkpoint {which}: give newest, whole, best, or the number of a step")
    try:
        best = best_metric(folder.read_config()) if which == BEST else None
        store = CheckpointStore(folder.checkpoints, best=best)
        readable, damaged = listed = store.listing()
        if not readable and not damaged:
            raise TrainError(f"{folder.path} has no complete checkpoint yet; train it first")
        if which == BEST:
            return _best(folder, store, best, listed)
        if which == WHOLE:
            return _undamaged(store, readable, damaged, tell)
        if which != NEWEST:
            return _of_step(folder, int(which), readable, damaged)
        if not readable:
            raise no_whole(store.root.path, damaged)
        if newer := newer_damaged(readable[-1], damaged):
            raise newer[-1]
        return readable[-1]
    except DamagedCheckpointError as error:
        raise refused(error) from error
    except OSError as error:
        raise StorageError(
            f"{error.filename or folder.checkpoints} cannot be read: {error.strerror or error}"
        ) from error


def refused(error: DamagedCheckpointError) -> TrainError:
    """The error of a command for a damaged checkpoint. Only training falls back to an older one automatically."""
    return TrainError(
        f"{error}; to read an older one, use --checkpoint whole (the newest undamaged one) or --checkpoint STEP"
    )


def _undamaged(
    store: CheckpointStore, readable: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpointError], tell: Tell
) -> Checkpoint:
    damaged = list(damaged)
    for checkpoint in reversed(readable):
        if damages := store.damages(checkpoint):
            damaged.append(DamagedCheckpointError(checkpoint.path, damages))
            continue
        for newer in newer_damaged(checkpoint, damaged):
            tell(f"{newer}; read instead: step {checkpoint.step}")
        return checkpoint
    raise no_whole(store.root.path, damaged)


def _best(folder: RunFolder, store: CheckpointStore, best: Best | None, listed: Listing) -> Checkpoint:
    if best is None:
        raise TrainError(
            f"--checkpoint best: {folder.path} was trained without storage.keep_best, so no checkpoint has a score; "
            f"give newest or a step ({_steps(listed[0])})"
        )
    checkpoint = store.best(listed)
    if checkpoint is None:
        raise TrainError(
            f"--checkpoint best: no checkpoint of {folder.path} has a score of storage.keep_best={best.metric} yet; "
            f"give newest or a step ({_steps(listed[0])})"
        )
    return checkpoint


def best_so_far(folder: RunFolder) -> dict[str, Any] | None:
    """`metric`, `value`, `step` and `checkpoint` of the best checkpoint; None if missing or unreadable."""
    best = best_metric(folder.read_config())
    if best is None:
        return None
    try:
        checkpoint = choose(folder, BEST)
        value = read_scores(CheckpointStore(folder.checkpoints).root)[checkpoint.name][best.metric]
    except (ValueError, OSError, KeyError):
        return None
    return {"metric": best.metric, "value": value, "step": checkpoint.step, "checkpoint": checkpoint.path}


def _of_step(
    folder: RunFolder, step: int, readable: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpointError]
) -> Checkpoint:
    """The newest checkpoint of this step; a later attempt may have reached the same step again."""
    by_name: dict[str, Checkpoint | DamagedCheckpointError] = {item.name: item for item in readable}
    by_name |= {error.name: error for error in damaged}
    names = sorted((name for name in by_name if _order(name)[1] == step), key=_order)
    if not names:
        raise TrainError(
            f"--checkpoint {step}: {folder.path} has no checkpoint of that step; it has {_steps(readable)}"
        )
    newest = by_name[names[-1]]
    if isinstance(newest, DamagedCheckpointError):
        raise newest
    return newest


def _steps(readable: Sequence[Checkpoint]) -> str:
    steps = sorted({checkpoint.step for checkpoint in readable})
    return "no undamaged one" if not steps else ", ".join(map(str, steps))


def _order(name: str) -> tuple[int, int]:
    return order_of(name) or (0, 0)
