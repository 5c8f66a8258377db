"""Optimizers for embedding tables as plain torch optimizers: the rows that a batch touched are updated, others rest.

Given to `apply_optimizer_in_backward` they choose the fused update of a sharded table (`fused_rule` names it). On one
process they train an unsharded table by the same rules, which makes them the oracle of the fused ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class _RowOptimizer(Optimizer):
    """Finds the touched rows, and leaves their new values to `_update`.

    A row is touched where a sparse gradient names it, or where a dense gradient is not all zero. A row is the first
    dimension; each number of a vector is its own row.
    """

    fused_rule: ClassVar[str]

    def __init__(self, params: Params, **settings: Any) -> None:
        lr, eps = settings["lr"], settings.get("eps", 0.0)
        if lr < 0:
            raise ValueError(f"{type(self).__name__}: lr={lr} must not be negative")
        if eps < 0:
            raise ValueError(f"{type(self).__name__}: eps={eps} must not be negative")
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the touched rows of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, param.grad, group)
        return loss

    def _step_param(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        weight_RD = param.view(param.shape[0], -1)
        if grad.is_sparse:
            grad = grad.coalesce()
            rows, grad_nD = grad.indices()[0], grad.values().reshape(-1, weight_RD.shape[1]).float()
        else:
            grad_RD = grad.reshape(weight_RD.shape)
            rows = (grad_RD != 0).any(1).nonzero().squeeze(1)
            grad_nD = grad_RD[rows].float()
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        weight_RD[rows] = self._update(weight_RD, rows, grad_nD, state, group).to(param.dtype)

    def _update(
        self,
        weight_RD: torch.Tensor,
        rows: torch.Tensor,
        grad_nD: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> torch.Tensor:
        """New values `[n, D]` of the touched rows; changes their state."""
        raise NotImplementedError


def _state(state: dict[str, Any], name: str, weight_RD: torch.Tensor, rowwise: bool = False) -> torch.Tensor:
    if name not in state:
        shape = weight_RD.shape[:1] if rowwise else weight_RD.shape
        state[name] = torch.zeros(shape, device=weight_RD.device)
    made: torch.Tensor = state[name]
    return made


def _moving(state: torch.Tensor, rows: torch.Tensor, beta: float, new: torch.Tensor) -> torch.Tensor:
    """Takes `new` into a moving average; returns the touched rows of it."""
    state[rows] = torch.lerp(new, state[rows], beta)
    return state[rows]


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad (Duchi et al. 2011) with one accumulator a row, which holds sums of the mean of g².

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        lr_decay: the rate of step n is lr / (1 + (n - 1) lr_decay).
        weight_decay: times the weight, added to the gradient of touched rows.
        initial_accumulator_value: of the accumulators.
        eps: added to the root of the accumulator.
        maximize: steps go up the gradient.
        unused: settings of TorchRec's that choose among its loops.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "exact_row_wise_adagrad"

    def __init__(
        self,
        params: Params,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        **unused: Any,
    ) -> None:
        settings = {"initial_accumulator_value": initial_accumulator_value, "eps": eps, "maximize": maximize}
        super().__init__(params, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, **settings)

    def _update(
        self,
        weight_RD: torch.Tensor,
        rows: torch.Tensor,
        grad_nD: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> torch.Tensor:
        weight_nD = weight_RD[rows].float()
        if group["maximize"]:
            grad_nD = -grad_nD
        grad_nD = torch.add(grad_nD, weight_nD, alpha=group["weight_decay"])
        if "sum" not in state:
            state["sum"] = weight_RD.new_full(
                (len(weight_RD), 1), group["initial_accumulator_value"], dtype=torch.float32
            )
        state["sum"].index_add_(0, rows, grad_nD.pow(2).mean(dim=1, keepdim=True))
        scale_n1 = state["sum"][rows].sqrt().add_(group["eps"])
        lr = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        return weight_nD - lr * grad_nD / scale_n1


class _RowAdam(_RowOptimizer):
    """Adam's direction on the touched rows; the bias correction counts steps, not visits of a row."""

    rowwise: ClassVar[bool]  # one second moment a row

    def __init__(
        self,
        params: Params,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(
        self,
        weight_RD: torch.Tensor,
        rows: torch.Tensor,
        grad_nD: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> torch.Tensor:
        (beta1, beta2), count = group["betas"], state["step"]
        square = grad_nD.pow(2)
        if self.rowwise:
            square = square.mean(dim=1)
        first = _moving(_state(state, "momentum1", weight_RD), rows, beta1, grad_nD)
        second = _moving(_state(state, "exp_avg_sq", weight_RD, self.rowwise), rows, beta2, square)
        scale = (second / (1 - beta2**count)).sqrt() + group["eps"]
        direction_nD = first / (1 - beta1**count) / (scale.unsqueeze(1) if self.rowwise else scale)
        weight_nD = weight_RD[rows].float()
        direction_nD = direction_nD + group["weight_decay"] * weight_nD
        return weight_nD - group["lr"] * self._trust(weight_nD, direction_nD) * direction_nD

    def _trust(self, weight_nD: torch.Tensor, direction_nD: torch.Tensor) -> torch.Tensor:
        """What a row's step is multiplied by, `[n, 1]` or `[]`."""
        return weight_nD.new_ones(())


class PartialRowWiseAdam(_RowAdam):
    """Adam (Kingma & Ba 2015) on the touched rows, with one second moment a row; weight decay is decoupled.

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: times lr, taken from touched rows.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "partial_row_wise_adam"
    rowwise = True


class LAMB(_RowAdam):
    """LAMB (You et al. 2020) on the touched rows, with a trust ratio for each row.

    Args:
        params, lr, betas, eps, weight_decay: as of `PartialRowWiseAdam`.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "lamb"
    rowwise = False

    def _trust(self, weight_nD: torch.Tensor, direction_nD: torch.Tensor) -> torch.Tensor:
        moved = direction_nD.norm(dim=1, keepdim=True)
        return torch.where(moved > 0, weight_nD.norm(dim=1, keepdim=True) / moved, 0.0)


class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment a row.

    Args:
        params, lr, betas, eps, weight_decay: as of `PartialRowWiseAdam`.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "partial_row_wise_lamb"
    rowwise = True


class LarsSGD(_RowOptimizer):
    """LARS (You et al. 2017) on the touched rows, with a rate for each row, and momentum.

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        momentum: decay rate of past moves.
        eta: trust coefficient.
        weight_decay: times the weight, added to the gradient.

    Raises:
        ValueError: a negative lr.
    """

    fused_rule = "lars_sgd"

    def __init__(
        self, params: Params, lr: float, momentum: float = 0.9, eta: float = 0.001, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, eta=eta, weight_decay=weight_decay)

    def _update(
        self,
        weight_RD: torch.Tensor,
        rows: torch.Tensor,
        grad_nD: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> torch.Tensor:
        weight_nD, decay = weight_RD[rows].float(), group["weight_decay"]
        size_w = weight_nD.norm(dim=1)
        size_g = grad_nD.norm(dim=1) + decay * size_w
        rate_n = torch.where(size_g > 0, group["lr"] * group["eta"] * size_w / size_g, 0.0)
        past = _state(state, "momentum1", weight_RD)
        past[rows] = group["momentum"] * past[rows] + rate_n.unsqueeze(1) * (grad_nD + decay * weight_nD)
        return weight_nD - past[rows]
