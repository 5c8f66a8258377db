"""`torchrec.modules.mlp`."""

from rayrec.modules.mlp import MLP, Perceptron

__all__ = ["MLP", "Perceptron"]
