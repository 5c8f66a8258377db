"""`Retriever`, the base class of models that find items, and the parts that sequence models share.

A model of your own defines `query`, `items`, `pairs` and `question`; training, full-corpus evaluation, the index and
the service use only these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed import comm
from rayrec.models.batch import Batch, Prepared
from rayrec.models.item_features import ItemFeatures
from rayrec.models.loss import rank_mean
from rayrec.models.retrieval_loss import Pairs, RetrievalLoss, with_temperature
from rayrec.modules import EmbeddingCollection
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.lookup import as_collection_table
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class QueryInputs:
    """The inputs of a query, which a request must contain.

    Args:
        features: sparse features.
        lists: times and numbers of sequences, as `sequence.name`.
        dense: the query reads dense features.
        dense_columns: which; None: all of the batch.
        seen: the feature with the items that the answer leaves out; None: no item is left out.
    """

    features: tuple[str, ...]
    lists: tuple[str, ...] = ()
    dense: bool = False
    seen: str | None = None
    dense_columns: tuple[int, ...] | None = None


class Retriever(nn.Module, ABC):
    """Base class of models that map queries and items to vectors; the score is the dot product.

    Args:
        num_items: I; items are rows [0, I) of the item table.
        item: the feature that holds item ids.
        reads: the inputs of `query`.
        loss: arguments of `RetrievalLoss` except `num_items`; `model.loss` of a config replaces them.
        normalize: vectors have length 1; the temperature of the loss is then 0.05 by default, else 1.
    """

    def __init__(
        self,
        num_items: int,
        item: str,
        reads: QueryInputs,
        loss: dict[str, Any] | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.num_items, self.item, self.reads = num_items, item, reads
        self.normalize = normalize
        self.use_loss(loss)
        self.group: comm.Group = None
        self._read_items: Callable[[], ItemFeatures] | None = None
        self._own_items: ItemFeatures | None = None

    @abstractmethod
    def query(self, batch: Batch) -> torch.Tensor:
        """Returns `[B, D]`, one vector per row."""

    @abstractmethod
    def items(self, ids: torch.Tensor, features: ItemFeatures | None = None) -> torch.Tensor:
        """Returns vectors `[C, D]` of the items `[C]`. Collective if the table is sharded.

        Args:
            features: of these items, for a model that reads them; None: those of `features_of`.
        """

    @abstractmethod
    def pairs(self, batch: Batch, drawn: torch.Tensor) -> Pairs:
        """Returns the positive pairs of the batch, and vectors of the items `drawn [C]`, with a single lookup."""

    @abstractmethod
    def question(self, batch: Batch) -> EvalQueries:
        """Returns the queries of full-corpus evaluation; rows without a target have none."""

    def positives(self, batch: Batch) -> torch.Tensor:
        """Returns the ids of the positive items in the batch."""
        return batch.sparse[self.item].values()

    def candidates(self, batch: Batch) -> torch.Tensor:
        """Returns the ids that the batch adds to the candidates of an in-batch loss."""
        return self.positives(batch)

    def use_loss(self, loss: dict[str, Any] | None) -> None:
        """Replaces the loss; call it before the tables are sharded.

        Args:
            loss: arguments of `RetrievalLoss` except `num_items`.
        """
        self.loss = RetrievalLoss(self.num_items, **with_temperature(loss, self.normalize))

    @property
    def has_item_features(self) -> bool:
        """Whether `items` reads features of the items beside their ids."""
        return False

    def use_items(self, read: Callable[[], ItemFeatures]) -> None:
        """Gives a model with item features those of the items in each row of the item table.

        Args:
            read: is called when they are first needed.
        """
        self._read_items, self._own_items = read, None

    def features_of(self, items: torch.Tensor) -> ItemFeatures:
        """Returns the features of items `[C]`, which are table rows.

        Raises:
            ValueError: `use_items` was not called.
        """
        if self._read_items is None:
            raise ValueError(f"{type(self).__name__}: the features of the items are not known; call use_items first")
        if self._own_items is None:
            self._own_items = self._read_items()
        return self._own_items.taken(items.cpu()).to(items.device)

    def on_sharded(self, group: comm.Group) -> None:
        """Sets the ranks of the loss; called when the tables are sharded over `group`."""
        self.group = group

    def prepare(self, batch: Batch, step: int | None = None, hosts: comm.Group = None) -> Batch:
        """Returns the batch with the candidates of its training step, and what the step needs to know on the host.

        The trainer calls it for batches on the host, ahead of their steps; `forward` calls it for others.

        Args:
            step: number of the step, as `self.loss.step` counts; default: the next one.
            hosts: group of the same ranks for CPU tensors, over which the positives are gathered here, for losses that
                read those of all ranks; all ranks then call this. None: they are gathered in the step, if there are
                several ranks.
        """
        on_host = batch
        if batch.label.device.type != "cpu":
            lists = {name: values.cpu() for name, values in batch.lists.items()}
            on_host = replace(batch, sparse=batch.sparse.on_host(), label=batch.label.cpu(), lists=lists)
        on_host.sparse.length_per_key()  # kept, so that nothing on the device is read for it
        prepared = self._prepared(on_host, self.loss.draw(self.group, step))
        if "pool" in prepared.index and (hosts is not None or self.group is None or self.group.size() == 1):
            prepared = _of_all_ranks(prepared, hosts, count=self.loss.kind.in_batch)
        return replace(batch, prepared=prepared)

    def _prepared(self, batch: Batch, drawn: torch.Tensor) -> Prepared:
        """Returns what `pairs` reads, on the host, where the batch and `drawn` are."""
        return Prepared(drawn=drawn)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and zeros `[B]` as logits. Collective, also for an empty batch.

        Each rank returns its share; the weighted sum over ranks is the global mean loss.
        """
        if batch.prepared is None:
            prepared = self.prepare(batch).prepared
            assert prepared is not None
            device = batch.label.device
            batch = replace(batch, prepared=prepared.map(lambda tensor: tensor.to(device, non_blocking=True)))
        assert batch.prepared is not None
        drawn = batch.prepared.drawn
        share = self.loss(self.pairs(batch, drawn), drawn, self.group, batch.prepared)
        loss = rank_mean(share, batch, self.group)
        # `share * 0` keeps the collectives in the backward of a rank with an empty batch.
        return loss, share * 0 + share.new_zeros(batch.rows)


