"""What a kernel holds and takes, and the methods that kernels have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Shard, Span
from rayrec.modules import BaseEmbeddingConfig


@dataclass(frozen=True, kw_only=True)
class LocalTable:
    """A rectangle of a table on this rank.

    Args:
        config: the table.
        rows, cols: the rectangle.
        kernel: how it is looked up.
        optimizer: the update inside backward; None leaves gradients to an optimizer of the user's.
        load_factor: the share of the rows in a device cache; None without one.
    """

    config: BaseEmbeddingConfig
    rows: Span
    cols: Span
    kernel: EmbeddingComputeKernel
    optimizer: OptimizerSpec | None
    load_factor: float | None = None

    @property
    def update(self) -> OptimizerSpec:
        """The update inside backward, of a table that has one."""
        assert self.optimizer is not None
        return self.optimizer

    def on(self, rank: int) -> Shard:
        """The rectangle as a shard of a plan."""
        return Shard(table=self.config.name, rows=self.rows, cols=self.cols, rank=rank)


@dataclass(frozen=True)
class Lookups:
    """Ids for a kernel: L lookups of B bags, lookup after lookup.

    Args:
        ids: `[N]`, rows counted from the shard's first row.
        offsets: `[L * B + 1]`.
        weights: `[N]` or None.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


class Kernel(Protocol):
    """Looks up the tables of one group."""

    @property
    def tables(self) -> Sequence[LocalTable]:
        """The rectangles, in the order of `weights` and `states`."""

    def write_back(self) -> None:
        """Empties a device cache into the memory behind `weights`, which may be read and written until the next
        lookup."""

    def weights(self) -> list[torch.Tensor]:
        """Each table's rectangle `[rows, cols]`: its parameter, or a view of what backward updates."""

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Each table's optimizer state by name, as views: `[rows]` for one number a row, else `[rows, cols]`."""


class UpdatingKernel(Kernel, Protocol):
    """A kernel that trains its tables inside backward."""

    learning_rate: float
    iteration: int  # updates so far; Adam and its relatives correct their bias by it


class PoolingKernel(Kernel, Protocol):
    """A kernel that looks up bags."""

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        """Sums of the bags' vectors, `[B, sum of the lookups' widths]` float32; its backward trains."""


class VectorKernel(Kernel, Protocol):
    """A kernel of one width that looks up id by id."""

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        """The vector of every id, `[N, width]` float32; its backward trains."""


def of_inner(name: str) -> Any:
    """An attribute that a kernel around another one, `self._inner`, has from it, to read and write."""
    return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))
