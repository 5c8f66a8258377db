"""`Retriever`: the contract of models that find items, and what sequence models share.

A model of your own gives `query`, `items` and `pairs`; training, full-corpus evaluation, the index and the service need
no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch
from rayrec.models.retrieval_loss import Pairs, RetrievalLoss
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor


class Retriever(nn.Module, ABC):
    """Vectors of queries and of items, whose dot product is the score.

    Args:
        loss: `RetrievalLoss`'s arguments but `num_items`.
        num_items: I; items are rows [0, I) of the item table.
    """

    def __init__(self, num_items: int, loss: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.num_items = num_items
        self.loss = RetrievalLoss(num_items, **(loss or {}))
        self.group: comm.Group = None

    @abstractmethod
    def query(self, batch: Batch) -> torch.Tensor:
        """`[B, D]`, one vector for each row."""

    @abstractmethod
    def items(self, ids: torch.Tensor) -> torch.Tensor:
        """`[C, D]` of the items `[C]`. Collective where the table is sharded."""

    @abstractmethod
    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        """Queries and what followed them, and vectors of the items `drawn [C]`: one lookup for all."""

    def on_sharded(self, group: comm.Group) -> None:
        """Called when the tables are sharded over `group`."""
        self.group = group

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, zeros `[B]`). Ranks' losses, weighed by their share of all rows' weights, add up to the loss of all
        positions. Collective, also for an empty batch."""
        drawn = self.loss.draw()
        part = self.loss(self.pairs(batch, drawn.ids), drawn, self.group)
        own = torch.tensor(batch.total_weight, device=part.device)
        everywhere = comm.all_reduce(own.clone(), self.group)
        loss = part * everywhere / own if own > 0 else part
        return loss, part * 0 + part.new_zeros(batch.rows)  # an empty batch's backward goes through the same exchanges


def as_collection_table(table: BaseEmbeddingConfig) -> EmbeddingConfig:
    """A table of the config, for lookups id by id; its first weights are small normal numbers."""
    return EmbeddingConfig(
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        name=table.name,
        data_type=table.data_type,
        feature_names=list(table.feature_names),
        init_fn=table.init_fn or _small_normal,
    )


def _small_normal(rows: torch.Tensor) -> None:
    rows.normal_(std=0.02)


class ItemVectors(nn.Module):
    """The item table, looked up id by id: as the vectors of a history, of positives and of candidates."""

    def __init__(self, table: EmbeddingConfig, device: torch.device | str | None, seed: int | None) -> None:
        super().__init__()
        self.feature = table.feature_names[0]
        self.num_items, self.dim = table.num_embeddings, table.embedding_dim
        self.embeddings = EmbeddingCollection([table], device=device, seed=seed)

    def forward(self, *ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[n, D]` of each `[n]`, in one lookup."""
        together = torch.cat(ids)
        lengths = torch.tensor([len(together)], device=together.device)
        found = self.embeddings(KeyedJaggedTensor([self.feature], together, lengths=lengths))
        return found[self.feature].values().split([len(part) for part in ids])


@dataclass(frozen=True, slots=True)
class History:
    """Items of rows, oldest first: ids `[T]`, offsets `[B + 1]`, times `[T]` in seconds or None."""

    ids: torch.Tensor
    offsets: torch.Tensor
    times: torch.Tensor | None = None

    def last(self, most: int) -> History:
        """Of each row the newest items, at most so many."""
        lengths = self.offsets.diff()
        if not len(self.ids) or int(lengths.max()) <= most:
            return self
        ends = self.offsets[1:].repeat_interleave(lengths)
        keep = ends - torch.arange(len(self.ids), device=self.ids.device) <= most
        offsets = F.pad(lengths.clamp(max=most).cumsum(0), (1, 0))
        return History(self.ids[keep], offsets, None if self.times is None else self.times[keep])


def before_next(offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(places `[P]` of the items that another follows in their row, places of those that follow them)."""
    is_last = torch.zeros(total, dtype=torch.bool, device=offsets.device)
    ends = offsets[1:][offsets.diff() > 0] - 1
    is_last[ends] = True
    places = (~is_last).nonzero().flatten()
    return places, places + 1


def normalized(vectors: torch.Tensor, whether: bool) -> torch.Tensor:
    """Vectors of length 1, or as they are."""
    return F.normalize(vectors, dim=1) if whether else vectors
