"""Two towers: networks over the features of a query and over an item, scored by dot product (Yi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayrec.models.batch import Batch, Prepared
from rayrec.models.item_features import ItemFeatures, ItemInputs, lengths_of
from rayrec.models.loss import common_dim
from rayrec.models.retrieval_loss import Pairs
from rayrec.models.retriever import EvalQueries, QueryInputs, Retriever, normalized, only_table_of, small_normal
from rayrec.modules import MLP, EmbeddingCollection
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.lookup import as_collection_table
from rayrec.modules.pooling import pool_mean
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class TwoTower(Retriever):
    """Retrieves items for queries; training uses the rows with a label above 0 as positive pairs.

    A feature's vector is the mean of the vectors of its ids, or zeros without ids. One table may read both the item and
    a feature of the query, for example the items liked before.

    With features of its own, an item that training never saw has a vector, of its features alone.

    Args:
        tables: embedding tables, all with the same `embedding_dim`; the rows of the table of `item` are the items.
        num_dense: N, dense features.
        item: the feature with one item id per row.
        item_features: features of the item, sparse or dense, e.g. its category and price, which its tower reads beside
            its id. Each is a column of `data.entities` by the item. All other features belong to the query.
        towers: layer widths of each tower, and so the width of the vectors; empty: the
            tables' own vectors, i.e. matrix factorization; the query then has one feature, which is sparse.
        normalize: scale queries and items to length 1; `model.loss.temperature` is then 0.05 by default, else 1.
        loss: arguments of `RetrievalLoss`.
        dense_names: the feature of each of the N columns; needed if `item_features` has dense ones.
        device: device of the dense part.
        tables_device: device of the tables; they stay on "meta" until they are sharded.
        seed: seed of the initial weights of the tables.

    Raises:
        ValueError: no table or several tables read `item`, widths of tables differ, an item feature is unknown, or
            `towers` is empty and the query or the item is wider than a table.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        num_dense: int,
        *,
        item: str,
        item_features: Sequence[str] = (),
        towers: Sequence[int] = (64, 32),
        normalize: bool = True,
        loss: dict[str, Any] | None = None,
        dense_names: Sequence[str] = (),
        device: torch.device | str | None = None,
        tables_device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        num_items = only_table_of(item, tables).num_embeddings
        features = [name for table in tables for name in table.feature_names]
        dim = common_dim("two_tower", list(tables))  # type: ignore[arg-type]
        own = ItemInputs("two_tower", item_features, item=item, features=features, dense_names=dense_names, dim=dim)
        of_item = own.dense_columns
        of_query = [position for position in range(num_dense) if position not in of_item]
        query_features = tuple(name for name in features if name != item and name not in own.sparse)
        reads = QueryInputs(query_features, dense=bool(of_query), dense_columns=tuple(of_query) if of_item else None)
        super().__init__(num_items, item, reads, {"kind": "in_batch", **(loss or {})}, normalize)
        self.features, self.item_inputs = features, own
        copies = [as_collection_table(table, table.feature_names, small_normal) for table in tables]
        self.embeddings = EmbeddingCollection(copies, device=tables_device, seed=seed)
        width = dim * len(query_features) + len(of_query)
        if not towers and width != dim:
            raise ValueError(
                f"two_tower: towers=[] compares the tables' vectors of width {dim}, but the query has {width} numbers "
                f"(sparse features {', '.join(reads.features) or 'none'}; {len(of_query)} dense); give it one sparse "
                "feature, or set towers"
            )
        if not towers and item_features:
            raise ValueError("two_tower: towers=[] compares the tables' vectors; set towers to use item_features")
        self.query_tower = MLP(width, list(towers), activation_on_last=False, device=device)
        self.item_tower = MLP(dim + own.width, list(towers), activation_on_last=False, device=device)
        self._of_item: torch.Tensor  # columns of the batch's dense part
        self._of_query: torch.Tensor
        self.register_buffer("_of_item", torch.tensor(of_item, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("_of_query", torch.tensor(of_query, dtype=torch.int64, device=device), persistent=False)

    def _lookup(self, ids: Mapping[str, Sequence[torch.Tensor]], like: torch.Tensor) -> KeyedJaggedTensor:
        """Returns the input of the tables: the ids of each feature, one after the other; by default none.

        Args:
            like: ids on the device of the input.
        """
        values = [torch.cat([like[:0], *ids.get(name, ())]) for name in self.features]
        counts = [len(tensor) for tensor in values]
        lengths = torch.tensor(counts, device=like.device)
        return KeyedJaggedTensor(self.features, torch.cat(values), lengths=lengths, length_per_key=counts)

    def _vectors(self, lookup: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Returns the vectors of the ids of each feature."""
        return {name: jagged.values() for name, jagged in self.embeddings(lookup).items()}

    def _queries(
        self, batch: Batch, vectors: dict[str, torch.Tensor], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns `[Q, D]`; the dense part of the batch may be that of the query alone, as in a request.

        Args:
            vectors: of the ids of each feature, in the rows of the queries.
            rows: `[Q]`, the rows of the queries; None: all.
        """
        dense = _taken(batch.dense, rows)
        if len(self._of_item) and dense.shape[1] > len(self._of_query):
            dense = dense.index_select(1, self._of_query)
        columns = [dense]
        for name in self.reads.features:
            columns.append(pool_mean(vectors[name], _taken(batch.sparse[name].lengths(), rows).long()))
        return normalized(self.query_tower(torch.cat(columns, dim=1)), self.normalize)

    def _items(
        self,
        of_ids: torch.Tensor,
        vectors: Mapping[str, torch.Tensor],
        lengths: Mapping[str, torch.Tensor],
        dense: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns `[C, D]`.

        Args:
            of_ids: `[C, dim]`, the vectors of the items' ids.
            vectors: of the ids of each own feature.
            lengths: `[C]`, of each own feature.
            dense: `[C, n]`, None if the items have no dense feature.
        """
        columns = [of_ids, *self.item_inputs(vectors, lengths, dense)]
        return normalized(self.item_tower(torch.cat(columns, dim=1)), self.normalize)

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
        rows = None if self.loss.hard_negatives else positive
        lengths = {
            name: torch.cat([_taken(batch.sparse[name].lengths(), rows).long(), prepared.index[lengths_of(name)]])
            for name in self.item_inputs.sparse
        }
        dense = None
        if prepared.numbers is not None:
            dense = torch.cat([_taken(batch.dense, rows).index_select(1, self._of_item), prepared.numbers])
        items = self._items(vectors[self.item], vectors, lengths, dense)
        of_rows, of_drawn = items.split([len(items) - len(drawn), len(drawn)])
        queries = self._queries(batch, vectors, rows)
        hard = None
        if rows is None:
            hard = ids[negative], of_rows[negative]
            queries, of_rows = queries[positive], of_rows[positive]
        return Pairs(
            query=queries,
            ids=ids[positive],
            items=of_rows,
            drawn=of_drawn,
            weight=None if batch.weight is None else batch.weight[positive],
            hard=hard,
        )

    def _prepared(self, batch: Batch, drawn: torch.Tensor) -> Prepared:
        """Looks up the ids of the rows that the loss reads: all with hard negatives, else those with a positive."""
        is_positive = batch.label > 0
        index = {"positive": is_positive.nonzero().flatten(), "negative": (~is_positive).nonzero().flatten()}
        if self.loss.reads_all_positives(self.group):
            ids, negative = batch.sparse[self.item].values(), index["negative"]
            pool = [ids[index["positive"]], *([ids[negative]] if self.loss.hard_negatives else [])]
            index["pool"] = torch.cat(pool)
        rows = None if self.loss.hard_negatives or not len(index["negative"]) else is_positive
        looked_up = {name: [_ids_of(batch.sparse[name], rows)] for name in self.features}
        looked_up[self.item].append(drawn)
        numbers = None
        if self.has_item_features:
            features = self.features_of(drawn)
            for name, values in self.item_inputs.ids(features).items():
                looked_up[name].append(values)
            index |= {lengths_of(name): lengths for name, lengths in self.item_inputs.lengths(features).items()}
            numbers = self.item_inputs.dense(features)
        return Prepared(drawn=drawn, lookup=self._lookup(looked_up, drawn), index=index, numbers=numbers)

    def query(self, batch: Batch) -> torch.Tensor:
        if torch.compiler.is_exporting():
            return self._queries(batch, self._vectors(batch.sparse))
        looked_up = {name: [batch.sparse[name].values()] for name in self.reads.features}
        like = torch.empty(0, dtype=torch.int64, device=batch.label.device)
        return self._queries(batch, self._vectors(self._lookup(looked_up, like)))

    @property
    def has_item_features(self) -> bool:
        return self.item_inputs.width > 0

    def items(self, ids: torch.Tensor, features: ItemFeatures | None = None) -> torch.Tensor:
        """Returns `[C, D]`; the id -1 is of an item without a table row, which has a vector of its features alone."""
        has_row = ids >= 0
        looked_up, lengths, dense = {self.item: [ids[has_row]]}, dict[str, torch.Tensor](), None
        if self.has_item_features:
            features = self.features_of(ids) if features is None else features.to(ids.device)
            looked_up |= {name: [values] for name, values in self.item_inputs.ids(features).items()}
            lengths, dense = self.item_inputs.lengths(features), self.item_inputs.dense(features)
        vectors = self._vectors(self._lookup(looked_up, ids))
        of_ids = vectors[self.item].new_zeros(len(ids), vectors[self.item].shape[1])
        return self._items(of_ids.index_put((has_row,), vectors[self.item]), vectors, lengths, dense)

    def positives(self, batch: Batch) -> torch.Tensor:
        return batch.sparse[self.item].values()[batch.label > 0]

    def candidates(self, batch: Batch) -> torch.Tensor:
        return batch.sparse[self.item].values() if self.loss.hard_negatives else self.positives(batch)

    def question(self, batch: Batch) -> EvalQueries:
        """Returns a query per positive pair; the ranking leaves no item out."""
        rows = (batch.label > 0).nonzero().flatten()
        return EvalQueries(self.query(batch)[rows], self.positives(batch), rows=rows)


def _taken(of_rows: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The values of some rows; of all for None."""
    return of_rows if rows is None else of_rows.index_select(0, rows)


def _ids_of(jagged: JaggedTensor, is_read: torch.Tensor | None) -> torch.Tensor:
    """The ids of some rows; of all for None."""
    ids = jagged.values()
    return ids if is_read is None else ids[is_read.repeat_interleave(jagged.lengths(), output_size=len(ids))]
