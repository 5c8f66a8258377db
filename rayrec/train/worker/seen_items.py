"""Items that the ranking of a user leaves out, from files (`trainer.ranking.seen_file`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rayrec.data.arrays.arrow_types import decoded, is_list
from rayrec.data.arrays.lists import unnest
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.mapping.map_rows import one_array
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.sparse import map_leaf
from rayrec.metrics.ranking import Jagged
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found
from rayrec.storage.parquet import open_parquet, unreadable
from rayrec.storage.retries import Patience, with_patience
from rayrec.storage.struct_fields import columns_named
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.setup import build


class SeenItems:
    """Seen items by the table row of their user, sorted; 16 bytes for each.

    Args:
        users, items: table rows `[N]`, of a user and an item that it has seen.
    """

    def __init__(self, users: torch.Tensor, items: torch.Tensor) -> None:
        order = users.argsort(stable=True)
        self._users, self._items = users[order], items[order]

    @classmethod
    def read(cls, config: TrainConfig, item: str, device: torch.device) -> SeenItems | None:
        """Reads the files; None if the config names none.

        Args:
            item: the feature that holds items.

        Raises:
            DataError: no files, an unreadable file, a missing column, or ids of another type than in training.
            DataUnavailable: the storage did not respond.
        """
        section = config.trainer.ranking.seen_file
        if section is None:
            return None
        features = {feature.name: feature for feature in config.data_schema.sparse}
        rows_of, patience = build.rows_of(config), Patience(outage_s=config.data.read.patience_s)
        user_feature, item_feature = features[section.user], features[item]
        columns = [section.user_column or user_feature.column, section.item_column or item_feature.column]
        users, items = [], []
        for file in find_parquet(section.path):
            for user, seen in with_patience(partial(_read, file, columns), file.uri, patience):
                lengths = None
                if is_list(seen.type):
                    lists = unnest(seen)
                    seen, lengths = lists.leaf, np.diff(lists.offsets)
                user_rows, has_user = _rows(user, user_feature, rows_of[section.user])
                item_rows, has_item = _rows(seen, item_feature, rows_of[item])
                if lengths is not None:
                    user_rows, has_user = np.repeat(user_rows, lengths), np.repeat(has_user, lengths)
                kept = has_user & has_item
                users.append(torch.from_numpy(user_rows[kept]))
                items.append(torch.from_numpy(item_rows[kept]))
        none = torch.empty(0, dtype=torch.int64)
        return cls(torch.cat([none, *users]).to(device), torch.cat([none, *items]).to(device))

    def of(self, users_Q: torch.Tensor) -> Jagged:
        """The items of some users, by their table rows."""
        starts = torch.searchsorted(self._users, users_Q)
        stops = torch.searchsorted(self._users, users_Q, right=True)
        lengths = stops - starts
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shift = (starts - offsets[:-1]).repeat_interleave(lengths)
        return Jagged(self._items[torch.arange(len(shift), device=shift.device) + shift], offsets)


def _read(file: Found, columns: list[str]) -> list[tuple[pa.Array, pa.Array]]:
    """The two columns of each row group."""
    try:
        parquet = open_parquet(file.uri)
        for name in columns:
            if name not in parquet.schema_arrow.names:
                raise column_missing(name, parquet.schema_arrow, file.uri, "name it in trainer.ranking.seen_file")
        groups = [parquet.read_row_group(number, columns) for number in range(parquet.num_row_groups)]
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file.uri, error) from error
    tables = [columns_named(group, columns) for group in groups]
    return [(one_array(table.column(columns[0])), one_array(table.column(columns[1]))) for table in tables]


def _rows(ids: pa.Array, feature: SparseFeature, num_rows: int) -> tuple[Any, Any]:
    """The table row of each id, and whether it has one of its own."""
    ids = decoded(ids)
    if ids.null_count:
        raise DataError("an id is null", column=feature.name, fix="remove the row from trainer.ranking.seen_file")
    rows, _, outside = map_leaf(ids, feature, num_rows)
    has_row = np.ones(len(rows), np.bool_)
    if isinstance(feature.mapping, Vocabulary):
        has_row = rows >= feature.mapping.oov_rows
    if outside is not None:
        has_row[outside] = False
    return rows.astype(np.int64), has_row