def _of_all_ranks(prepared: Prepared, hosts: comm.Group, count: bool) -> Prepared:
    """Gathers the positives, or the candidates of an in-batch loss, from all ranks.

    Args:
        count: also counts the distinct ones.
    """
    own = prepared.index["pool"]
    sizes = comm.all_gather(torch.tensor([len(own)]), hosts).flatten().tolist()
    index = {**prepared.index, "pool": (pool := comm.all_gather_uneven(own, hosts))}
    if count:
        index["met"], index["times_met"] = pool.unique(return_counts=True)
    return replace(prepared, index=index, pool_sizes=tuple(sizes))


def small_normal(rows: torch.Tensor) -> None:
    """Initializes an item table in place."""
    rows.normal_(std=0.02)


class ItemVectors(nn.Module):
    """The item table, which serves histories, positives and candidates, and tables of side features of histories.

    Args:
        tables: exactly one reads `feature`, and one each of `side` and of `own`.
        feature: the feature that holds item ids.
        device: device of the tables.
        seed: seed of their initial weights.
        side: features whose vectors are added to those of a history's items.
        own: sparse features of an item itself, which it has without a row.

    Raises:
        ValueError: no table or several tables read a feature, or a table has another width.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        feature: str,
        device: torch.device | str | None,
        seed: int | None,
        side: Sequence[str] = (),
        own: Sequence[str] = (),
    ) -> None:
        super().__init__()
        item_table = only_table_of(feature, tables)
        self.feature, self.num_items, self.dim = feature, item_table.num_embeddings, item_table.embedding_dim
        self.side, self.own = tuple(side), tuple(own)
        if feature in self.side or len(set(self.side)) < len(self.side):
            raise ValueError(f"side={list(self.side)} must be features other than {feature!r}, each once")
        for name in self.own:
            if name in self.side:
                raise ValueError(
                    f"feature {name!r} is in side, for the rows' histories, and in item_features, for items without a "
                    "row: give each a feature of its own, which may share the table"
                )
        readers = {name: only_table_of(name, tables) for name in (feature, *self.side, *self.own)}
        for name, table in readers.items():
            if table.embedding_dim != self.dim:
                kind = "side" if name in self.side else "item"
                raise ValueError(
                    f"{kind} feature {name!r}: its table has embedding_dim {table.embedding_dim}, the items' "
                    f"{self.dim}; they must be equal"
                )
        configs = []
        for table in {table.name: table for table in readers.values()}.values():
            names = [name for name in readers if readers[name].name == table.name]
            configs.append(as_collection_table(table, names, small_normal))
        self.embeddings = EmbeddingCollection(configs, device=device, seed=seed)

    def of_history(self, ids: torch.Tensor, side: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns `[T, D]`, the vectors of items plus those of their side features, with a single lookup."""
        if torch.compiler.is_exporting():  # `torch.tensor` and `len` would make constants of sizes: each id is a row
            values, total = torch.cat([ids, *side]), ids.shape[0]
            keys, lengths = [self.feature, *self.side], torch.ones_like(values)
            kjt = KeyedJaggedTensor(keys, values, lengths=lengths, stride=total, length_per_key=[total] * len(keys))
        else:
            kjt = self.lookup(ids, side=side)
        vectors_TD: torch.Tensor = self.with_side(self.embeddings(kjt))
        return vectors_TD

    def with_side(self, looked_up: Mapping[str, JaggedTensor]) -> torch.Tensor:
        """Returns `[T, D]`, the sum of the vectors of T items, the first of a lookup, and their side features."""
        vectors_TD = looked_up[self.feature].values()
        for name in self.side:
            side_TD = looked_up[name].values()
            vectors_TD = vectors_TD[: side_TD.shape[0]] + side_TD
        return vectors_TD

    def lookup(
        self, *ids: torch.Tensor, side: Sequence[torch.Tensor] = (), own: Mapping[str, torch.Tensor] | None = None
    ) -> KeyedJaggedTensor:
        """The input of the tables.

        Args:
            ids: item ids `[n]`, one tensor after the other.
            side: ids of each side feature; default: none.
            own: ids of each own feature; default: none.
        """
        all_ids = torch.cat(ids)
        if not (self.side or self.own):
            lengths = torch.full((1,), len(all_ids), device=all_ids.device)
            return KeyedJaggedTensor([self.feature], all_ids, lengths=lengths, length_per_key=[len(all_ids)])
        none = all_ids[:0]
        parts = [all_ids, *(side or [none] * len(self.side)), *((own or {}).get(name, none) for name in self.own)]
        sizes = [len(part) for part in parts]
        # Filled on the device: a copy of the sizes would wait for it.
        lengths = torch.cat([torch.full((1,), size, device=all_ids.device) for size in sizes])
        keys = [self.feature, *self.side, *self.own]
        return KeyedJaggedTensor(keys, torch.cat(parts), lengths=lengths, length_per_key=sizes)


