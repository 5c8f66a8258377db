"""Which checkpoint of a run a command reads: the newest, the newest that is whole, the best, or that of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayrec.checkpoint import Best, Checkpoint, CheckpointStore, DamagedCheckpointError, newer_damaged, no_whole
from rayrec.checkpoint.ownership import order_of
from rayrec.checkpoint.retention import best_of, read_scores
from rayrec.train.config.difference import value_at
from rayrec.train.config.trainer import lower_is_better
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.run.folder import RunFolder

NEWEST, WHOLE, BEST = "newest", "whole", "best"
Tell = Callable[[str], object]


def best_by(metric: str | None, own: Sequence[Mapping[str, Any]] = ()) -> Best | None:
    """`storage.keep_best` as the store takes it; `own` are the plain values of `trainer.metrics`."""
    return None if metric is None else Best(metric, larger=not lower_is_better(metric, own))


def choose(folder: RunFolder, which: str = NEWEST, tell: Tell = lambda text: None) -> Checkpoint:
    """The checkpoint of a run that `which` means.

    Args:
        which: "newest", "whole" (the newest without damage: all of it is read to know), "best" by the run's
            `storage.keep_best`, or a step.
        tell: called with each newer one that "whole" passes over.

    Raises:
        TrainError: there is none such, or no score (names those that there are); its manifest is damaged.
        NoWholeCheckpointError: the manifests of all are damaged; with "whole", all are damaged somewhere.
        StorageError: the checkpoints cannot be read.
    """
    if which not in (NEWEST, WHOLE, BEST) and not which.isdecimal():
        raise TrainError(f"--checkpoint {which}: give newest, whole, best, or the number of a step")
    store = CheckpointStore(folder.checkpoints)
    try:
        whole, damaged = store.listing()
        if not whole and not damaged:
            raise TrainError(f"{folder.path} has no complete checkpoint yet; train it first")
        if which == BEST:
            return _best(folder, store, whole, damaged)
        if which == WHOLE:
            return _undamaged(store, whole, damaged, tell)
        if which != NEWEST:
            return _of_step(folder, int(which), whole, damaged)
        if not whole:
            raise no_whole(store.root.path, damaged)
        if newer := newer_damaged(whole[-1], damaged):
            raise newer[-1]
        return whole[-1]
    except DamagedCheckpointError as error:
        raise refused(error) from error
    except OSError as error:
        raise StorageError(
            f"{error.filename or folder.checkpoints} cannot be read: {error.strerror or error}"
        ) from error


def refused(error: DamagedCheckpointError) -> TrainError:
    """What a command says that was to read a damaged checkpoint; only training goes on from an older one by itself."""
    return TrainError(f"{error}; an older one is read with --checkpoint whole (the newest without damage) or its step")


def _undamaged(
    store: CheckpointStore, whole: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpointError], tell: Tell
) -> Checkpoint:
    damaged = list(damaged)
    for found in reversed(whole):
        if damages := store.damages(found):
            damaged.append(DamagedCheckpointError(found.path, damages))
            continue
        for newer in newer_damaged(found, damaged):
            tell(f"{newer}; read instead: step {found.step}")
        return found
    raise no_whole(store.root.path, damaged)


def _best(
    folder: RunFolder, store: CheckpointStore, whole: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpointError]
) -> Checkpoint:
    config = folder.read_config()
    metric = value_at(config, "storage.keep_best")
    best = best_by(metric, value_at(config, "trainer.metrics") or ())
    if best is None:
        raise TrainError(
            f"--checkpoint best: {folder.path} was trained without storage.keep_best, so no checkpoint has a score; "
            f"give newest or a step ({_steps(whole)})"
        )
    errors = {error.name: error for error in damaged}
    found = {checkpoint.name: checkpoint for checkpoint in whole}
    name = best_of(store.root, [*found, *errors], best)
    if name is None:
        raise TrainError(
            f"--checkpoint best: no checkpoint of {folder.path} has a score of storage.keep_best={metric} yet; give "
            f"newest or a step ({_steps(whole)})"
        )
    if name in errors:
        raise errors[name]
    return found[name]


def best_so_far(folder: RunFolder) -> dict[str, Any] | None:
    """`metric`, `value`, `step` and `checkpoint` of the best one; None where none is kept or it cannot be read."""
    metric = value_at(folder.read_config(), "storage.keep_best")
    if metric is None:
        return None
    try:
        found = choose(folder, BEST)
        value = read_scores(CheckpointStore(folder.checkpoints).root)[found.name][metric]
    except (ValueError, OSError, KeyError):
        return None
    return {"metric": metric, "value": value, "step": found.step, "checkpoint": found.path}


def _of_step(
    folder: RunFolder, step: int, whole: Sequence[Checkpoint], damaged: Sequence[DamagedCheckpointError]
) -> Checkpoint:
    """The newest one of this step: an attempt that began anew may have come to it again."""
    every: dict[str, Checkpoint | DamagedCheckpointError] = {one.name: one for one in whole}
    every |= {error.name: error for error in damaged}
    names = sorted((name for name in every if _order(name)[1] == step), key=_order)
    if not names:
        raise TrainError(f"--checkpoint {step}: {folder.path} has no checkpoint of that step; it has {_steps(whole)}")
    found = every[names[-1]]
    if isinstance(found, DamagedCheckpointError):
        raise found
    return found


def _steps(whole: Sequence[Checkpoint]) -> str:
    steps = sorted({checkpoint.step for checkpoint in whole})
    return "none that is whole" if not steps else ", ".join(map(str, steps))


def _order(name: str) -> tuple[int, int]:
    return order_of(name) or (0, 0)
