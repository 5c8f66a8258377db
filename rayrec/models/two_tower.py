"""Two towers: networks over the features of a query and over an item, scored by dot product (Yi et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.models.batch import Batch, Prepared
from rayrec.models.loss import common_dim
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import EvalQueries, QueryInputs, Retriever, normalized, only_table_of, small_normal
from rayrec.modules import MLP, EmbeddingCollection
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.lookup import as_collection_table
from rayrec.modules.pooling import pool_mean
from rayrec.sparse import KeyedJaggedTensor


class TwoTower(Retriever):
    """Retrieves items for queries; training uses the rows with a label above 0 as positive pairs.

    A feature's vector is the mean of the vectors of its ids, or zeros without ids. One table may read both the item and
    a feature of the query, for example the items liked before.

    Args:
        tables: embedding tables, all with the same `embedding_dim`; the rows of the table of `item` are the items.
        num_dense: N, dense features of the query.
        item: the feature with one item id per row; all other features belong to the query.
        towers: layer widths of each tower, and so the width of the vectors; empty: the
            tables' own vectors, i.e. matrix factorization; the query then has one feature, which is sparse.
        normalize: scale queries and items to length 1; `model.loss.temperature` is then 0.05 by default, else 1.
        loss: arguments of `RetrievalLoss`.
        device: device of the dense part.
        tables_device: device of the tables; they stay on "meta" until they are sharded.
        seed: seed of the initial weights of the tables.

    Raises:
        ValueError: no table or several tables read `item`, widths of tables differ, or `towers` is empty and the query
            is wider than an item.
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
        num_items = only_table_of(item, tables).num_embeddings
        features = [name for table in tables for name in table.feature_names]
        reads = QueryInputs(tuple(name for name in features if name != item), dense=num_dense > 0)
        super().__init__(num_items, item, reads, {"kind": "in_batch", **(loss or {})}, normalize)
        dim = common_dim("two_tower", list(tables))  # type: ignore[arg-type]
        self.features = features
        copies = [as_collection_table(table, table.feature_names, small_normal) for table in tables]
        self.embeddings = EmbeddingCollection(copies, device=tables_device, seed=seed)
        width = dim * (len(self.features) - 1) + num_dense
        if not towers and width != dim:
            raise ValueError(
                f"two_tower: towers=[] compares the tables' vectors of width {dim}, but the query has {width} numbers "
                f"(sparse features {', '.join(reads.features) or 'none'}; {num_dense} dense); give it one sparse "
                "feature, or set towers"
            )
        self.query_tower = MLP(width, list(towers), activation_on_last=False, device=device)
        self.item_tower = MLP(dim, list(towers), activation_on_last=False, device=device)

    def _lookup(self, sparse: KeyedJaggedTensor | None, items: torch.Tensor) -> KeyedJaggedTensor:
        """Returns the input of the tables: `items` follow the ids of the item feature, which requests lack."""
        keys = () if sparse is None else sparse.keys()
        ids = [sparse[name].values() if name in keys else items.new_empty(0) for name in self.features]  # type: ignore[index]
        ids[self.features.index(self.item)] = torch.cat([ids[self.features.index(self.item)], items])
        counts = [len(tensor) for tensor in ids]
        lengths = torch.tensor(counts, device=items.device)
        return KeyedJaggedTensor(self.features, torch.cat(ids), lengths=lengths, length_per_key=counts)

    def _vectors(self, lookup: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Returns the vectors of the ids of each feature."""
        return {name: jagged.values() for name, jagged in self.embeddings(lookup).items()}

    def _queries(self, batch: Batch, vectors: dict[str, torch.Tensor]) -> torch.Tensor:
        columns = [batch.dense]
        for name in self.features:
            if name != self.item:
                lengths = batch.sparse[name].lengths().long()
                columns.append(pool_mean(vectors[name], lengths))
        return normalized(self.query_tower(torch.cat(columns, dim=1)), self.normalize)

    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        prepared = self._prepared(batch, drawn) if batch.prepared is None else batch.prepared
        assert prepared.lookup is not None
        vectors = self._vectors(prepared.lookup)
        positive, negative = prepared.index["positive"], prepared.index["negative"]
        ids = batch.sparse[self.item].values()
        if len(ids) != batch.rows:
            raise ValueError(
                f"two_tower: feature {self.item!r} has {len(ids)} ids in {batch.rows} rows; it needs one id per row"
            )
        items = normalized(self.item_tower(vectors[self.item]), self.normalize)
        hard = (ids[negative], items[: batch.rows][negative]) if self.loss.hard_negatives else None
        return Pairs(
            query=self._queries(batch, vectors)[positive],
            ids=ids[positive],
            items=items[: batch.rows][positive],
            drawn=items[batch.rows :],
            weight=None if batch.weight is None else batch.weight[positive],
            hard=hard,
        )

    def _prepared(self, batch: Batch, drawn: torch.Tensor) -> Prepared:
        is_positive = batch.label > 0
        index = {"positive": is_positive.nonzero().flatten(), "negative": (~is_positive).nonzero().flatten()}
        if self.loss.reads_all_positives(self.group):
            ids, negative = batch.sparse[self.item].values(), index["negative"]
            pool = [ids[index["positive"]], *([ids[negative]] if self.loss.hard_negatives else [])]
            index["pool"] = torch.cat(pool)
        return Prepared(drawn=drawn, lookup=self._lookup(batch.sparse, drawn), index=index)

    def query(self, batch: Batch) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return self._queries(batch, self._vectors(batch.sparse))
        no_items = torch.empty(0, dtype=torch.int64, device=batch.label.device)
        return self._queries(batch, self._vectors(self._lookup(batch.sparse, no_items)))

    def items(self, ids: torch.Tensor) -> torch.Tensor:
        return normalized(self.item_tower(self._vectors(self._lookup(None, ids))[self.item]), self.normalize)

    def positives(self, batch: Batch) -> torch.Tensor:
        return batch.sparse[self.item].values()[batch.label > 0]

    def candidates(self, batch: Batch) -> torch.Tensor:
        return batch.sparse[self.item].values() if self.loss.hard_negatives else self.positives(batch)

    def question(self, batch: Batch) -> EvalQueries:
        """Returns a query per positive pair; the ranking leaves no item out."""
        rows = (batch.label > 0).nonzero().flatten()
        return EvalQueries(self.query(batch)[rows], self.positives(batch), rows=rows)
