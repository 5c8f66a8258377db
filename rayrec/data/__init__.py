"""Parquet to batches: every row exactly once an epoch, in a seeded order, resumable on any number of ranks."""

from rayrec.data.counting import build_vocabulary, write_vocabulary
from rayrec.data.cursor import Cursor, RankCursor
from rayrec.data.errors import DataError
from rayrec.data.manifest import Manifest
from rayrec.data.mapping import to_batch
from rayrec.data.options import BadRows, ReadOptions
from rayrec.data.rows import empty_batch
from rayrec.data.schema import DenseFeature, Hash, Identity, Label, Schema, SparseFeature, Standardize, Vocabulary
from rayrec.data.stream import BatchStream

__all__ = [
    "BadRows",
    "BatchStream",
    "Cursor",
    "DataError",
    "DenseFeature",
    "Hash",
    "Identity",
    "Label",
    "Manifest",
    "RankCursor",
    "ReadOptions",
    "Schema",
    "SparseFeature",
    "Standardize",
    "Vocabulary",
    "build_vocabulary",
    "empty_batch",
    "to_batch",
    "write_vocabulary",
]
