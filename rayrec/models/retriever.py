"""`Retriever`: the contract of models that find items, and what sequence models share.

A model of your own gives `query`, `items` and `pairs`; training, full-corpus evaluation, the index and the service need
no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch
from rayrec.models.loss import own_mean
from rayrec.models.retrieval_loss import Pairs, RetrievalLoss
from rayrec.modules import EmbeddingCollection
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.lookup import as_collection_table
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Reads:
    """What a query is made of, and so what a request must bring: sparse features, lists as `sequence.name`, whether the
    dense numbers, and the feature of items that were seen, which answers leave out."""

    features: tuple[str, ...]
    lists: tuple[str, ...] = ()
    dense: bool = False
    seen: str | None = None


class Retriever(nn.Module, ABC):
    """Vectors of queries and of items, whose dot product is the score.

    Args:
        loss: `RetrievalLoss`'s arguments but `num_items`.
        num_items: I; items are rows [0, I) of the item table.
        item: the feature whose ids are items.
        reads: what `query` reads of a batch.
    """

    def __init__(self, num_items: int, item: str, reads: Reads, loss: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.num_items, self.item, self.reads = num_items, item, reads
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

    @abstractmethod
    def question(self, batch: Batch) -> Question:
        """For evaluation over the whole corpus; rows without a target ask nothing."""

    def positives(self, batch: Batch) -> torch.Tensor:
        """Ids of the items that the batch's rows chose."""
        return batch.sparse[self.item].values()

    def on_sharded(self, group: comm.Group) -> None:
        """Called when the tables are sharded over `group`."""
        self.group = group

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, zeros `[B]`). Ranks' losses, weighed by their share of all rows' weights, add up to the loss of all
        positions. Collective, also for an empty batch."""
        drawn = self.loss.draw()
        part = self.loss(self.pairs(batch, drawn.ids), drawn, self.group)
        loss = own_mean(part, batch, self.group)
        return loss, part * 0 + part.new_zeros(batch.rows)  # an empty batch's backward goes through the same exchanges


def small_normal(rows: torch.Tensor) -> None:
    """First weights of an item table."""
    rows.normal_(std=0.02)


class ItemVectors(nn.Module):
    """The item table, looked up id by id: as the vectors of a history, of positives and of candidates.

    Args:
        tables: exactly one reads `feature`.
        device, seed: of the table.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        feature: str,
        device: torch.device | str | None,
        seed: int | None,
    ) -> None:
        super().__init__()
        own = [table for table in tables if feature in table.feature_names]
        if len(own) != 1:
            raise ValueError(f"feature {feature!r} is read by {len(own)} tables; exactly one must read it")
        self.feature, self.num_items, self.dim = feature, own[0].num_embeddings, own[0].embedding_dim
        table = as_collection_table(own[0], [feature], small_normal)
        self.embeddings = EmbeddingCollection([table], device=device, seed=seed)

    def forward(self, *ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[n, D]` of each `[n]`, in one lookup."""
        together = torch.cat(ids)
        lengths = torch.tensor([len(together)], device=together.device)
        found = self.embeddings(KeyedJaggedTensor([self.feature], together, lengths=lengths))
        return found[self.feature].values().split([len(part) for part in ids])


@dataclass(frozen=True, slots=True)
class Question:
    """What evaluation asks: `query [Q, D]`, the items `target [Q]` that should come first, and ids that each query has
    seen, `[N]` with offsets `[Q + 1]`; None: no item is left out."""

    query: torch.Tensor
    target: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor] | None = None


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


@dataclass(frozen=True, slots=True)
class HistoryOf:
    """Reads a batch's histories: the list feature, and perhaps its times as `sequence.name`."""

    feature: str
    times: str | None = None

    def __call__(self, batch: Batch) -> History:
        """
        Raises:
            ValueError: the batch has no such times.
        """
        items = batch.sparse[self.feature]
        if self.times is not None and self.times not in batch.lists:
            raise ValueError(f"the batch has no list {self.times!r}, but {sorted(batch.lists)}; see schema.sequences")
        return History(items.values(), items.offsets().long(), None if self.times is None else batch.lists[self.times])


def batch_of(feature: str, histories: Sequence[Sequence[int]]) -> Batch:
    """A batch of histories alone."""
    lengths = torch.tensor([len(one) for one in histories], dtype=torch.int64)
    ids = torch.tensor([item for one in histories for item in one], dtype=torch.int64)
    kjt = KeyedJaggedTensor([feature], ids, lengths=lengths)
    return Batch(torch.empty(len(histories), 0), kjt, torch.ones(len(histories)))


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
