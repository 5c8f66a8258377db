"""Marks on parameters that are updated inside backward, and the filter by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
