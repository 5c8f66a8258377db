"""Row-wise optimizers for embedding tables, as plain torch optimizers that update only the rows used by a batch.

`apply_optimizer_in_backward` maps them to the fused update of a sharded table (`fused_rule`). In one process they train
an unsharded table by the same rules, so tests compare the fused updates with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class _RowOptimizer(Optimizer):
    """Finds the rows to update; `_update` computes their new values.

    These are the rows in a sparse gradient, or those with nonzero values in a dense gradient. Rows are slices of the
    first dimension; each element of a 1-D parameter is a row.
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
        """Updates the rows with gradients; returns the loss of the closure."""
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
        """Returns the new values `[n, D]` of `rows`, and updates their state."""
        raise NotImplementedError


def _state(state: dict[str, Any], name: str, weight_RD: torch.Tensor, rowwise: bool = False) -> torch.Tensor:
    if name not in state:
        shape = weight_RD.shape[:1] if rowwise else weight_RD.shape
        state[name] = torch.zeros(shape, device=weight_RD.device)
    tensor: torch.Tensor = state[name]
    return tensor


def _moving(state: torch.Tensor, rows: torch.Tensor, beta: float, new: torch.Tensor) -> torch.Tensor:
    """Updates a moving average with `new`; returns its values at `rows`."""
    state[rows] = torch.lerp(new, state[rows], beta)
    return state[rows]


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad (Duchi et al. 2011) with one accumulator per row, the sum of the mean of g².

    Args:
        params: see torch.optim.
        lr: learning rate.
        lr_decay: the rate of step n is lr / (1 + (n - 1) lr_decay).
        weight_decay: L2 penalty on the updated rows.
        initial_accumulator_value: initial value of the accumulators.
        eps: added to the square root of the accumulator.
        maximize: maximize the objective.
        unused: other settings of TorchRec's class, ignored.

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
    """Adam on the updated rows. The bias correction counts steps of the optimizer, not updates of a row."""

    rowwise: ClassVar[bool]  # one second moment per row

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
        moment1 = _moving(_state(state, "momentum1", weight_RD), rows, beta1, grad_nD)
        moment2 = _moving(_state(state, "exp_avg_sq", weight_RD, self.rowwise), rows, beta2, square)
        scale = (moment2 / (1 - beta2**count)).sqrt() + group["eps"]
        direction_nD = moment1 / (1 - beta1**count) / (scale.unsqueeze(1) if self.rowwise else scale)
        weight_nD = weight_RD[rows].float()
        direction_nD = direction_nD + group["weight_decay"] * weight_nD
        return weight_nD - group["lr"] * self._trust(weight_nD, direction_nD) * direction_nD

    def _trust(self, weight_nD: torch.Tensor, direction_nD: torch.Tensor) -> torch.Tensor:
        """Returns the factor of the step of each row, `[n, 1]` or `[]`."""
        return weight_nD.new_ones(())


class PartialRowWiseAdam(_RowAdam):
    """Adam (Kingma & Ba 2015) on the updated rows, with one second moment per row and decoupled weight decay.

    Args:
        params: see torch.optim.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay of the updated rows.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "partial_row_wise_adam"
    rowwise = True


class LAMB(_RowAdam):
    """LAMB (You et al. 2020) on the updated rows, with a trust ratio per row.

    Args:
        params, lr, betas, eps, weight_decay: see `PartialRowWiseAdam`.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "lamb"
    rowwise = False

    def _trust(self, weight_nD: torch.Tensor, direction_nD: torch.Tensor) -> torch.Tensor:
        step_norm = direction_nD.norm(dim=1, keepdim=True)
        return torch.where(step_norm > 0, weight_nD.norm(dim=1, keepdim=True) / step_norm, 0.0)


class PartialRowWiseLAMB(LAMB):
    """LAMB with one second moment per row.

    Args:
        params, lr, betas, eps, weight_decay: see `PartialRowWiseAdam`.

    Raises:
        ValueError: a negative lr or eps.
    """

    fused_rule = "partial_row_wise_lamb"
    rowwise = True


class LarsSGD(_RowOptimizer):
    """LARS (You et al. 2017) on the updated rows, with a rate per row, and momentum.

    Args:
        params: see torch.optim.
        lr: learning rate.
        momentum: momentum factor.
        eta: trust coefficient.
        weight_decay: L2 penalty.

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
        weight_norm = weight_nD.norm(dim=1)
        grad_norm = grad_nD.norm(dim=1) + decay * weight_norm
        rate_n = torch.where(grad_norm > 0, group["lr"] * group["eta"] * weight_norm / grad_norm, 0.0)
        momentum = _state(state, "momentum1", weight_RD)
        momentum[rows] = group["momentum"] * momentum[rows] + rate_n.unsqueeze(1) * (grad_nD + decay * weight_nD)
        return weight_nD - momentum[rows]