def only_table_of(feature: str, tables: Sequence[BaseEmbeddingConfig]) -> BaseEmbeddingConfig:
    """Returns the table that reads a feature.

    Raises:
        ValueError: no table or several tables read it.
    """
    readers = [table for table in tables if feature in table.feature_names]
    if len(readers) != 1:
        raise ValueError(f"feature {feature!r} is read by {len(readers)} tables; exactly one must read it")
    return readers[0]


@dataclass(frozen=True, slots=True)
class EvalQueries:
    """Queries of full-corpus evaluation.

    Args:
        query: `[Q, D]`.
        target: `[Q]`, the item that should rank first.
        seen: ids `[N]` with offsets `[Q + 1]` that the ranking leaves out; None: no item is left out.
        rows: `[Q]`, the row of each query, for sample weights, `by_time` and slices; None: query i is of row i.
    """

    query: torch.Tensor
    target: torch.Tensor
    seen: tuple[torch.Tensor, torch.Tensor] | None = None
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Item histories of B rows, oldest first.

    Args:
        ids: `[T]`.
        offsets: `[B + 1]`.
        times: `[T]`, in seconds, or None.
        side: ids `[T]` of each side feature.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    times: torch.Tensor | None = None
    side: tuple[torch.Tensor, ...] = ()

    def last(self, max_length: int) -> History:
        """Returns the newest items of each row, at most `max_length`."""
        lengths = self.offsets.diff()
        if not len(self.ids) or int(lengths.max()) <= max_length:
            return self
        ends = self.offsets[1:].repeat_interleave(lengths)
        keep = ends - torch.arange(len(self.ids), device=self.ids.device) <= max_length
        return self.where(keep, F.pad(lengths.clamp(max=max_length).cumsum(0), (1, 0)))

    def where(self, keep_T: torch.Tensor, offsets: torch.Tensor) -> History:
        """Returns the items where `keep_T` holds; `offsets` are theirs."""
        times = None if self.times is None else self.times[keep_T]
        return History(self.ids[keep_T], offsets, times, tuple(ids[keep_T] for ids in self.side))


