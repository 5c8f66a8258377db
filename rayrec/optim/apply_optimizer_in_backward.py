"""Choosing a table's optimizer before it is sharded: torch's own function, under the name that users look for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Gives parameters an optimizer that runs inside backward. A sharded table obeys it by its fused update; others are
    updated as soon as their gradient is there, and have none afterwards.

    Args:
        optimizer_class: torch's SGD, Adagrad or Adam, or one of `rayrec.optim`'s row optimizers.
        params: for example a collection's `parameters()`, before it is sharded.
        optimizer_kwargs: the optimizer's settings, such as `{"lr": 0.02}`.
    """
    # Imported here: it brings FSDP and more with it, a third of a second for every process of a run.
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
