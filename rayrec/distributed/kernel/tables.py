"""What a kernel is made of, and what every kernel offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Shard, Span
from rayrec.modules import BaseEmbeddingConfig

if TYPE_CHECKING:
    from rayrec.distributed.kernel.matrix import RowMatrix


@dataclass(frozen=True, kw_only=True)
class LocalTable:
    """The rectangle of a table that this rank holds, and how it is looked up and trained.

    `optimizer` is the update inside backward; None leaves gradients to an optimizer of the user's. `load_factor` is the
    share of the rows in a device cache; None where there is none.
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
        """The rectangle as a plan has it."""
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
        """Empties a device cache into the memory that `weights` shows, so that this may be read, and written, until the
        next lookup."""

    def weights(self) -> list[torch.Tensor]:
        """Each table's rectangle `[rows, cols]`: its parameter, or a view of what backward updates."""

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Each table's optimizer state by name, as views: `[rows]` for one number a row, else `[rows, cols]`."""


class UpdatingKernel(Kernel, Protocol):
    """A kernel that trains its tables inside backward."""

    learning_rate: float
    iteration: int  # updates so far; Adam and its relatives correct their bias by it


class MatrixKernel(Kernel, Protocol):
    """A kernel whose tables make a `RowMatrix`, and which can be told the gradients of rows."""

    @property
    def matrix(self) -> RowMatrix:
        """The tables, one below the other."""

    @property
    def leaves(self) -> Sequence[nn.Parameter]:
        """Parameters that autograd gives gradients to; none where the kernel updates its rows itself."""

    @property
    def rate(self) -> float | None:
        """The learning rate of an update inside backward; None where there is none."""

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float | None) -> Sequence[torch.Tensor]:
        """Takes the mean gradients `[n, D]` of distinct `rows`, and the rate at their lookup; returns the gradient of
        each leaf."""


class PoolingKernel(Kernel, Protocol):
    """A kernel that looks up bags."""

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        """Sums of the bags' vectors, `[B, sum of the lookups' widths]` float32, with a backward that trains."""


class VectorKernel(Kernel, Protocol):
    """A kernel of one width that looks up id by id."""

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        """Every id's own vector, `[N, width]` float32, with a backward that trains."""
