"""`NextItem`: an encoder of histories, trained at each position to retrieve the next item; SASRec and HSTU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.models.batch import Batch, Prepared
from rayrec.models.item_features import ItemFeatures, ItemInputs, lengths_of
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import (
    EvalQueries,
    History,
    HistoryOf,
    ItemVectors,
    QueryInputs,
    Retriever,
    before_next,
    normalized,
    only_table_of,
)
from rayrec.modules.attention import Layout, PaddedLayout
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder
from rayrec.modules.hstu import HSTUConfig, HSTUEncoder
from rayrec.modules.positions import Positions
from rayrec.sparse import JaggedTensor


class NextItem(Retriever):
    """Retrieves the next item of a history; training uses all positions in one pass.

    Args:
        item_vectors: the item table.
        encoder: causal; maps `(values [T, D], Layout)` to `[T, D]`.
        history: returns the histories of a batch, oldest first.
        max_length: the encoder reads at most this many items, the newest.
        positions: position embeddings added to the item vectors; None: the encoder has its own.
        dropout: dropout of the encoder's input.
        normalize: scale queries and items to length 1.
        loss: arguments of `RetrievalLoss`.
        item_inputs: features of items beside their ids; the vectors of sparse ones, and a linear layer of dense ones,
            are added to the vectors of items that are scored. None: none.
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
        item_inputs: ItemInputs | None = None,
    ) -> None:
        item, times = item_vectors.feature, history.times if isinstance(history, HistoryOf) else None
        reads = QueryInputs((item, *item_vectors.side), () if times is None else (times,), seen=item)
        super().__init__(item_vectors.num_items, item, reads, loss, normalize)
        self.item_vectors, self.encoder, self.positions = item_vectors, encoder, positions
        self.history, self.max_length = history, max_length
        self.dropout = nn.Dropout(dropout)
        self.item_inputs = item_inputs if item_inputs is not None and item_inputs.width else None
        if self.item_inputs is not None and self.item_inputs.dense_columns:
            self.item_layer = nn.Linear(len(self.item_inputs.dense_columns), item_vectors.dim, bias=False)
            nn.init.zeros_(self.item_layer.weight)  # numbers of any size do not hide the ids at first
        self.longest: int | None = None  # most items of a history in training, the last target included

    def encode(self, vectors_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Returns `[T, D]`: at each position the query for the next item."""
        x_TD = vectors_TD * vectors_TD.shape[1] ** 0.5
        if self.positions is not None:
            x_TD = x_TD + self.positions(layout)
        return normalized(self.encoder(self.dropout(x_TD), layout), self.normalize)

    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        """Returns a pair for each position except the last of each row."""
        prepared = self._prepared(batch, drawn) if batch.prepared is None else batch.prepared
        assert prepared.lookup is not None
        inputs, following, ids = (prepared.index[name] for name in ("inputs", "following", "positives"))
        layout = Layout.of_parts(prepared.index, prepared.widths)
        looked_up = self.item_vectors.embeddings(prepared.lookup)
        vectors_CD = looked_up[self.item].values()
        vectors_TD, drawn_CD = vectors_CD.split([len(vectors_CD) - len(drawn), len(drawn)])
        items_PD, lengths = vectors_TD[following], dict[str, torch.Tensor]()
        if self.item_inputs is not None:
            lengths = {name: prepared.index[lengths_of(name)] for name in self.item_inputs.sparse}
        items_CD = self._with_features(torch.cat([items_PD, drawn_CD]), looked_up, lengths, prepared.numbers)
        items_PD, drawn_CD = items_CD.split([len(items_PD), len(drawn)])
        return Pairs(
            query=self.encode(self.item_vectors.with_side(looked_up)[inputs], layout),
            ids=ids,
            items=items_PD,
            drawn=drawn_CD,
            weight=None if batch.weight is None else batch.weight[layout.row_of],
        )

    def _prepared(self, batch: Batch, drawn: torch.Tensor) -> Prepared:
        history = self.history(batch).last(self.max_length + 1)
        inputs, following = before_next(history.offsets, len(history.ids))
        lengths = (history.offsets.diff() - 1).clamp(min=0)
        times = history.times
        layout = Layout(
            F.pad(lengths.cumsum(0), (1, 0)),
            times=None if times is None else times[inputs],
            next_times=None if times is None else times[following],
            total=len(inputs),
        )
        index, widths = layout.parts()
        index |= {"inputs": inputs, "following": following, "positives": history.ids[following]}
        if self.loss.reads_all_positives(self.group):
            index["pool"] = index["positives"]
        own: dict[str, torch.Tensor] | None = None
        numbers: torch.Tensor | None = None
        if self.item_inputs is not None:
            features = self.features_of(torch.cat([index["positives"], drawn]))
            own, numbers = self.item_inputs.ids(features), self.item_inputs.dense(features)
            index |= {lengths_of(name): lengths for name, lengths in self.item_inputs.lengths(features).items()}
        lookup = self.item_vectors.lookup(history.ids, drawn, side=history.side, own=own)
        return Prepared(drawn=drawn, lookup=lookup, index=index, widths=widths, numbers=numbers)

    def query(self, batch: Batch) -> torch.Tensor:
        """Returns `[B, D]`, the query after the newest item of each row; zeros for a row without history.

        A model that reads times asks for the item at `batch.time`, or without it, at the time of the newest item.
        """
        history = self.history(batch)
        if torch.compiler.is_exporting():
            return self._padded_query(history, batch.time)
        return self._query(history, batch.time)

    def _query(self, history: History, now_B: torch.Tensor | None) -> torch.Tensor:
        """
        Args:
            now_B: time of the item that is asked for, as training gives each position the time of the next item.
        """
        history = history.last(self.max_length)
        next_times = None
        if history.times is not None and now_B is not None:
            next_times, has_items = history.times.roll(-1), history.offsets.diff() > 0
            next_times[history.offsets[1:][has_items] - 1] = now_B[has_items].to(next_times)
        layout = Layout(history.offsets, history.times, next_times)
        encoded_TD = self.encode(self.item_vectors.of_history(history.ids, history.side), layout)
        nonempty = layout.lengths > 0
        out = encoded_TD.new_zeros(len(nonempty), encoded_TD.shape[1])
        return out.index_put((nonempty,), encoded_TD[layout.offsets[1:][nonempty] - 1])

    def _padded_query(self, history: History, now: torch.Tensor | None) -> torch.Tensor:
        """Returns what `_query` does; no size depends on values, as an exported graph requires."""
        lengths_B = history.offsets.diff().clamp(max=self.max_length)
        steps_W = torch.arange(self.max_length, device=lengths_B.device)
        is_item_BW = steps_W < lengths_B[:, None]
        is_newest_BW = steps_W == lengths_B[:, None] - 1
        # Position 0 of the padded values is for padding; item i follows at i + 1.
        source_BW = torch.where(is_item_BW, (history.offsets[1:] - lengths_B)[:, None] + steps_W + 1, 0)
        times = next_times = None
        if history.times is not None:
            times = F.pad(history.times, (1, 0))[source_BW]
            asked = times if now is None else now[:, None].expand(-1, self.max_length)
            next_times = torch.where(is_newest_BW, asked, times.roll(-1, 1)).flatten()
            times = times.flatten()
        layout = PaddedLayout(lengths_B, self.max_length, times, next_times)
        ids_T, *side = (F.pad(ids, (1, 0))[source_BW.flatten()] for ids in (history.ids, *history.side))
        vectors_TD = self.item_vectors.of_history(ids_T, side)
        encoded_TD = self.encode(vectors_TD, layout)
        newest = layout.offsets[:-1] + (lengths_B - 1).clamp(min=0)
        return torch.where(lengths_B[:, None] > 0, encoded_TD[newest], 0.0)

    @property
    def has_item_features(self) -> bool:
        return self.item_inputs is not None

    def items(self, ids: torch.Tensor, features: ItemFeatures | None = None) -> torch.Tensor:
        """Returns `[C, D]`; the id -1 is of an item without a table row, which has a vector of its features alone."""
        has_row, lengths = ids >= 0, dict[str, torch.Tensor]()
        own: dict[str, torch.Tensor] | None = None
        dense: torch.Tensor | None = None
        if self.item_inputs is not None:
            features = self.features_of(ids) if features is None else features.to(ids.device)
            own, lengths = self.item_inputs.ids(features), self.item_inputs.lengths(features)
            dense = self.item_inputs.dense(features)
        looked_up = self.item_vectors.embeddings(self.item_vectors.lookup(ids[has_row], own=own))
        vectors = looked_up[self.item].values()
        of_ids_CD = vectors.new_zeros(len(ids), vectors.shape[1]).index_put((has_row,), vectors)
        return self._with_features(of_ids_CD, looked_up, lengths, dense)

    def _with_features(
        self,
        of_ids_CD: torch.Tensor,
        looked_up: Mapping[str, JaggedTensor],
        lengths: Mapping[str, torch.Tensor],
        dense: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the vectors `[C, D]` of items.

        Args:
            of_ids_CD: the vectors of their ids.
            looked_up: the vectors of the ids of each own feature.
            lengths: `[C]`, of each own feature.
            dense: `[C, n]`, or None.
        """
        if self.item_inputs is None:
            return normalized(of_ids_CD, self.normalize)
        vectors = {name: looked_up[name].values() for name in self.item_inputs.sparse}
        for input_CN in self.item_inputs(vectors, lengths, None):
            of_ids_CD = of_ids_CD + input_CN
        if dense is not None:
            of_ids_CD = of_ids_CD + self.item_layer(dense)
        return normalized(of_ids_CD, self.normalize)

    def question(self, batch: Batch) -> EvalQueries:
        """Returns a query per row: the target is the newest item, at its time; the ranking leaves out all items before
        it, also those that the query does not read."""
        history = self.history(batch)
        has_target = history.offsets.diff() > 0
        ends = history.offsets[1:][has_target] - 1
        is_prefix = torch.ones(len(history.ids), dtype=torch.bool, device=history.ids.device)
        is_prefix[ends] = False
        offsets = F.pad((history.offsets.diff() - has_target.long()).cumsum(0), (1, 0))
        prefix = history.where(is_prefix, offsets)
        seen_offsets = torch.cat([offsets[:1], offsets[1:][has_target]])
        rows, now_B = has_target.nonzero().flatten(), None
        if history.times is not None:
            now_B = history.times.new_zeros(len(has_target))
            now_B[rows] = history.times[ends]
        read = prefix if self.longest is None else prefix.last(self.longest - 1)
        query = self._query(read, now_B)[has_target]
        return EvalQueries(query, history.ids[ends], (prefix.ids, seen_offsets), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class NextItemInputs:
    """Keyword arguments that `sasrec` and `hstu` share.

    Args:
        history: the feature, a list of items, oldest first.
        side: further features with an id for each item of the history, such as its category, its rating or the action,
            in the same sequence of the schema. Their vectors are added to those of the items that the encoder reads.
            The last one belongs to the newest item, so the query knows it.
        item_features: features of an item itself, sparse or dense, e.g. its category and price. Their vectors, and a
            linear layer of the dense ones, are added to the vectors of the items that are scored, so that an item that
            training never saw has one. Each is a column of `data.entities` by `history`, for a single item. The
            encoder reads those of `side`.
        max_length: the encoder reads at most this many items, the newest.
        blocks: layers of the encoder.
        heads: attention heads.
        dropout: dropout of the encoder and its input.
        loss: arguments of `RetrievalLoss`.
        device: device of the dense part.
        tables_device: device of the item table; it stays on "meta" until it is sharded.
        seed: seed of the initial weights of the item table.
        dense_names: the dense features; needed if `item_features` has some of them.
    """

    history: str
    side: Sequence[str] = ()
    item_features: Sequence[str] = ()
    max_length: int = 50
    blocks: int = 2
    heads: int = 1
    dropout: float = 0.2
    loss: dict[str, Any] | None = None
    device: torch.device | str | None = None
    tables_device: torch.device | str | None = "meta"
    seed: int | None = None
    dense_names: Sequence[str] = ()

    def items(self, model: str, tables: Sequence[BaseEmbeddingConfig]) -> tuple[ItemVectors, ItemInputs]:
        dim = only_table_of(self.history, tables).embedding_dim
        features = [name for table in tables for name in table.feature_names]
        own = ItemInputs(
            model,
            self.item_features,
            item=self.history,
            features=features,
            dense_names=self.dense_names,
            dim=dim,
        )
        return ItemVectors(tables, self.history, self.tables_device, self.seed, self.side, own.sparse), own

    def histories(self, times: str | None = None) -> HistoryOf:
        return HistoryOf(self.history, times, tuple(self.side))

    def sizes(self, dim: int) -> dict[str, Any]:
        """Returns the settings of either encoder."""
        return {"dim": dim, "blocks": self.blocks, "heads": self.heads, "dropout": self.dropout}


def sasrec(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    hidden: int | None = None,
    norm_first: bool = True,
    attention_dropout: float | None = None,
    normalize: bool = False,
    dense_names: Sequence[str] = (),
    **inputs: Annotated[Any, NextItemInputs],
) -> NextItem:
    """SASRec: a causal transformer over a history (Kang and McAuley 2018, arXiv:1808.09781).

    Args:
        tables: one of them reads `history`; its rows are the items, its width is the width of the encoder. Tables of
            `side` have the same width.
        num_dense: ignored.
        dense_names: the dense features.
        hidden: hidden width of the feed-forward networks; null: the width of the items.
        norm_first: normalize before each sublayer (pre-norm); false: after it.
        attention_dropout: dropout of attention weights; null: `dropout`. With 0 and `trainer.dense_precision: bf16`,
            training on a GPU does not pad histories.
        normalize: scale queries and items to length 1; `model.loss.temperature` is then 0.05 by default, else 1.
        inputs: fields of `NextItemInputs`.
    """
    settings = NextItemInputs(**inputs, dense_names=dense_names)
    (items, own), history = settings.items("sasrec", tables), settings.histories()
    with torch.device(settings.device or "cpu"):
        sizes = {**settings.sizes(items.dim), "hidden": hidden, "attention_dropout": attention_dropout}
        encoder = TransformerEncoder(EncoderConfig(**sizes, norm_first=norm_first))
        return NextItem(
            items,
            encoder,
            history,
            settings.max_length,
            positions=Positions(settings.max_length, items.dim),
            dropout=settings.dropout,
            normalize=normalize,
            loss=settings.loss,
            item_inputs=own,
        )


def hstu(
    tables: Sequence[BaseEmbeddingConfig],
    num_dense: int,
    *,
    times: str | None = None,
    qk_dim: int | None = None,
    v_dim: int | None = None,
    normalize: bool = True,
    dense_names: Sequence[str] = (),
    **inputs: Annotated[Any, NextItemInputs],
) -> NextItem:
    """HSTU as a next-item model (Zhai et al. 2024, arXiv:2402.17152).

    Args:
        tables, num_dense, dense_names: see `sasrec`.
        times: times of the history's items, as `sequence.name` of the schema; adds a time bias to the attention.
        qk_dim: width of queries and keys per head; null: the width of the items divided by `heads`.
        v_dim: width of values per head; null: the width of the items divided by `heads`.
        normalize: scale queries and items to length 1; `model.loss.temperature` is then 0.05 by default, else 1.
        inputs: fields of `NextItemInputs`.
    """
    settings = NextItemInputs(**inputs, dense_names=dense_names)
    (items, own), history = settings.items("hstu", tables), settings.histories(times)
    sizes = {**settings.sizes(items.dim), "max_length": settings.max_length, "qk_dim": qk_dim, "v_dim": v_dim}
    with torch.device(settings.device or "cpu"):
        return NextItem(
            items,
            HSTUEncoder(HSTUConfig(**sizes, use_times=times is not None)),
            history,
            settings.max_length,
            positions=Positions(settings.max_length, items.dim, count_from="oldest"),
            dropout=settings.dropout,
            normalize=normalize,
            loss=settings.loss,
            item_inputs=own,
        )
