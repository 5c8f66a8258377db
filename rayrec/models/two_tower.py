"""Two towers: a network over a query's features, one over an item, and their dot product (Yi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.models.batch import Batch
from rayrec.models.loss import common_dim
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import Question, Reads, Retriever, normalized, small_normal
from rayrec.modules import MLP, EmbeddingCollection
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.lookup import as_collection_table
from rayrec.sparse import KeyedJaggedTensor


class TwoTower(Retriever):
    """Rows with a label above 0 are pairs of a query and an item.

    A feature's vector is the mean of its ids' vectors, zeros for none. A table may serve the item and a feature of the
    query, such as what was liked before.

    Args:
        tables: embedding tables, all of one `embedding_dim`; the one that reads `item` has a row an item.
        num_dense: N, dense features of the query.
        item: the item's feature, one id a row; all other features are the query's.
        towers: layer widths of either tower, after which vectors have the last width; empty: none on the item's side.
        normalize: vectors have length 1.
        loss: `RetrievalLoss`'s arguments.
        device, tables_device, seed: as of the other models.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        num_dense: int,
        *,
        item: str,
        towers: Sequence[int] = (64, 32),
        normalize: bool = True,
        loss: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        tables_device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        own = [table for table in tables if item in table.feature_names]
        if len(own) != 1:
            raise ValueError(f"two_tower: item={item!r} is read by {len(own)} tables; exactly one must read it")
        features = [name for table in tables for name in table.feature_names]
        reads = Reads(tuple(name for name in features if name != item), dense=num_dense > 0)
        super().__init__(own[0].num_embeddings, item, reads, {"kind": "in_batch", "temperature": 0.1, **(loss or {})})
        dim = common_dim("two_tower", list(tables))  # type: ignore[arg-type]
        self.features, self.normalize = features, normalize
        copies = [as_collection_table(table, table.feature_names, small_normal) for table in tables]
        self.embeddings = EmbeddingCollection(copies, device=tables_device, seed=seed)
        width = dim * (len(self.features) - 1) + num_dense
        self.query_tower = MLP(width, list(towers), activation_on_last=False, device=device)
        self.item_tower = MLP(dim, list(towers), activation_on_last=False, device=device)

    def _look_up(self, sparse: KeyedJaggedTensor | None, more: torch.Tensor) -> dict[str, torch.Tensor]:
        """Vectors of each feature's ids, the item's followed by those of the items `more`; one lookup. A batch may lack
        the item, as requests do."""
        there = () if sparse is None else sparse.keys()
        ids = [sparse[name].values() if name in there else more.new_empty(0) for name in self.features]  # type: ignore[index]
        ids[self.features.index(self.item)] = torch.cat([ids[self.features.index(self.item)], more])
        lengths = torch.tensor([len(one) for one in ids], device=more.device)
        found = self.embeddings(KeyedJaggedTensor(self.features, torch.cat(ids), lengths=lengths))
        return {name: found[name].values() for name in self.features}

    def _queries(self, batch: Batch, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [batch.dense]
        for name in self.features:
            if name != self.item:
                lengths = batch.sparse[name].lengths().long()
                rows = torch.arange(batch.rows, device=lengths.device).repeat_interleave(lengths)
                sums = vectors[name].new_zeros(batch.rows, vectors[name].shape[1]).index_add(0, rows, vectors[name])
                parts.append(sums / lengths.clamp(min=1)[:, None])
        return normalized(self.query_tower(torch.cat(parts, dim=1)), self.normalize)

    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        vectors = self._look_up(batch.sparse, drawn)
        chosen, ids = batch.label > 0, batch.sparse[self.item].values()
        if len(ids) != batch.rows:
            raise ValueError(f"two_tower: {len(ids)} ids of feature {self.item!r} for {batch.rows} rows; one a row")
        items = normalized(self.item_tower(vectors[self.item]), self.normalize)
        return Pairs(
            query=self._queries(batch, vectors)[chosen],
            ids=ids[chosen],
            items=items[: batch.rows][chosen],
            drawn=items[batch.rows :],
            weight=None if batch.weight is None else batch.weight[chosen],
        )

    def query(self, batch: Batch) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.int64, device=batch.label.device)
        return self._queries(batch, self._look_up(batch.sparse, none))

    def items(self, ids: torch.Tensor) -> torch.Tensor:
        return normalized(self.item_tower(self._look_up(None, ids)[self.item]), self.normalize)

    def positives(self, batch: Batch) -> torch.Tensor:
        return batch.sparse[self.item].values()[batch.label > 0]

    def question(self, batch: Batch) -> Question:
        """Each pair, with no item left out."""
        chosen = batch.label > 0
        return Question(self.query(batch)[chosen], self.positives(batch))
