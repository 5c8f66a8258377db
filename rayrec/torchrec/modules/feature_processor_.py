"""Processors of one feature, and of all features of a weighted collection at once.

`feature_processor` has the processor of all features that is rayrec's own way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rayrec.modules.feature_processor import FeatureProcessor, FeatureProcessorsCollection, weighted_by_position
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
]


class PositionWeightedModule(FeatureProcessor):
    """Weights an id by its position in its list: a learned number for every position, initially 1.

    Args:
        max_feature_length: positions; a longer list is an index error.
        device: of the parameter.
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.empty(max_feature_length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All weights 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        return weighted_by_position(features, self.position_weight)

    def pre_process_input(self, features: JaggedTensor) -> JaggedTensor:
        """Weights that say each id's position."""
        length = max(1, features.values().shape[0])
        return weighted_by_position(features, torch.arange(length, device=features.device(), dtype=torch.float32))


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """A `PositionWeightedModule` for each feature, over all features in one tensor.

    Args:
        max_feature_lengths: feature → positions; a longer list is an index error.
        device: of the parameters.

    Raises:
        ValueError: a feature without positions.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        for name, length in max_feature_lengths.items():
            if length < 1:
                raise ValueError(f"feature {name!r}: max_feature_lengths={length} must be at least 1")
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}
        )

    def reset_parameters(self) -> None:
        """All weights 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Every feature of the input, weighted.

        Raises:
            ValueError: the input has a feature that has no positions.
        """
        unknown = [key for key in features.keys() if key not in self.position_weights]
        if unknown:
            raise ValueError(f"feature {unknown[0]!r} has no position weights; there are {[*self.position_weights]}")
        parts = [weighted_by_position(features[key], self.position_weights[key]) for key in features.keys()]
        return features.with_weights(torch.cat([part.weights() for part in parts]))

    def pre_process_input(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weights that say each id's position."""
        count = torch.arange(max(1, features.values().shape[0]), device=features.device(), dtype=torch.float32)
        parts = [weighted_by_position(features[key], count) for key in features.keys()]
        return features.with_weights(torch.cat([part.weights() for part in parts]))

    def copy(self, device: torch.device) -> nn.Module:
        """This module on another device."""
        return self.to(device)
