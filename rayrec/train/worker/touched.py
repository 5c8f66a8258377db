"""What a batch looks up in each table: how many rows, and how unevenly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rayrec.sparse import KeyedJaggedTensor


def touched(sparse: KeyedJaggedTensor, tables: Iterable[tuple[str, Iterable[str]]]) -> dict[str, dict[str, Any]]:
    """By table: `ids` that the batch has for it, `rows` of it that those are, and `top`, the part of the ids that are
    of the most frequent row (None without an id). Waits for the device.

    Args:
        sparse: a batch's features.
        tables: names of tables, each with its features.
    """
    features = sparse.to_dict()
    found = {}
    for table, names in tables:
        ids = torch.cat([features[name].values() for name in names])
        counts = torch.unique(ids, return_counts=True)[1]
        top = float(counts.max()) / ids.numel() if ids.numel() else None
        found[table] = {"ids": ids.numel(), "rows": counts.numel(), "top": top}
    return found
