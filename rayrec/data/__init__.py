"""From Parquet to batches: every row exactly once per epoch, in a seeded order, resumable on any number of ranks.

Names are imported on first use, so that a process that only maps rows, or only reads them, does not load the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.storage.errors import DataError, DataUnavailable, FileChanged

if TYPE_CHECKING:
    from rayrec.data.config import BadRows, ReadOptions, Shuffle, WindowsConfig
    from rayrec.data.formats.convert import convert
    from rayrec.data.formats.parquet_writer import Layout
    from rayrec.data.formats.text_options import TextOptions
    from rayrec.data.live.following import Follower
    from rayrec.data.live.join_files import FileJoin
    from rayrec.data.live.kafka_topic import KafkaTopic
    from rayrec.data.live.label_join import JoinSpec, LabelJoin
    from rayrec.data.mapping.collate import empty_batch
    from rayrec.data.mapping.mapping import Mapping, to_batch
    from rayrec.data.mapping.rules import Dynamic, Hash, Identity, Vocabulary
    from rayrec.data.mapping.schema import DenseFeature, Label, SampleWeight, Schema, SparseFeature, Task
    from rayrec.data.mapping.transforms import Standardize
    from rayrec.data.mapping.vocabulary import load_vocabulary
    from rayrec.data.order.cursor import Cursor
    from rayrec.data.order.mix import Mix, manifest_of
    from rayrec.data.source.dataset import DataSet, TrainingData, WeightedDataSet, data_sets
    from rayrec.data.source.filters import Condition
    from rayrec.data.source.footer_index import FooterIndex
    from rayrec.data.source.footers import FooterReading, write_index
    from rayrec.data.source.manifest import Manifest
    from rayrec.data.stream.batch_stream import BatchStream
    from rayrec.data.stream.mixed_stream import MixedStream
    from rayrec.data.stream.time_windows import in_time_order
    from rayrec.data.tools.check import check
    from rayrec.data.tools.event_store import StoreSpec, build_store
    from rayrec.data.tools.init.inspect import inspect
    from rayrec.data.tools.vocabulary import count_column

__getattr__ = lazy_names(__name__)

__all__ = [
    "BadRows",
    "BatchStream",
    "Condition",
    "Cursor",
    "DataError",
    "DataSet",
    "DataUnavailable",
    "DenseFeature",
    "Dynamic",
    "FileChanged",
    "FileJoin",
    "Follower",
    "FooterIndex",
    "FooterReading",
    "Hash",
    "Identity",
    "JoinSpec",
    "KafkaTopic",
    "Label",
    "LabelJoin",
    "Layout",
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
    "StoreSpec",
    "Task",
    "TextOptions",
    "TrainingData",
    "Vocabulary",
    "WeightedDataSet",
    "WindowsConfig",
    "build_store",
    "check",
    "convert",
    "count_column",
    "data_sets",
    "empty_batch",
    "in_time_order",
    "inspect",
    "load_vocabulary",
    "manifest_of",
    "to_batch",
    "write_index",
]
