"""Optimizers inside backward: how parameters are marked, and the filter by this mark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# Attributes that torch.distributed.optim and sharded tables set on a parameter.
CLASSES = "_optimizer_classes"
SETTINGS = "_optimizer_kwargs"
# Attribute of a parameter that is one rank's shard: gathers a number of each rank, `[]` to `[W]`.
GATHER = "_gather_over_ranks"


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters without an optimizer in backward, or, with `include`, the parameters with one."""
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: dict[str, Any],
) -> None:
    """Attaches an optimizer that runs inside backward to parameters.

    Sharded tables use it as their fused update. Other parameters are updated once their gradient is computed, and
    `grad` becomes None afterwards.

    Args:
        optimizer_class: torch's SGD, Adagrad or Adam, or a row optimizer of `rayrec.torchrec.optim`.
        params: For example the `parameters()` of a collection that is not sharded yet.
        optimizer_kwargs: Settings of the optimizer, for example `{"lr": 0.02}`.
    """
    # Imported here because it imports FSDP, which needs 0.3 s in every process.
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
