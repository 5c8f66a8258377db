"""Processors of one feature, and of all features of a weighted collection.

`feature_processor.PositionWeightedProcessor` also accepts longer lists, and multiplies existing weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor

__getattr__ = names_left_out(__name__)

__all__ = [
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
]


class FeatureProcessor(nn.Module, ABC):
    """Computes the weights of the ids of one feature."""

    @abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The same ids, weighted."""


class FeatureProcessorsCollection(nn.Module, ABC):
    """Computes the weights of the ids of all features."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same ids, weighted."""


def weighted_by_position(jt: JaggedTensor, weight_L: torch.Tensor) -> JaggedTensor:
    """Weights each value by its position. Raises IndexError for a list longer than L."""
    lengths, offsets = jt.lengths(), jt.offsets()
    starts_N = offsets[:-1].repeat_interleave(lengths, output_size=jt.values().shape[0])
    position_N = torch.arange(jt.values().shape[0], device=jt.device()) - starts_N
    return JaggedTensor(jt.values(), weight_L[position_N], lengths, offsets)


class PositionWeightedModule(FeatureProcessor):
    """Weights each id by a learned weight of its position, initially 1.

    Args:
        max_feature_length: number of positions; a longer list raises IndexError.
        device: device of the parameter.
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
        """Sets the weight of each id to its position."""
        length = max(1, features.values().shape[0])
        return weighted_by_position(features, torch.arange(length, device=features.device(), dtype=torch.float32))


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """A `PositionWeightedModule` per feature, for all features in one tensor.

    Args:
        max_feature_lengths: number of positions by feature; a longer list raises IndexError.
        device: device of the parameters.

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

    @property
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """The weights of the positions, by feature."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """All weights 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the input with weights.

        Raises:
            ValueError: a feature of the input has no position weights.
        """
        unknown = [key for key in features.keys() if key not in self.position_weights]
        if unknown:
            raise ValueError(f"feature {unknown[0]!r} has no position weights; there are {[*self.position_weights]}")
        weighted = [weighted_by_position(features[key], self.position_weights[key]) for key in features.keys()]
        return features.with_weights(torch.cat([jagged.weights() for jagged in weighted]))

    def pre_process_input(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Sets the weight of each id to its position."""
        count = torch.arange(max(1, features.values().shape[0]), device=features.device(), dtype=torch.float32)
        weighted = [weighted_by_position(features[key], count) for key in features.keys()]
        return features.with_weights(torch.cat([jagged.weights() for jagged in weighted]))

    def copy(self, device: torch.device) -> nn.Module:
        """Moves this module to a device."""
        return self.to(device)
