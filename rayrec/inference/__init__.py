"""Export of trained models with a parity check, scoring, and search in item indexes. README.md lists the files."""

from typing import TYPE_CHECKING

from rayrec._runtime.imports import lazy_names
from rayrec.inference.artifact import ExportError
from rayrec.inference.checkpoint_model import Trained
from rayrec.inference.export import Export, export
from rayrec.inference.export_options import ExportOptions
from rayrec.inference.graph import Inputs
from rayrec.inference.model import Model
from rayrec.inference.parity import Parity

if TYPE_CHECKING:
    from rayrec.inference.delta import apply_deltas, read_delta, write_delta
    from rayrec.inference.export_store import ExportStore
    from rayrec.inference.index import ItemIndex, Search, TuningQueries, with_ranker, write_index
    from rayrec.inference.retrieve import RetrieveOptions
    from rayrec.inference.scorer import Scorer

__getattr__ = lazy_names(__name__)

__all__ = [
    "Export",
    "ExportError",
    "ExportOptions",
    "ExportStore",
    "Inputs",
    "ItemIndex",
    "Model",
    "Parity",
    "RetrieveOptions",
    "Scorer",
    "Search",
    "Trained",
    "TuningQueries",
    "apply_deltas",
    "export",
    "read_delta",
    "with_ranker",
    "write_delta",
    "write_index",
]
