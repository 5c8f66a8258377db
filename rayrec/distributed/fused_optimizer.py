"""The optimizer inside backward, as users see it: a learning rate to schedule and a state to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.distributed.kernel import UpdatingKernel
from rayrec.optim import KeyedOptimizer


class EmbeddingFusedOptimizer(KeyedOptimizer):
    """A kernel's optimizer. Rows are updated in backward; `step` and `zero_grad` hand the learning rate on.

    Args:
        kernel: whose tables are trained.
        names: parameter name of each of the kernel's tables.
        params: the parameters, in the same order.
    """

    def __init__(self, kernel: UpdatingKernel, names: Sequence[str], params: Sequence[torch.nn.Parameter]) -> None:
        self._kernel = kernel
        state = {
            param: {f"{table.config.name}.{key}": value for key, value in values.items()}
            for param, table, values in zip(params, kernel.tables, kernel.states(), strict=True)
        }
        group = {"params": list(params), "lr": kernel.learning_rate}
        super().__init__(dict(zip(names, params, strict=True)), state, [group])
        for param in params:
            param._in_backward_optimizers = [self]  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The rows are up to date already; sets the learning rate of the next backward."""
        self.settings_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.settings_changed()

    def settings_changed(self) -> None:
        """Hands the learning rate to the kernel."""
        lr = self.param_groups[0]["lr"]
        if lr != self._kernel.learning_rate:
            self._kernel.learning_rate = float(lr)
