"""Learning rates over the steps."""

from __future__ import annotations

import math

from rayrec.train.config.optimizers import ScheduleConfig


def factor(schedule: ScheduleConfig, step: int) -> float:
    """What the learning rate is multiplied with in a step, counted from 0.

    The warm-up's last step has the factor 1; a decay's first step after its length has `end`.
    """
    if step < schedule.warmup_steps:
        done = (step + 1) / schedule.warmup_steps
        return schedule.warmup_from + (1 - schedule.warmup_from) * done
    since = step - max(schedule.decay_from, schedule.warmup_steps)
    if schedule.kind == "constant" or schedule.decay_steps is None or since < 0:
        return 1.0
    if schedule.kind == "step":
        return float(schedule.gamma ** (since // schedule.decay_steps))
    left = 1 - min(1.0, since / schedule.decay_steps)
    shape = {
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
        "polynomial": left**schedule.power,
    }[schedule.kind]
    return float(schedule.end + (1 - schedule.end) * shape)
