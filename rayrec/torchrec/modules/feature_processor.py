"""`torchrec.modules.feature_processor`: processors of features by name, and of all features at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from rayrec.modules.feature_processor import (
    FeatureProcessorsCollection,
    PositionWeightedProcessor,
    weighted_by_position,
)
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "BaseFeatureProcessor",
    "BaseGroupedFeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedProcessor",
]


class BaseFeatureProcessor(nn.Module, ABC):
    """Features by name in and out."""

    @abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The same features, processed."""


class BaseGroupedFeatureProcessor(nn.Module, ABC):
    """All features in one tensor in and out."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same features, processed."""


class PositionWeightedModule(BaseFeatureProcessor):
    """`PositionWeightedProcessor` for features by name: those that are named get weights, the others stay as they are.

    Args:
        max_feature_lengths, device: as there.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weights = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}
        )

    def reset_parameters(self) -> None:
        """All weights 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {
            name: weighted_by_position(jt, self.position_weights[name]) if name in self.position_weights else jt
            for name, jt in features.items()
        }
