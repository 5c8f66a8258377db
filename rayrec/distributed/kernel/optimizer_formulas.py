"""The formula of every optimizer, which updates the touched rows in tensor operations, on any device, as fbgemm's fused
kernels do. R rows of the table, n touched, D columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.optimizer_rules import RULES, DecayMode
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec

State = dict[str, torch.Tensor]
# bits of a float32's mantissa that the format does not keep
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
    count: int  # updates so far, this one included


def sgd(step: Step) -> torch.Tensor:
    """w -= lr g."""
    return step.weight_nD - step.lr * step.grad_nD


def adagrad(step: Step, rowwise: bool = False) -> torch.Tensor:
    """Duchi et al. 2011: s += g²; w -= lr g / (√s + eps). Row-wise: one s a row, of the mean of g² over the row."""
    square = step.grad_nD.square().mean(1) if rowwise else step.grad_nD.square()
    total = step.state["momentum1"][step.rows] + square
    step.state["momentum1"][step.rows] = total
    root = total.sqrt() + step.spec.eps
    return step.weight_nD - step.lr * step.grad_nD / (root[:, None] if rowwise else root)


def _adam_direction(step: Step, rowwise: bool) -> torch.Tensor:
    spec, rows, grad = step.spec, step.rows, step.grad_nD
    first = spec.beta1 * step.state["momentum1"][rows] + (1 - spec.beta1) * grad
    square = grad.square().mean(1) if rowwise else grad.square()
    second = spec.beta2 * step.state["exp_avg_sq"][rows] + (1 - spec.beta2) * square
    step.state["momentum1"][rows] = first
    step.state["exp_avg_sq"][rows] = second
    scale = (second / (1 - spec.beta2**step.count)).sqrt() + spec.eps
    return first / (1 - spec.beta1**step.count) / (scale[:, None] if rowwise else scale)


def adam(step: Step, rowwise: bool = False) -> torch.Tensor:
    """Kingma & Ba 2015, on the touched rows only. Row-wise: with one second moment a row."""
    return step.weight_nD - step.lr * _adam_direction(step, rowwise)


def lamb(step: Step, rowwise: bool = False) -> torch.Tensor:
    """You et al. 2020 with the trust ratio taken row by row, as in fbgemm; weight decay is part of the direction.
    Row-wise: with one second moment a row."""
    direction = _adam_direction(step, rowwise) + step.spec.weight_decay * step.weight_nD
    ratio = _ratio(step.weight_nD.norm(dim=1), direction.norm(dim=1))
    return step.weight_nD - step.lr * ratio[:, None] * direction


def _ratio(size: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`size / other`, 0 where `other` is 0: a row stays as it is if its gradients cancel."""
    return torch.where(other > 0, size / other, 0)


def lars_sgd(step: Step) -> torch.Tensor:
    """You et al. 2017 with the layer-wise rate taken row by row, as in fbgemm; weight decay is part of the rate."""
    spec, weight, grad = step.spec, step.weight_nD, step.grad_nD
    norm_w, norm_g = weight.norm(dim=1), grad.norm(dim=1)
    rate = step.lr * spec.eta * _ratio(norm_w, norm_g + spec.weight_decay * norm_w)
    moved = spec.momentum * step.state["momentum1"][step.rows]
    moved = moved + rate[:, None] * (grad + spec.weight_decay * weight)
    step.state["momentum1"][step.rows] = moved
    return weight - moved


# each changes the state in place and returns the new rows [n, D]
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
    """The zero state of `spec` for a table of the given size."""
    return {
        name: torch.zeros(rows, device=device) if per_row else torch.zeros(rows, dim, device=device)
        for name, per_row in spec.rule.rowwise.items()
    }


def formula_of(spec: OptimizerSpec) -> Callable[[Step], torch.Tensor]:
    """The formula of an optimizer."""
    return _FORMULAS[spec.rule.kind]


def apply(weight_RD: torch.Tensor, step: Step, formula: Callable[[Step], torch.Tensor]) -> None:
    """Writes the updated rows into the table."""
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
    """Stochastic rounding (Gupta et al. 2015): up or down with the probability that keeps the mean.

    An update smaller than the distance between two 16-bit numbers moves a weight now and then, so many of them move it
    as far as in float32. The same numbers and seed give the same result on all devices of a kind, so replicas stay
    equal.

    Args:
        numbers: float32.
        dtype: float16, bfloat16, or float32, which needs no rounding.
        seed: another one in each step.
    """
    dropped = _DROPPED_BITS.get(dtype)
    if dropped is None:
        return numbers.to(dtype)
    generator = torch.Generator(device=numbers.device).manual_seed(seed)
    noise = torch.randint(0, 1 << dropped, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    bits = numbers.contiguous().view(torch.int32)
    cut = ((bits + noise) >> dropped) << dropped
    return torch.where(numbers.isfinite(), cut.view(torch.float32), numbers).to(dtype)
