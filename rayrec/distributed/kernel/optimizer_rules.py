"""Every optimizer that can run inside backward: one `Rule` says all there is to know of it.

A rule's formula updates the touched rows in tensor operations, on any device, as fbgemm's fused kernels do. Gradients
are already averaged over the global batch. R rows of the table, n touched, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.rounding import rounded

if TYPE_CHECKING:
    from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec

State = dict[str, torch.Tensor]


class DecayMode(str, Enum):
    """What weight decay does to the touched rows: L2 adds decay × weight to the gradient; DECOUPLE takes lr × decay ×
    weight from the weight."""

    L2 = "l2"
    DECOUPLE = "decouple"


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
    """Kingma & Ba 2015, on the touched rows only."""
    return step.weight_nD - step.lr * _adam_direction(step, rowwise=False)


def partial_rowwise_adam(step: Step) -> torch.Tensor:
    """Adam with one second moment a row."""
    return step.weight_nD - step.lr * _adam_direction(step, rowwise=True)


def lamb(step: Step, rowwise: bool = False) -> torch.Tensor:
    """You et al. 2020 with the trust ratio taken row by row, as in fbgemm; weight decay is part of the direction."""
    direction = _adam_direction(step, rowwise) + step.spec.weight_decay * step.weight_nD
    ratio = _ratio(step.weight_nD.norm(dim=1), direction.norm(dim=1))
    return step.weight_nD - step.lr * ratio[:, None] * direction


def partial_rowwise_lamb(step: Step) -> torch.Tensor:
    """LAMB with one second moment a row."""
    return lamb(step, rowwise=True)


def _ratio(size: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`size / other`, 0 where `other` is 0: a row whose gradients cancel stays where it is."""
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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """All about one optimizer.

    Args:
        kind: fbgemm's name for it.
        update: the formula; changes the state in place and returns the new rows `[n, D]`.
        rowwise: its states in fbgemm's order, each with whether it has one number a row, else one an element.
        reads: which settings the formula has, besides the learning rate and weight decay.
        decay: what weight decay may mean, by default the first; none where it is part of the formula.
        fbgemm_decay: which of these fbgemm's kernels for CUDA know.
        fbgemm_on_cpu: fbgemm's CPU kernels train with it, without weight decay.
        torch: torch's optimizers that do the same to rows that are touched, with what their weight decay means.
    """

    kind: EmbOptimType
    update: Callable[[Step], torch.Tensor]
    rowwise: Mapping[str, bool] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    decay: tuple[DecayMode, ...] = ()
    fbgemm_decay: frozenset[DecayMode | None] = frozenset()
    fbgemm_on_cpu: bool = False
    torch: Mapping[type[torch.optim.Optimizer], DecayMode] = field(default_factory=dict)

    @property
    def corrects_bias(self) -> bool:
        """Whether the formula reads the number of updates so far, as Adam's and LAMB's do."""
        return "beta1" in self.reads

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of state for each row, and for each element."""
        per_row = sum(self.rowwise.values())
        return 4 * per_row, 4 * (len(self.rowwise) - per_row)


_L2, _DECOUPLE = DecayMode.L2, DecayMode.DECOUPLE
_BETAS = frozenset({"eps", "beta1", "beta2"})

# by the name in a config
RULES: dict[str, Rule] = {
    "sgd": Rule(
        kind=EmbOptimType.EXACT_SGD,
        update=sgd,
        decay=(_L2, _DECOUPLE),
        fbgemm_on_cpu=True,
        torch={torch.optim.SGD: _L2},
    ),
    "adagrad": Rule(
        kind=EmbOptimType.EXACT_ADAGRAD,
        update=adagrad,
        rowwise={"momentum1": False},
        reads=frozenset({"eps"}),
        decay=(_L2, _DECOUPLE),
        fbgemm_on_cpu=True,
        torch={torch.optim.Adagrad: _L2},
    ),
    "rowwise_adagrad": Rule(
        kind=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        update=rowwise_adagrad,
        rowwise={"momentum1": True},
        reads=frozenset({"eps"}),
        decay=(_L2, _DECOUPLE),
        fbgemm_decay=frozenset({_L2, _DECOUPLE}),
        fbgemm_on_cpu=True,
    ),
    "adam": Rule(
        kind=EmbOptimType.ADAM,
        update=adam,
        rowwise={"momentum1": False, "exp_avg_sq": False},
        reads=_BETAS,
        decay=(_DECOUPLE, _L2),
        fbgemm_decay=frozenset({_DECOUPLE}),
        torch={torch.optim.Adam: _L2, torch.optim.AdamW: _DECOUPLE},
    ),
    "partial_rowwise_adam": Rule(
        kind=EmbOptimType.PARTIAL_ROWWISE_ADAM,
        update=partial_rowwise_adam,
        rowwise={"momentum1": False, "exp_avg_sq": True},
        reads=_BETAS,
        decay=(_DECOUPLE, _L2),
        fbgemm_decay=frozenset({_DECOUPLE}),
    ),
    "lamb": Rule(
        kind=EmbOptimType.LAMB,
        update=lamb,
        rowwise={"momentum1": False, "exp_avg_sq": False},
        reads=_BETAS,
        fbgemm_decay=frozenset({None}),
    ),
    "partial_rowwise_lamb": Rule(
        kind=EmbOptimType.PARTIAL_ROWWISE_LAMB,
        update=partial_rowwise_lamb,
        rowwise={"momentum1": False, "exp_avg_sq": True},
        reads=_BETAS,
        fbgemm_decay=frozenset({None}),
    ),
    "lars_sgd": Rule(
        kind=EmbOptimType.LARS_SGD,
        update=lars_sgd,
        rowwise={"momentum1": False},
        reads=frozenset({"momentum", "eta"}),
        fbgemm_decay=frozenset({None}),
    ),
}


def rule_of(optimizer: object) -> Rule:
    """The rule by fbgemm's name, as an enum or a text, or by a config's.

    Raises:
        ValueError: there is no such rule; with those that there are.
    """
    name = str(getattr(optimizer, "value", optimizer)).lower()
    for known, rule in RULES.items():
        if name in (known, f"exact_{known}", rule.kind.value):
            return rule
    raise ValueError(f"optimizer {name!r} has no fused update for embedding tables; there are {', '.join(RULES)}")


def make_state(spec: OptimizerSpec, rows: int, dim: int, device: torch.device) -> State:
    """The zero state of `spec` for a table of the given size."""
    return {
        name: torch.zeros(rows, device=device) if per_row else torch.zeros(rows, dim, device=device)
        for name, per_row in spec.rule.rowwise.items()
    }


def apply(weight_RD: torch.Tensor, step: Step) -> None:
    """Writes the updated rows into the table."""
    spec = step.spec
    decay = spec.weight_decay * step.weight_nD if spec.weight_decay and spec.decay_mode else None
    if decay is not None and spec.decay_mode is DecayMode.L2:
        step = replace(step, grad_nD=step.grad_nD + decay)
    moved = spec.rule.update(step)
    if decay is not None and spec.decay_mode is DecayMode.DECOUPLE:
        moved = moved - step.lr * decay
    weight_RD[step.rows] = (
        rounded(moved, weight_RD.dtype, step.count) if spec.stochastic_rounding else moved.to(weight_RD.dtype)
    )
