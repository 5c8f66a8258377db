"""`NextItem`: any encoder over a history, trained at each position to find the item that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import History, ItemVectors, Retriever, before_next, normalized
from rayrec.modules.attention import Layout
from rayrec.modules.positions import Positions


class NextItem(Retriever):
    """What comes after a history; all its positions are trained in one pass.

    Args:
        item_vectors: the item table.
        encoder: `(values [T, D], Layout)` to `[T, D]`; causal.
        history: a batch's histories, oldest first.
        max_length: items that the encoder reads at most, the newest.
        positions: vectors added to the items'; None: the encoder knows positions by itself.
        dropout: of the encoder's input.
        normalize: queries and items have length 1.
        loss: `RetrievalLoss`'s arguments.
    """

    def __init__(
        self,
        item_vectors: ItemVectors,
        encoder: nn.Module,
        history: Callable[[Batch], History],
        max_length: int,
        *,
        positions: Positions | None = None,
        dropout: float = 0.0,
        normalize: bool = False,
        loss: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(item_vectors.num_items, loss)
        self.item_vectors, self.encoder, self.positions = item_vectors, encoder, positions
        self.history, self.max_length, self.normalize = history, max_length, normalize
        self.dropout = nn.Dropout(dropout)

    def encode(self, vectors_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`[T, D]`: at each position a query for what follows it."""
        x_TD = vectors_TD * vectors_TD.shape[1] ** 0.5
        if self.positions is not None:
            x_TD = x_TD + self.positions(layout)
        return normalized(self.encoder(self.dropout(x_TD), layout), self.normalize)

    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        """A pair for each position but the last of a row."""
        history = self.history(batch).last(self.max_length + 1)
        vectors_TD, drawn_CD = self.item_vectors(history.ids, drawn)
        inputs, following = before_next(history.offsets, len(history.ids))
        lengths = (history.offsets.diff() - 1).clamp(min=0)
        times = history.times
        layout = Layout(
            F.pad(lengths.cumsum(0), (1, 0)),
            times=None if times is None else times[inputs],
            next_times=None if times is None else times[following],
        )
        return Pairs(
            query=self.encode(vectors_TD[inputs], layout),
            ids=history.ids[following],
            items=normalized(vectors_TD[following], self.normalize),
            drawn=normalized(drawn_CD, self.normalize),
            weight=None if batch.weight is None else batch.weight[layout.row_of],
        )

    def query(self, batch: Batch) -> torch.Tensor:
        """`[B, D]`: what follows each row's newest item; zeros for a row without history."""
        history = self.history(batch).last(self.max_length)
        layout = Layout(history.offsets, history.times)
        encoded_TD = self.encode(self.item_vectors(history.ids)[0], layout)
        known = layout.lengths > 0
        out = encoded_TD.new_zeros(len(known), encoded_TD.shape[1])
        return out.index_put((known,), encoded_TD[layout.offsets[1:][known] - 1])

    def items(self, ids: torch.Tensor) -> torch.Tensor:
        """`[C, D]`."""
        return normalized(self.item_vectors(ids)[0], self.normalize)
