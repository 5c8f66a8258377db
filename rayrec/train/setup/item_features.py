"""Features of items for the item tower: those of `data.entities` that rows get by their item."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from rayrec.data import Mapping
from rayrec.data.arrays.arrow_types import int64_of
from rayrec.data.mapping.derived.joins import source_of
from rayrec.data.mapping.derived.specs import Entity
from rayrec.data.mapping.entities import EntityTable, open_entities
from rayrec.inference.item_rows import ItemRows
from rayrec.models.item_features import ItemFeatures
from rayrec.storage.errors import DataError
from rayrec.train.config.train_config import TrainConfig

_BLOCK_ROWS = 1 << 18
# The last features that were read, with their tables: commands build a model several times.
_LAST = dict[tuple[str, str, tuple[str, ...], int], tuple[list[EntityTable], ItemFeatures]]()
_LATEST_US = 7_258_118_400_000_000 - 1  # the last time that is read: the end of 2199


@dataclass(frozen=True, slots=True)
class FoundItems:
    """Items as their features are found.

    Args:
        rows: `[n]`, the row of each item in the item table; -1: none of its own, e.g. outside of the vocabulary.
        has_vector: `[n]`, False for items of which nothing is known: no table has them, and they have no row of their
            own, or the features have no default.
    """

    rows: torch.Tensor
    has_vector: torch.Tensor
    features: ItemFeatures


class ItemTable:
    """Reads the features of items from the tables of entities that rows get them from; of versions, the last.

    Args:
        mapping: Of all features.
        item: The feature with the item.
        names: Item features, which `check_item_features` has accepted.
        files: Files to read in place of the tables, with their columns and the ids in `key`; None: the tables.
    """

    def __init__(
        self, mapping: Mapping, item: str, names: Sequence[str], files: str | None = None, key: str = ""
    ) -> None:
        schema = mapping.schema
        sparse = {feature.name: feature for feature in schema.sparse}
        self._names = [name for name in sparse if name in names]
        self._column, self._rows = sparse[item].column, ItemRows(mapping, item)
        specs = []
        for spec in schema.derived:
            if isinstance(spec, Entity) and files is not None and spec.column == self._column:
                spec = spec.model_copy(update={"path": files, "key": key, "valid_from": None, "at": None})
            specs.append(spec)
        times = {spec.at for spec in specs if isinstance(spec, Entity)}
        update = {
            "sparse": [sparse[name] for name in self._names],
            "dense": [feature for feature in schema.dense if feature.name in names],
            "sequences": [],
            "derived": specs,
            # Times of rows are not those of the training data, but `_LATEST_US` as a timestamp; and rows may have lists
            # of items.
            "column_types": {
                name: kind.removeprefix("list<").removesuffix(">")
                for name, kind in schema.column_types.items()
                if name not in times
            },
        }
        own = schema.model_copy(update=update)
        self._mapping = Mapping(own, mapping.rows_of, labels=False)
        self._entities = [spec for spec in own.derived_needed if isinstance(spec, Entity)]
        # The others are joined by a column of these, e.g. the country of the brand of the item.
        self._of_items = [spec for spec in self._entities if spec.column == self._column]
        self.tables: list[EntityTable] = [
            open_entities(source) for source in dict.fromkeys(map(source_of, self._of_items))
        ]

    @property
    def columns(self) -> list[str]:
        """The columns of the tables that the features read."""
        return list(dict.fromkeys(spec.take for spec in self._of_items))

    def of(self, ids: pa.Array) -> FoundItems:
        """
        Args:
            ids: Items as the training data has them.

        Raises:
            DataError: An item of a table has a feature that cannot be mapped.
        """
        columns = {self._column: ids}
        for spec in self._entities:
            if spec.at is not None:
                zone = "UTC" if open_entities(source_of(spec)).zoned else None
                columns[spec.at] = pa.repeat(pa.scalar(_LATEST_US, pa.timestamp("us", zone)), len(ids))
        batch, errors = self._mapping.to_batch_and_errors(pa.table(columns))
        has = np.zeros(len(ids), bool)
        for table in self.tables:
            has |= table.has(ids if table.text else int64_of(ids))
        wrong = [row for row in errors if has[row]]
        if wrong:
            raise errors[min(wrong)]
        rows, known = self._rows(ids)
        lists = {}
        for name in self._names:
            jagged = batch.sparse[name]
            lists[name] = (jagged.values().long(), jagged.offsets().long())
        features = ItemFeatures(batch.dense, lists)
        has_vector = torch.from_numpy(has) | known
        if errors:
            failed = list(errors)
            places = torch.arange(len(ids))  # what a row in error has is meaningless
            places[failed], has_vector[failed] = -1, False
            features = features.taken(places)
        return FoundItems(rows.where(known, -1), has_vector, features)

    def all_items(self) -> Iterator[FoundItems]:
        """The items of all tables, in blocks."""
        for table in self.tables:
            keys = table.column(table.source.key)
            firsts = pa.array(np.asarray(table.starts[:-1]))
            for start in range(0, len(firsts), _BLOCK_ROWS):
                yield self.of(keys.take(firsts.slice(start, _BLOCK_ROWS)))


def read_item_features(config: TrainConfig, item: str, names: Sequence[str], rows: int) -> ItemFeatures:
    """The features of the item in each row of the item table; of several items with one row, as of hashed ids, those of
    the first. Rows without an item of the tables have none.

    Args:
        rows: Of the item table.
    """
    plain = config.to_dict()
    key = (json.dumps({name: plain[name] for name in ("schema", "tables")}), item, tuple(names), rows)
    table = ItemTable(Mapping.from_config(plain, labels=False), item, names)
    kept = _LAST.get(key)
    # Tables that were opened again may have other items.
    if kept is None or any(one is not other for one, other in zip(kept[0], table.tables, strict=True)):
        _LAST.clear()
        kept = _LAST[key] = (table.tables, _by_row(table, rows))
    return kept[1]


def _by_row(table: ItemTable, rows: int) -> ItemFeatures:
    blocks = [*table.all_items()]
    if not blocks:
        raise DataError(
            "model.args.item_features: the tables of data.entities have no item", fix="check the files of the tables"
        )
    features = ItemFeatures.joined([block.features for block in blocks])
    of_row = torch.full((rows,), -1)
    places = torch.arange(sum(len(block.rows) for block in blocks)).flip(0)  # the first of a row is written last
    row_of = torch.cat([block.rows for block in blocks]).flip(0)
    # One by one: the order of repeated indices is not defined otherwise.
    of_row.numpy()[row_of[row_of >= 0].numpy()] = places[row_of >= 0].numpy()
    return features.taken(of_row)
