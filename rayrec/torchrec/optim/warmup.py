"""`torchrec.optim.warmup`: learning rate schedules by iteration, for fused and plain optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

PROGRESS = "warmup"  # key of (iteration, stage) in the state dict


class WarmupPolicy(Enum):
    """The factor of a stage as a function of the iteration i and the arguments of the stage."""

    NONE = "none"  # 1
    CONSTANT = "constant"  # value
    LINEAR = "linear"  # from value at i = 0 to 1 at max_iters
    POLY = "poly"  # (1 - i / decay_iters) ** value
    STEP = "step"  # value ** (i // decay_iters)
    INVSQRT = "inv_sqrt"  # 1 / sqrt(i)
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"  # from 1 to value in each sgdr_period
    INTERPOLATE = "interpolate"  # from value at start_interpolating_iters to end_value at max_iters


@dataclass
class WarmupStage:
    """A stage of a schedule.

    Args:
        policy: the shape.
        max_iters: last iteration of the stage, counted from the start of training.
        value: parameter of the shape; see `WarmupPolicy`.
        lr_scale: multiplier of the factor.
        decay_iters: iterations of POLY (default: max_iters) and STEP (default: 1).
        sgdr_period: iterations of one cosine (Loshchilov & Hutter 2017).
        start_interpolating_iters, end_value: start and end of INTERPOLATE.

    Raises:
        ValueError: a count below 1, a POLY that reaches zero before its stage ends, or an INTERPOLATE without start or
            end.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

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
        if self.policy is WarmupPolicy.INTERPOLATE and None in (self.start_interpolating_iters, self.end_value):
            raise ValueError("warmup stage 'interpolate': start_interpolating_iters and end_value are required")


def _linear(stage: WarmupStage, iteration: int) -> float:
    return stage.value + (1 - stage.value) * iteration / stage.max_iters


def _poly(stage: WarmupStage, iteration: int) -> float:
    remaining = 1 - iteration / (stage.decay_iters if stage.decay_iters > 0 else stage.max_iters)
    return remaining**stage.value


def _step(stage: WarmupStage, iteration: int) -> float:
    return stage.value ** (iteration // max(1, stage.decay_iters))


def _cosine(stage: WarmupStage, iteration: int) -> float:
    done = iteration % stage.sgdr_period / stage.sgdr_period
    return stage.value + (1 - stage.value) * (1 + math.cos(math.pi * done)) / 2


def _interpolate(stage: WarmupStage, iteration: int) -> float:
    assert stage.start_interpolating_iters is not None and stage.end_value is not None
    start = stage.start_interpolating_iters
    return stage.value + (stage.end_value - stage.value) * (iteration - start) / (stage.max_iters - start)


FACTORS: dict[WarmupPolicy, Callable[[WarmupStage, int], float]] = {
    WarmupPolicy.NONE: lambda stage, iteration: 1.0,
    WarmupPolicy.CONSTANT: lambda stage, iteration: stage.value,
    WarmupPolicy.LINEAR: _linear,
    WarmupPolicy.POLY: _poly,
    WarmupPolicy.STEP: _step,
    WarmupPolicy.INVSQRT: lambda stage, iteration: 1 / math.sqrt(max(1, iteration)),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: _cosine,
    WarmupPolicy.INTERPOLATE: _interpolate,
}


def factor(stages: Sequence[WarmupStage], iteration: int) -> float:
    """Returns the multiplier of the learning rate at an iteration, counted from 0; 1 after the last stage."""
    for stage in stages:
        if iteration <= stage.max_iters:
            return FACTORS[stage.policy](stage, iteration) * stage.lr_scale
    return 1.0


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of each iteration by a schedule.

    A fused optimizer updates rows in the backward pass, so the rate of an iteration is set at the end of the previous
    one. State dicts store the progress as the state of an artificial parameter.

    Args:
        optimizer: the wrapped optimizer.
        stages: the schedule, in order.
        lr: base learning rate of all param groups, which the factors multiply.
        lr_param: name of the learning rate in the param groups.
        param_name: name of the artificial parameter.

    Raises:
        ValueError: `max_iters` of the stages does not increase.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        ends = [stage.max_iters for stage in stages]
        if any(end <= previous_end for previous_end, end in pairwise(ends)):
            raise ValueError(f"max_iters of the warmup stages must increase; they are {ends}")
        self._stages, self._lr, self._lr_param, self._param_name = tuple(stages), lr, lr_param, param_name
        self._progress = torch.zeros(2, dtype=torch.int64)  # iteration, stage
        self._progress_param = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self._set(0)

    @property
    def params(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {**super().params, self._param_name: self._progress_param}

    @property
    def iteration(self) -> int:
        """Number of steps so far."""
        return int(self._progress[0])

    @property
    def state(self) -> Any:  # type: ignore[override]
        if not self.iteration:
            return self._optimizer.state
        return {**self._optimizer.state, self._progress_param: {PROGRESS: self._progress}}

    @property
    def state_names(self) -> list[str]:
        return [*super().state_names, self._param_name]

    def named_state(self) -> dict[str, dict[str, Any]]:
        progress = {self._param_name: {PROGRESS: self._progress.clone()}} if self.iteration else {}
        return {**super().named_state(), **progress}

    def _load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super()._load_named_state({name: values for name, values in state.items() if name != self._param_name})
        saved = state.get(self._param_name)
        self._progress.copy_(torch.zeros(2) if saved is None else saved[PROGRESS])

    def post_load_state_dict(self) -> None:
        """Resumes the schedule; a state without progress starts it from the beginning."""
        super().post_load_state_dict()
        self._set(self.iteration)

    def _set(self, iteration: int) -> None:
        past = sum(iteration > stage.max_iters for stage in self._stages)
        self._progress.copy_(torch.tensor([iteration, past]))
        for group in self.param_groups:
            group[self._lr_param] = self._lr * factor(self._stages, iteration)
        self.settings_changed()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._set(self.iteration + 1)
