"""What comes after training: export with parity, scoring, and what a service needs of a model."""

from rayrec.inference.artifact import ExportError
from rayrec.inference.export import Export, Trained, export
from rayrec.inference.model import Model
from rayrec.inference.parity import Parity
from rayrec.inference.wanted import Wanted

__all__ = [
    "Export",
    "ExportError",
    "Model",
    "Parity",
    "Trained",
    "Wanted",
    "export",
]
