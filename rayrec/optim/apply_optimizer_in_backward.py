"""Sets a table's optimizer before sharding: torch's own function under a public name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Gives parameters an optimizer that runs inside backward. Sharded tables use it as their fused update; other
    parameters are updated once their gradient is computed, and `grad` is None afterwards.

    Args:
        optimizer_class: torch's SGD, Adagrad or Adam, or a row optimizer of `rayrec.torchrec.optim`.
        params: for example a collection's `parameters()`, before it is sharded.
        optimizer_kwargs: the optimizer's settings, such as `{"lr": 0.02}`.
    """
    # imported here: it imports FSDP, which takes a third of a second in every process
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
