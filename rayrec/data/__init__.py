"""Parquet to batches: every row exactly once an epoch, in a seeded order, resumable on any number of ranks.

What needs torch is loaded when first used, so that a process which only reads rows starts without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rayrec.data.errors import DataError
from rayrec.data.mapping.schema import (
    DenseFeature,
    Hash,
    Identity,
    Label,
    SampleWeight,
    Schema,
    SparseFeature,
    Standardize,
    Task,
    Vocabulary,
)
from rayrec.data.options import BadRows, ReadOptions
from rayrec.data.order.cursor import Cursor, RankCursor
from rayrec.data.order.mix import Mix, manifest_of
from rayrec.data.order.mix_cursor import MixCursor, cursor_from_dict, merge
from rayrec.data.source.dataset import DataSet, TrainingData, WeightedDataSet, data_sets
from rayrec.data.source.footer_cache import FooterCache
from rayrec.data.source.manifest import Manifest
from rayrec.data.tools.counting import build_vocabulary, write_vocabulary

if TYPE_CHECKING:
    from rayrec.data.mapping.collate import empty_batch, to_batch
    from rayrec.data.stream.batch_stream import BatchStream
    from rayrec.data.stream.mixed_stream import MixedStream

_WITH_TORCH = {
    "BatchStream": "rayrec.data.stream.batch_stream",
    "MixedStream": "rayrec.data.stream.mixed_stream",
    "empty_batch": "rayrec.data.mapping.collate",
    "to_batch": "rayrec.data.mapping.collate",
}

__all__ = [
    "BadRows",
    "BatchStream",
    "Cursor",
    "DataError",
    "DataSet",
    "DenseFeature",
    "FooterCache",
    "Hash",
    "Identity",
    "Label",
    "Manifest",
    "Mix",
    "MixCursor",
    "MixedStream",
    "RankCursor",
    "ReadOptions",
    "SampleWeight",
    "Schema",
    "SparseFeature",
    "Standardize",
    "Task",
    "TrainingData",
    "Vocabulary",
    "WeightedDataSet",
    "build_vocabulary",
    "cursor_from_dict",
    "data_sets",
    "empty_batch",
    "manifest_of",
    "merge",
    "to_batch",
    "write_vocabulary",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
