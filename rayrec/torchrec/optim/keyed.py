"""`torchrec.optim.keyed`, and methods of its optimizers that rayrec does without: rayrec's classes have them once this
module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]


def init_state(optimizer: KeyedOptimizer, sparse_grad_parameter_names: set[str] | None = None) -> None:
    """Makes all state by one step with zero gradients, as loading into TorchRec's optimizers needs.

    Step counts become 1, and weight decay acts. A state loads without it here. What is updated in backward has its
    state from the start.

    Args:
        sparse_grad_parameter_names: parameters that get a sparse gradient.
    """
    for name, param in optimizer.params.items():
        if param.requires_grad and not hasattr(param, "_in_backward_optimizers"):
            sparse = name in (sparse_grad_parameter_names or ())
            param.grad = torch.zeros_like(param).to_sparse() if sparse else torch.zeros_like(param)
    optimizer.step()


def set_optimizer_step(optimizer: KeyedOptimizerWrapper | CombinedOptimizer, step: int) -> None:
    """Passed on to the optimizers inside that have it."""
    for inner in _inside(optimizer):
        call_if_defined(inner, "set_optimizer_step", step)


def update_hyper_parameters(
    optimizer: KeyedOptimizerWrapper | CombinedOptimizer, params_dict: Mapping[str, Any]
) -> None:
    """Passed on to the optimizers inside that have it."""
    for inner in _inside(optimizer):
        call_if_defined(inner, "update_hyper_parameters", params_dict)


def _inside(optimizer: KeyedOptimizerWrapper | CombinedOptimizer) -> list[torch.optim.Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        return [each for _, each in optimizer.optimizers]
    return [optimizer._optimizer]


def call_if_defined(optimizer: torch.optim.Optimizer, method: str, *args: Any) -> None:
    """Calls a method of an optimizer, if it has this method."""
    call = getattr(optimizer, method, None)
    if call is not None:
        call(*args)


KeyedOptimizer.init_state = init_state  # type: ignore[attr-defined]
for kind in (KeyedOptimizerWrapper, CombinedOptimizer):
    for function in (set_optimizer_step, update_hyper_parameters):
        setattr(kind, function.__name__, function)
