"""Learning rates that follow a schedule by iteration, for fused and plain optimizers alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

ITERATION = "warmup_iteration"  # kept in the param groups, and so in every state dict
FIRST_RATE = "initial_lr"  # as torch's schedulers name it


class WarmupPolicy(Enum):
    """How a stage's factor depends on the iteration i; `value`, `max_iters`, … are the stage's."""

    NONE = "none"  # 1
    CONSTANT = "constant"  # value
    LINEAR = "linear"  # from value at i = 0 to 1 at max_iters
    POLY = "poly"  # (1 - i / decay_iters) ** value
    STEP = "step"  # value ** (i // decay_iters)
    INVSQRT = "inv_sqrt"  # 1 / sqrt(i)
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"  # from 1 to value in each sgdr_period


@dataclass(frozen=True, kw_only=True)
class WarmupStage:
    """A part of a schedule.

    Args:
        policy: the shape.
        max_iters: last iteration of the stage, counted from the start of training.
        value: the shape's parameter, see `WarmupPolicy`.
        lr_scale: multiplies the stage's factor.
        decay_iters: of POLY (default: max_iters) and STEP (default: 1).
        sgdr_period: iterations of one cosine (Loshchilov & Hutter 2017).

    Raises:
        ValueError: a count that is not positive, or a POLY that would pass zero before its stage ends.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1

    def __post_init__(self) -> None:
        if self.max_iters < 1:
            raise ValueError(f"warmup stage {self.policy.value!r}: max_iters={self.max_iters} must be at least 1")
        if self.sgdr_period < 1:
            raise ValueError(f"warmup stage {self.policy.value!r}: sgdr_period={self.sgdr_period} must be at least 1")
        if self.policy is WarmupPolicy.POLY and 0 < self.decay_iters < self.max_iters:
            raise ValueError(
                f"warmup stage 'poly': decay_iters={self.decay_iters} ends before max_iters={self.max_iters}; "
                "make it at least as large"
            )


def _linear(stage: WarmupStage, iteration: int) -> float:
    return stage.value + (1 - stage.value) * iteration / stage.max_iters


def _poly(stage: WarmupStage, iteration: int) -> float:
    left = 1 - iteration / (stage.decay_iters if stage.decay_iters > 0 else stage.max_iters)
    return left**stage.value


def _step(stage: WarmupStage, iteration: int) -> float:
    return stage.value ** (iteration // max(1, stage.decay_iters))


def _cosine(stage: WarmupStage, iteration: int) -> float:
    done = iteration % stage.sgdr_period / stage.sgdr_period
    return stage.value + (1 - stage.value) * (1 + math.cos(math.pi * done)) / 2


FACTORS: dict[WarmupPolicy, Callable[[WarmupStage, int], float]] = {
    WarmupPolicy.NONE: lambda stage, iteration: 1.0,
    WarmupPolicy.CONSTANT: lambda stage, iteration: stage.value,
    WarmupPolicy.LINEAR: _linear,
    WarmupPolicy.POLY: _poly,
    WarmupPolicy.STEP: _step,
    WarmupPolicy.INVSQRT: lambda stage, iteration: 1 / math.sqrt(max(1, iteration)),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: _cosine,
}


def factor(stages: Sequence[WarmupStage], iteration: int) -> float:
    """What the first learning rate is multiplied by at an iteration, counted from 0; 1 after the last stage."""
    for stage in stages:
        if iteration <= stage.max_iters:
            return FACTORS[stage.policy](stage, iteration) * stage.lr_scale
    return 1.0


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of every iteration by a schedule.

    A fused optimizer updates rows inside backward, so the rate of an iteration is set before it begins.

    Args:
        optimizer: whose rates are set.
        stages: the schedule, in order.
        lr: rate that the factors multiply; each param group's own by default.
        lr_param: name of the rate in the param groups.

    Raises:
        ValueError: a stage that ends before the one ahead of it.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float | None = None,
        lr_param: str = "lr",
    ) -> None:
        super().__init__(optimizer)
        ends = [stage.max_iters for stage in stages]
        if any(after <= before for before, after in zip(ends, ends[1:], strict=False)):
            raise ValueError(f"warmup stages must end one after the other; max_iters are {ends}")
        self._stages = tuple(stages)
        self._lr_param = lr_param
        for group in self.param_groups:
            group[FIRST_RATE] = group[lr_param] if lr is None else lr
        self._set(0)

    @property
    def iteration(self) -> int:
        """Steps taken so far."""
        return self._iteration

    def _set(self, iteration: int) -> None:
        self._iteration = iteration
        multiplier = factor(self._stages, iteration)
        for group in self.param_groups:
            group[ITERATION] = iteration
            group[self._lr_param] = group[FIRST_RATE] * multiplier
        self.settings_changed()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._set(self._iteration + 1)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the schedule where it was saved; one saved without a schedule starts at its beginning."""
        super().load_state_dict(state_dict)
        saved = state_dict["param_groups"]
        self._set(saved[0].get(ITERATION, 0) if saved else 0)
