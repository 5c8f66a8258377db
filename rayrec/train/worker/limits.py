"""Limits of a run: `trainer.max_steps` and `trainer.max_minutes`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rayrec.train.config.trainer import TrainerConfig

Limit = dict[str, float]  # the limit that ended a run: its field of `trainer` → its value


def planned_steps(trainer: TrainerConfig, epoch_rows: int) -> int:
    """Steps of a whole run, for schedules that are a share of it. Does not depend on ranks or on the position.

    Args:
        epoch_rows: training rows of an epoch.
    """
    steps = trainer.epochs * math.ceil(epoch_rows / trainer.batch_size)
    return steps if trainer.max_steps is None else min(steps, trainer.max_steps)


def reached(trainer: TrainerConfig, step: int, elapsed_s: float) -> Limit | None:
    """The limit that ends the run after a step.

    Args:
        step: steps of the run so far.
        elapsed_s: seconds of training so far, by rank 0's clock, so that all ranks end at the same step.
    """
    if trainer.max_steps is not None and step >= trainer.max_steps:
        return {"max_steps": trainer.max_steps}
    if trainer.max_minutes is not None and elapsed_s >= 60 * trainer.max_minutes:
        return {"max_minutes": trainer.max_minutes}
    return None


def reason(limit: Limit) -> str:
    """The limit as text, e.g. `reached trainer.max_steps: 1000`."""
    return ", ".join(f"reached trainer.{field}: {value:.15g}" for field, value in limit.items())


def is_raised(limit: Mapping[str, float] | None, trainer: TrainerConfig) -> bool:
    """Whether a run that ended at `limit` goes on with this config: the limit is larger now, or removed."""
    now = {field: getattr(trainer, field) for field in limit or {}}
    return bool(limit) and all(now[field] is None or now[field] > value for field, value in (limit or {}).items())
