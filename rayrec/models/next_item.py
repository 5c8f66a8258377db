"""`NextItem`: any encoder over a history, trained at each position to find the item that follows; SASRec and HSTU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import History, HistoryOf, ItemVectors, Question, Reads, Retriever, before_next, normalized
from rayrec.modules.attention import Layout
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
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
        item, times = item_vectors.feature, history.times if isinstance(history, HistoryOf) else None
        reads = Reads((item,), () if times is None else (times,), seen=item)
        super().__init__(item_vectors.num_items, item, reads, loss)
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
        return self._query(self.history(batch))

    def _query(self, history: History) -> torch.Tensor:
        history = history.last(self.max_length)
        layout = Layout(history.offsets, history.times)
        encoded_TD = self.encode(self.item_vectors(history.ids)[0], layout)
        known = layout.lengths > 0
        out = encoded_TD.new_zeros(len(known), encoded_TD.shape[1])
        return out.index_put((known,), encoded_TD[layout.offsets[1:][known] - 1])

    def items(self, ids: torch.Tensor) -> torch.Tensor:
        """`[C, D]`."""
        return normalized(self.item_vectors(ids)[0], self.normalize)

    def question(self, batch: Batch) -> Question:
        """Of each row its newest item, asked for with those before it, which are left out of the answer."""
        history = self.history(batch)
        asks = history.offsets.diff() > 0
        ends = history.offsets[1:][asks] - 1
        kept = torch.ones(len(history.ids), dtype=torch.bool, device=history.ids.device)
        kept[ends] = False
        offsets = F.pad((history.offsets.diff() - asks.long()).cumsum(0), (1, 0))
        before = History(history.ids[kept], offsets, None if history.times is None else history.times[kept])
        asked = torch.cat([offsets[:1], offsets[1:][asks]])
        return Question(self._query(before)[asks], history.ids[ends], (before.ids, asked))


@dataclass(frozen=True, slots=True, kw_only=True)
class NextItemInputs:
    """What `sasrec` and `hstu` share, as their keywords.

    Args:
        history: the feature, a list of items, oldest first.
        max_length: items that the encoder reads at most, the newest.
        blocks: layers of the encoder.
        heads: of each attention.
        dropout: of the encoder and its input.
        loss: `RetrievalLoss`'s arguments.
        device, tables_device: as of the other models.
        seed: of the item table's first weights.
    """

    history: str
    max_length: int = 50
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.2
    loss: dict[str, Any] | None = None
    device: torch.device | str | None = None
    tables_device: torch.device | str | None = "meta"
    seed: int | None = None

    def items(self, tables: Sequence[BaseEmbeddingConfig]) -> ItemVectors:
        return ItemVectors(tables, self.history, self.tables_device, self.seed)

    def sizes(self, dim: int) -> dict[str, Any]:
        """What both encoders are made of."""
        return {"dim": dim, "blocks": self.blocks, "heads": self.heads, "dropout": self.dropout}


def sasrec(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    hidden: int | None = None,
    norm_first: bool = True,
    normalize: bool = False,
    **inputs: Annotated[Any, NextItemInputs],
) -> NextItem:
    """SASRec: a causal transformer over a history (Kang and McAuley 2018, arXiv:1808.09781).

    Args:
        tables: one of them reads `history`; its rows are the items, its width is the encoder's.
        num_dense: not read.
        hidden: width between the two layers of each position's network; null: that of the items.
        norm_first: normalize the input of each part; false: its sum with the input.
        normalize: queries and items have length 1.
        inputs: fields of `NextItemInputs`.
    """
    given = NextItemInputs(**inputs)
    items, history = given.items(tables), HistoryOf(given.history)
    with torch.device(given.device or "cpu"):
        encoder = TransformerEncoder(EncoderConfig(**given.sizes(items.dim), hidden=hidden, norm_first=norm_first))
        return NextItem(
            items,
            encoder,
            history,
            given.max_length,
            positions=Positions(given.max_length, items.dim),
            dropout=given.dropout,
            normalize=normalize,
            loss=given.loss,
        )


def hstu(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    times: str | None = None,
    qk_dim: int | None = None,
    v_dim: int | None = None,
    normalize: bool = True,
    **inputs: Annotated[Any, NextItemInputs],
) -> NextItem:
    """HSTU as a next-item model (Zhai et al. 2024, arXiv:2402.17152).

    Args:
        tables, num_dense: as of `sasrec`.
        times: of the history's items, as `sequence.name` of the schema; with them attention has a bias by time.
        qk_dim: width of each head's queries and keys; null: that of the items, divided by `heads`.
        v_dim: width of each head's values; as `qk_dim`.
        normalize: queries and items have length 1; scores are then cosines over a temperature of 0.05.
        inputs: fields of `NextItemInputs`.
    """
    given = NextItemInputs(**inputs)
    items, history = given.items(tables), HistoryOf(given.history, times)
    sizes = {**given.sizes(items.dim), "max_length": given.max_length, "qk_dim": qk_dim, "v_dim": v_dim}
    with torch.device(given.device or "cpu"):
        return NextItem(
            items,
            HSTUEncoder(HSTUConfig(**sizes, use_times=times is not None)),
            history,
            given.max_length,
            positions=Positions(given.max_length, items.dim, count_from="oldest"),
            dropout=given.dropout,
            normalize=normalize,
            loss={"temperature": 0.05 if normalize else 1.0, **(given.loss or {})},
        )