@dataclass(frozen=True, slots=True)
class HistoryOf:
    """Reads the histories of a batch.

    Args:
        feature: the list of items.
        times: their times as `sequence.name`; None: none.
        side: lists of the same lengths, of side features.
    """

    feature: str
    times: str | None = None
    side: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> History:
        """
        Raises:
            ValueError: the times are missing in the batch, or a side feature has another number of ids than the items.
        """
        items = batch.sparse[self.feature]
        side = [batch.sparse[name] for name in self.side]
        if not torch.compiler.is_exporting():
            for name, values in zip(self.side, side, strict=True):
                if not torch.equal(values.lengths(), items.lengths()):
                    raise ValueError(
                        f"side feature {name!r} must have an id for each item of {self.feature!r}; list both in one of "
                        "schema.sequences"
                    )
        if self.times is not None and self.times not in batch.lists:
            raise ValueError(
                f"the batch lacks the list {self.times!r}; it has {sorted(batch.lists)}. See schema.sequences"
            )
        times = None if self.times is None else batch.lists[self.times]
        return History(items.values(), items.offsets().long(), times, tuple(values.values() for values in side))


def batch_of(feature: str, histories: Sequence[Sequence[int]]) -> Batch:
    """Returns a batch that contains only histories."""
    lengths = torch.tensor([len(history) for history in histories], dtype=torch.int64)
    ids = torch.tensor([item for history in histories for item in history], dtype=torch.int64)
    kjt = KeyedJaggedTensor([feature], ids, lengths=lengths)
    return Batch(torch.empty(len(histories), 0), kjt, torch.ones(len(histories)))


def before_next(offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions `[P]` of all items except the last of each row, and the positions of their successors."""
    is_last = torch.zeros(total, dtype=torch.bool, device=offsets.device)
    ends = offsets[1:][offsets.diff() > 0] - 1
    is_last[ends] = True
    positions = (~is_last).nonzero().flatten()
    return positions, positions + 1


def normalized(vectors: torch.Tensor, normalize: bool) -> torch.Tensor:
    """Scales vectors to length 1 if `normalize`."""
    return F.normalize(vectors, dim=1) if normalize else vectors
