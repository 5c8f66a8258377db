"""The update of the touched rows, as tensor operations: the same rules as fbgemm's fused kernels, on any device.

Each function changes `weight` and `state` in place at `rows` (each row once). Gradients are already averaged over the
global batch. R rows of the table, n touched, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.optimizer import OptimizerSpec

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One update: the touched rows' weights, their mean gradient and where the state lies."""

    rows: torch.Tensor  # int64 [n]
    weight_nD: torch.Tensor  # float32
    grad_nD: torch.Tensor  # float32
    state: State  # [R] or [R, D], float32
    spec: OptimizerSpec
    lr: float
    count: int  # updates so far, this one included


def sgd(step: Step) -> torch.Tensor:
    """w -= lr g."""
    return step.weight_nD - step.lr * step.grad_nD


def adagrad(step: Step) -> torch.Tensor:
    """Duchi et al. 2011: s += g²; w -= lr g / (√s + eps)."""
    total = step.state["momentum1"][step.rows] + step.grad_nD.square()
    step.state["momentum1"][step.rows] = total
    return step.weight_nD - step.lr * step.grad_nD / (total.sqrt() + step.spec.eps)


def rowwise_adagrad(step: Step) -> torch.Tensor:
    """Adagrad with one accumulator a row, the mean of g² over the row."""
    total = step.state["momentum1"][step.rows] + step.grad_nD.square().mean(1)
    step.state["momentum1"][step.rows] = total
    return step.weight_nD - step.lr * step.grad_nD / (total.sqrt() + step.spec.eps)[:, None]


def _adam_direction(step: Step, rowwise: bool) -> torch.Tensor:
    spec, rows, grad = step.spec, step.rows, step.grad_nD
    first = spec.beta1 * step.state["momentum1"][rows] + (1 - spec.beta1) * grad
    square = grad.square().mean(1) if rowwise else grad.square()
    second = spec.beta2 * step.state["exp_avg_sq"][rows] + (1 - spec.beta2) * square
    step.state["momentum1"][rows] = first
    step.state["exp_avg_sq"][rows] = second
    scale = (second / (1 - spec.beta2**step.count)).sqrt() + spec.eps
    return first / (1 - spec.beta1**step.count) / (scale[:, None] if rowwise else scale)


def adam(step: Step) -> torch.Tensor:
    """Kingma & Ba 2015, on the touched rows only; weight decay is decoupled, as in fbgemm."""
    direction = _adam_direction(step, rowwise=False) + step.spec.weight_decay * step.weight_nD
    return step.weight_nD - step.lr * direction


def partial_rowwise_adam(step: Step) -> torch.Tensor:
    """Adam with one second moment a row."""
    direction = _adam_direction(step, rowwise=True) + step.spec.weight_decay * step.weight_nD
    return step.weight_nD - step.lr * direction


def lamb(step: Step) -> torch.Tensor:
    """You et al. 2020 with the trust ratio taken row by row, as in fbgemm."""
    direction = _adam_direction(step, rowwise=False) + step.spec.weight_decay * step.weight_nD
    ratio = _ratio(step.weight_nD.norm(dim=1), direction.norm(dim=1))
    return step.weight_nD - step.lr * ratio[:, None] * direction


def _ratio(size: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`size / other`, 0 where `other` is 0: a row whose gradients cancel stays where it is."""
    return torch.where(other > 0, size / other, 0)


def lars_sgd(step: Step) -> torch.Tensor:
    """You et al. 2017 with the layer-wise rate taken row by row, as in fbgemm."""
    spec, weight, grad = step.spec, step.weight_nD, step.grad_nD
    norm_w, norm_g = weight.norm(dim=1), grad.norm(dim=1)
    rate = step.lr * spec.eta * _ratio(norm_w, norm_g + spec.weight_decay * norm_w)
    moved = spec.momentum * step.state["momentum1"][step.rows]
    moved = moved + rate[:, None] * (grad + spec.weight_decay * weight)
    step.state["momentum1"][step.rows] = moved
    return weight - moved


@dataclass(frozen=True)
class Rule:
    """An update and its state: names of the states with a number an element, and of those with a number a row."""

    update: Callable[[Step], torch.Tensor]
    elementwise: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    decays_gradient: bool = True  # weight decay is added to the gradient, not to the direction


RULES: dict[EmbOptimType, Rule] = {
    EmbOptimType.EXACT_SGD: Rule(sgd),
    EmbOptimType.EXACT_ADAGRAD: Rule(adagrad, elementwise=("momentum1",)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: Rule(rowwise_adagrad, rowwise=("momentum1",)),
    EmbOptimType.ADAM: Rule(adam, elementwise=("momentum1", "exp_avg_sq"), decays_gradient=False),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: Rule(
        partial_rowwise_adam, elementwise=("momentum1",), rowwise=("exp_avg_sq",), decays_gradient=False
    ),
    EmbOptimType.LAMB: Rule(lamb, elementwise=("momentum1", "exp_avg_sq"), decays_gradient=False),
    EmbOptimType.LARS_SGD: Rule(lars_sgd, elementwise=("momentum1",), decays_gradient=False),
}


def make_state(spec: OptimizerSpec, rows: int, dim: int, device: torch.device) -> State:
    """The zero state of `spec` for a table of the given size.

    Raises:
        ValueError: an optimizer without an update here.
    """
    rule = RULES.get(spec.optimizer)
    if rule is None:
        raise ValueError(f"optimizer {spec.optimizer.value!r} is not one of {[o.value for o in RULES]}")
    state = {name: torch.zeros(rows, dim, device=device) for name in rule.elementwise}
    return state | {name: torch.zeros(rows, device=device) for name in rule.rowwise}


def apply(weight_RD: torch.Tensor, step: Step) -> None:
    """Writes the updated rows into the table."""
    rule = RULES[step.spec.optimizer]
    grad = step.grad_nD
    if rule.decays_gradient and step.spec.weight_decay:
        grad = grad + step.spec.weight_decay * step.weight_nD
    changed = Step(step.rows, step.weight_nD, grad, step.state, step.spec, step.lr, step.count)
    weight_RD[step.rows] = rule.update(changed).to(weight_RD.dtype)
