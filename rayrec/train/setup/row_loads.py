"""How evenly each table's rows are looked up, by the counts of its vocabularies, for the planner."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.data.mapping.vocabulary import counts_in
from rayrec.distributed.planner.tables.row_load import BUCKETS, RowLoad
from rayrec.storage.errors import DataError
from rayrec.train.config.train_config import TrainConfig


def row_loads(config: TrainConfig) -> dict[str, RowLoad]:
    """Table → load of its rows, for tables with a feature whose vocabulary has counts.

    The features of a table count alike; ids of features without counts are taken as even.
    """
    mappings = {feature.name: feature.mapping for feature in config.data_schema.sparse}
    found = {}
    for table in config.tables:
        known = [
            _counts(mapping.path, mapping.oov_rows, mapping.spread_over, table.rows)
            for name in table.features
            if isinstance(mapping := mappings.get(name), Vocabulary)
        ]
        counted = [counts for counts in known if counts is not None]
        others = [np.ones(BUCKETS)] * (len(table.features) - len(counted))
        if counted and (load := RowLoad.of([*counted, *others])) is not None:
            found[table.name] = load
    return found


@lru_cache(maxsize=256)
def _counts(path: str, oov_rows: int, spread_over: int | None, rows: int) -> NDArray[np.float64] | None:
    """The number of ids in each of `BUCKETS` equal blocks of rows; None if the vocabulary has no counts of all ids."""
    mapping, blocks, position = Vocabulary(path=path, oov_rows=oov_rows, spread_over=spread_over), np.zeros(BUCKETS), 0
    per_row = np.zeros(rows) if rows <= BUCKETS else None
    try:
        for counts in counts_in(path):
            if not position and counts[:1].tolist() == [0]:  # an extended vocabulary counts only its new ids
                return None
            row = vocabulary_rows(np.arange(position, position + len(counts)), mapping)
            if per_row is None:
                blocks += np.bincount(row * BUCKETS // rows, counts, minlength=BUCKETS)
            else:
                per_row += np.bincount(row, counts, minlength=rows)
            position += len(counts)
    except (OSError, DataError):  # `rayrec plan` needs no data
        return None
    if per_row is not None:
        # A row covers several blocks, and parts of them.
        cumulated = np.interp(np.arange(BUCKETS + 1) / BUCKETS * rows, np.arange(rows + 1), [0, *per_row.cumsum()])
        blocks = np.diff(cumulated)
    return blocks if blocks.sum() else None
