"""Marks on parameters that are updated inside backward, the function that makes them, and the filter by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# attributes that torch.distributed.optim's apply_optimizer_in_backward sets on a parameter; so do sharded tables
CLASSES = "_optimizer_classes"
SETTINGS = "_optimizer_kwargs"
# attribute of a parameter that is one rank's shard of a table: gathers a number of every rank, `[]` to `[W]`
GATHER = "_gather_over_ranks"


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without an optimizer in backward; with `include`, those that have one."""
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


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
