"""Parquet to batches: every row exactly once an epoch, in a seeded order, resumable on any number of ranks.

The names here are loaded when first used: a process that only maps rows, or only reads them, starts without the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged

if TYPE_CHECKING:
    from rayrec.data.config import BadRows, ReadOptions, Shuffle
    from rayrec.data.mapping.collate import empty_batch
    from rayrec.data.mapping.mapping import Mapping, to_batch
    from rayrec.data.mapping.rules import Hash, Identity, Vocabulary
    from rayrec.data.mapping.schema import DenseFeature, Label, SampleWeight, Schema, SparseFeature, Task
    from rayrec.data.mapping.transforms import Standardize
    from rayrec.data.order.cursor import Cursor
    from rayrec.data.order.mix import Mix, manifest_of
    from rayrec.data.source.dataset import DataSet, TrainingData, WeightedDataSet, data_sets
    from rayrec.data.source.footer_index import FooterIndex
    from rayrec.data.source.footers import FooterReading
    from rayrec.data.source.manifest import Manifest
    from rayrec.data.stream.batch_stream import BatchStream
    from rayrec.data.stream.mixed_stream import MixedStream

__getattr__ = lazy_names(__name__)

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
