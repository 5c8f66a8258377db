"""Formulas of the optimizers in tensor operations, equal to fbgemm's fused kernels, for any device.

Shapes: R rows of the table, n touched rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.optimizer_rules import RULES, DecayMode
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec

State = dict[str, torch.Tensor]
# Bits of a float32's mantissa that the format drops.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class Step:
    """One update of the touched rows."""

    rows: torch.Tensor  # int64 [n]
    weight_nD: torch.Tensor  # float32
    grad_nD: torch.Tensor  # float32, the mean over the global batch
    state: State  # [R] or [R, D], float32
    spec: OptimizerSpec
    lr: float
    count: int  # updates, including this one


def sgd(step: Step) -> torch.Tensor:
    """w -= lr g."""
    return step.weight_nD - step.lr * step.grad_nD


def adagrad(step: Step, rowwise: bool = False) -> torch.Tensor:
    """Duchi et al. 2011: s += g²; w -= lr g / (√s + eps). Row-wise: one s per row, of the mean of g²."""
    square = step.grad_nD.square().mean(1) if rowwise else step.grad_nD.square()
    total = step.state["momentum1"][step.rows] + square
    step.state["momentum1"][step.rows] = total
    root = total.sqrt() + step.spec.eps
    return step.weight_nD - step.lr * step.grad_nD / (root[:, None] if rowwise else root)


def _adam_direction(step: Step, rowwise: bool) -> torch.Tensor:
    spec, rows, grad = step.spec, step.rows, step.grad_nD
    moment = spec.beta1 * step.state["momentum1"][rows] + (1 - spec.beta1) * grad
    square = grad.square().mean(1) if rowwise else grad.square()
    second = spec.beta2 * step.state["exp_avg_sq"][rows] + (1 - spec.beta2) * square
    step.state["momentum1"][rows] = moment
    step.state["exp_avg_sq"][rows] = second
    scale = (second / (1 - spec.beta2**step.count)).sqrt() + spec.eps
    return moment / (1 - spec.beta1**step.count) / (scale[:, None] if rowwise else scale)


def adam(step: Step, rowwise: bool = False) -> torch.Tensor:
    """Kingma & Ba 2015, on touched rows only. Row-wise: one second moment per row."""
    return step.weight_nD - step.lr * _adam_direction(step, rowwise)


def lamb(step: Step, rowwise: bool = False) -> torch.Tensor:
    """You et al. 2020 with one trust ratio per row, as in fbgemm; weight decay is part of the direction. Row-wise: one
    second moment per row."""
    direction = _adam_direction(step, rowwise) + step.spec.weight_decay * step.weight_nD
    ratio = _ratio(step.weight_nD.norm(dim=1), direction.norm(dim=1))
    return step.weight_nD - step.lr * ratio[:, None] * direction


def _ratio(size: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`size / other`, or 0 for an `other` of 0: a row is not changed if its gradients cancel."""
    return torch.where(other > 0, size / other, 0)


def lars_sgd(step: Step) -> torch.Tensor:
    """You et al. 2017 with one rate per row instead of per layer, as in fbgemm; weight decay is part of the rate."""
    spec, weight, grad = step.spec, step.weight_nD, step.grad_nD
    norm_w, norm_g = weight.norm(dim=1), grad.norm(dim=1)
    rate = step.lr * spec.eta * _ratio(norm_w, norm_g + spec.weight_decay * norm_w)
    moved = spec.momentum * step.state["momentum1"][step.rows]
    moved = moved + rate[:, None] * (grad + spec.weight_decay * weight)
    step.state["momentum1"][step.rows] = moved
    return weight - moved


# Each formula changes the state in place and returns the new rows [n, D].
_FORMULAS: dict[EmbOptimType, Callable[[Step], torch.Tensor]] = {
    RULES["sgd"].kind: sgd,
    RULES["adagrad"].kind: adagrad,
    RULES["rowwise_adagrad"].kind: partial(adagrad, rowwise=True),
    RULES["adam"].kind: adam,
    RULES["partial_rowwise_adam"].kind: partial(adam, rowwise=True),
    RULES["lamb"].kind: lamb,
    RULES["partial_rowwise_lamb"].kind: partial(lamb, rowwise=True),
    RULES["lars_sgd"].kind: lars_sgd,
}


def make_state(spec: OptimizerSpec, rows: int, dim: int, device: torch.device) -> State:
    """Zero state of `spec` for a table of `rows` x `dim`."""
    return {
        name: torch.zeros(rows, device=device) if per_row else torch.zeros(rows, dim, device=device)
        for name, per_row in spec.rule.rowwise.items()
    }


def formula_of(spec: OptimizerSpec) -> Callable[[Step], torch.Tensor]:
    """Formula of an optimizer."""
    return _FORMULAS[spec.rule.kind]


def apply(weight_RD: torch.Tensor, step: Step, formula: Callable[[Step], torch.Tensor]) -> None:
    """Applies the step's weight decay and formula, and writes the updated rows to the table."""
    spec = step.spec
    decay = spec.weight_decay * step.weight_nD if spec.weight_decay and spec.decay_mode else None
    if decay is not None and spec.decay_mode is DecayMode.L2:
        step = replace(step, grad_nD=step.grad_nD + decay)
    moved = formula(step)
    if decay is not None and spec.decay_mode is DecayMode.DECOUPLE:
        moved = moved - step.lr * decay
    weight_RD[step.rows] = (
        rounded(moved, weight_RD.dtype, step.count) if spec.stochastic_rounding else moved.to(weight_RD.dtype)
    )


def rounded(numbers: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Stochastic rounding (Gupta et al. 2015): rounds up or down with probabilities that keep the mean.

    An update smaller than the distance between two 16-bit numbers moves a weight occasionally, so that many updates
    move it as far as in float32. The same numbers and seed give the same result on all devices of one type, so replicas
    stay equal.

    Args:
        numbers: float32.
        dtype: float16 or bfloat16. float32 is not rounded.
        seed: Different in each step.
    """
    dropped = _DROPPED_BITS.get(dtype)
    if dropped is None:
        return numbers.to(dtype)
    generator = torch.Generator(device=numbers.device).manual_seed(seed)
    noise = torch.randint(0, 1 << dropped, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    bits = numbers.contiguous().view(torch.int32)
    cut = ((bits + noise) >> dropped) << dropped
    return torch.where(numbers.isfinite(), cut.view(torch.float32), numbers).to(dtype)
