"""The interface of all kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rayrec.distributed.kernel.local_table import LocalTable, Lookups
from rayrec.distributed.kernel.rows import TouchedRows


class Kernel(Protocol):
    """Looks up, and maybe trains, tables that share a data type and an optimizer."""

    learning_rate: float
    """Learning rate of the update inside backward."""

    iteration: int
    """Number of updates so far. Adam and LAMB correct their bias with it."""

    touched: TouchedRows | None
    """Rows looked up in training since the last averaging over replicas. None where nothing is averaged."""

    changed: TouchedRows | None
    """Rows that may have changed since the last checkpoint. None unless `track_changes` was called."""

    table_of_lookup: list[int]
    """Index in `tables` of each lookup's table."""

    @property
    def tables(self) -> Sequence[LocalTable]:
        """The rectangles, in the order of `weights` and `states`."""

    def lookup(self, lookups: Lookups) -> torch.Tensor:
        """Float32 sums of the bags `[B, sum of the lookups' widths]`, or, of a kernel for sequences, the vector of each
        id `[N, width]`. Backward trains the tables."""

    def write_back(self) -> None:
        """Writes the device cache to the memory behind `weights`, which may be read and written until the next
        lookup."""

    def weights(self) -> list[torch.Tensor]:
        """Each table's rectangle `[rows, cols]`: its parameter, or a view of what backward updates."""

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Each table's optimizer state by name, as views: `[rows]` for one number per row, else `[rows, cols]`."""


def updating(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels that update their tables inside backward."""
    specs = [(kernel, kernel.tables[0].optimizer) for kernel in kernels]
    return [kernel for kernel, spec in specs if spec is not None and not spec.frozen]


class Untrained(torch.autograd.Function):
    """Vectors of frozen tables. They require gradients, so that backward still exchanges them on every rank."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


def of_inner(name: str) -> Any:
    """A property that reads and writes the attribute `name` of `self._inner`."""
    return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))
