"""The tables of a rank, and the ids to look up in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Shard, Span
from rayrec.modules.configs import BaseEmbeddingConfig

LOOP_LIMIT = 2**32  # rows of a table, and numbers of a gradient, in compiled loops


@dataclass(frozen=True, kw_only=True)
class LocalTable:
    """A rectangle of a table on this rank.

    Args:
        config: Config of the table.
        rows, cols: The rectangle.
        kernel: Compute kernel that looks up the table.
        optimizer: Update inside backward. None leaves gradients to the user's optimizer.
        load_factor: Share of the rows in the device cache. None without a cache.
    """

    config: BaseEmbeddingConfig
    rows: Span
    cols: Span
    kernel: EmbeddingComputeKernel
    optimizer: OptimizerSpec | None
    load_factor: float | None = None

    @property
    def update(self) -> OptimizerSpec:
        """`optimizer` of a table that is updated inside backward."""
        assert self.optimizer is not None
        return self.optimizer

    @property
    def frozen(self) -> bool:
        """Whether no optimizer changes the weights."""
        return self.optimizer is not None and self.optimizer.frozen

    def on(self, rank: int) -> Shard:
        """The rectangle as a shard of a plan."""
        return Shard(table=self.config.name, rows=self.rows, cols=self.cols, rank=rank)


@dataclass(frozen=True)
class Lookups:
    """Ids for a kernel: L lookups of B bags each, lookup by lookup.

    Args:
        ids: `[N]`, counted from the first row of the shard.
        offsets: `[L * B + 1]`.
        weights: `[N]` or None.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
