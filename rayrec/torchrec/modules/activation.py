"""`torchrec.modules.activation`."""

from rayrec.modules.activation import SwishLayerNorm

__all__ = ["SwishLayerNorm"]
