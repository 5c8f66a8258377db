"""Parquet to batches: every row exactly once an epoch, in a seeded order, resumable on any number of ranks.

The names here are loaded when first used: a process that only maps rows, or only reads them, starts without the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrec.data.errors import DataError, DataUnavailable, FileChanged
    from rayrec.data.mapping.collate import empty_batch, to_batch
    from rayrec.data.mapping.id_mappings import Hash, Identity, Vocabulary
    from rayrec.data.mapping.mapping import Mapping
    from rayrec.data.mapping.schema import DenseFeature, Label, SampleWeight, Schema, SparseFeature, Task
    from rayrec.data.mapping.transforms import Standardize
    from rayrec.data.options import BadRows, ReadOptions, Shuffle
    from rayrec.data.order.cursor import Cursor
    from rayrec.data.order.mix import Mix, manifest_of
    from rayrec.data.source.dataset import DataSet, TrainingData, WeightedDataSet, data_sets
    from rayrec.data.source.footer_index import FooterIndex
    from rayrec.data.source.footers import FooterReading
    from rayrec.data.source.manifest import Manifest
    from rayrec.data.stream.batch_stream import BatchStream
    from rayrec.data.stream.mixed_stream import MixedStream

_HOMES = {
    "BadRows": "rayrec.data.options",
    "BatchStream": "rayrec.data.stream.batch_stream",
    "Cursor": "rayrec.data.order.cursor",
    "DataError": "rayrec.data.errors",
    "DataUnavailable": "rayrec.data.errors",
    "DataSet": "rayrec.data.source.dataset",
    "DenseFeature": "rayrec.data.mapping.schema",
    "FileChanged": "rayrec.data.errors",
    "FooterIndex": "rayrec.data.source.footer_index",
    "FooterReading": "rayrec.data.source.footers",
    "Hash": "rayrec.data.mapping.id_mappings",
    "Identity": "rayrec.data.mapping.id_mappings",
    "Label": "rayrec.data.mapping.schema",
    "Manifest": "rayrec.data.source.manifest",
    "Mapping": "rayrec.data.mapping.mapping",
    "Mix": "rayrec.data.order.mix",
    "MixedStream": "rayrec.data.stream.mixed_stream",
    "ReadOptions": "rayrec.data.options",
    "SampleWeight": "rayrec.data.mapping.schema",
    "Schema": "rayrec.data.mapping.schema",
    "Shuffle": "rayrec.data.options",
    "SparseFeature": "rayrec.data.mapping.schema",
    "Standardize": "rayrec.data.mapping.transforms",
    "Task": "rayrec.data.mapping.schema",
    "TrainingData": "rayrec.data.source.dataset",
    "Vocabulary": "rayrec.data.mapping.id_mappings",
    "WeightedDataSet": "rayrec.data.source.dataset",
    "data_sets": "rayrec.data.source.dataset",
    "empty_batch": "rayrec.data.mapping.collate",
    "manifest_of": "rayrec.data.order.mix",
    "to_batch": "rayrec.data.mapping.collate",
}

__all__ = [
    "BadRows",
    "BatchStream",
    "Cursor",
    "DataError",
    "DataSet",
    "DataUnavailable",
    "DenseFeature",
    "FileChanged",
    "FooterIndex",
    "FooterReading",
    "Hash",
    "Identity",
    "Label",
    "Manifest",
    "Mapping",
    "Mix",
    "MixedStream",
    "ReadOptions",
    "SampleWeight",
    "Schema",
    "Shuffle",
    "SparseFeature",
    "Standardize",
    "Task",
    "TrainingData",
    "Vocabulary",
    "WeightedDataSet",
    "data_sets",
    "empty_batch",
    "manifest_of",
    "to_batch",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
