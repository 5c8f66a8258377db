"""Figures of an evaluation by value of a categorical feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.data import Schema
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.vocabulary import ids_in
from rayrec.metrics import BucketedMetrics
from rayrec.models import Batch

if TYPE_CHECKING:
    import torch.distributed as dist


class Slices:
    """The figures of the rows of each value of some features, such as each country's.

    Args:
        features: names of features with one id a row; `trainer.slices`, which is checked with the config.
    """

    def __init__(self, features: Sequence[str], schema: Schema) -> None:
        by_name = {feature.name: feature for feature in schema.sparse}
        self._features = [by_name[name] for name in features]
        self._by_row = {name: BucketedMetrics(schema.task_names, schema.label_kinds) for name in features}

    def update(self, batch: Batch, logits: torch.Tensor) -> None:
        """One batch of this rank."""
        for name, metrics in self._by_row.items():
            ids = batch.sparse[name]
            rows_B = ids.lengths().new_full((batch.rows,), -1, dtype=torch.int64)
            rows_B[ids.lengths() > 0] = ids.values().long()
            metrics.update(rows_B, logits, batch.label, batch.weight)

    def compute(self, group: dist.ProcessGroup | None) -> dict[str, list[dict[str, Any]]]:
        """For each feature, the figures of every value that was seen, those of most rows first. A collective."""
        found = {}
        for feature in self._features:
            figures = self._by_row[feature.name].compute(group)
            names = _names(feature)
            lines = [{"value": _value(row, names), **of} for row, of in figures.items()]
            found[feature.name] = sorted(lines, key=lambda line: (-line["samples"], line["value"]))
        return found


def _names(feature: SparseFeature) -> list[str] | None:
    """The value of each table row; None where it is the row's number."""
    rule = feature.mapping
    if not isinstance(rule, Vocabulary):
        return None
    ids = [str(one) for part in ids_in(rule.path) for one in part.tolist()]
    return ["(not in the vocabulary)"] * rule.oov_rows + ids


def _value(row: int, names: list[str] | None) -> str:
    if row < 0:
        return "(none)"
    return str(row) if names is None else names[row]
