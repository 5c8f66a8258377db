"""`rayrec.sparse.validate` that returns False for ids outside their table, and raises for other problems."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from rayrec.sparse.validate import validate

logger = logging.getLogger(__name__)


class TableConfig(Protocol):
    """What is read of a table's config."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableConfig] | None = None) -> bool:
    """Checks a tensor, and its ids against the tables that read them.

    Args:
        configs: tables; features without one, and tables without a feature of this tensor, are passed over.

    Returns:
        False where an id lies outside a table; the log names feature, range and table size.

    Raises:
        ValueError: parts of the tensor that do not fit together (see `rayrec.sparse.validate`).
    """
    validate(kjt)
    good = True
    for config in configs or ():
        for feature in config.feature_names:
            if feature not in kjt.index_per_key():
                continue
            ids = kjt[feature].values()
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < config.num_embeddings):
                logger.error(
                    "feature %r: ids from %d to %d, but its table has the rows [0, %d)",
                    feature,
                    int(ids.min()),
                    int(ids.max()),
                    config.num_embeddings,
                )
                good = False
    return good
