"""`torchrec.modules.feature_processor`: processors of features by name, and of all features at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from rayrec.torchrec.modules.feature_processor_ import FeatureProcessorsCollection, weighted_by_position
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor

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


class PositionWeightedProcessor(FeatureProcessorsCollection):
    """Weights an id by its position in its list: a learned number for every feature and position, initially 1.

    Args:
        max_feature_lengths: feature → number of positions; ids further back share the last position's weight.
            Features that are not named keep the weights they have, or get 1.
        device: of the parameters.

    Raises:
        ValueError: no features, or a feature without positions.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        if not max_feature_lengths:
            raise ValueError("PositionWeightedProcessor: max_feature_lengths is empty; name the features to weigh")
        for feature, length in max_feature_lengths.items():
            if length < 1:
                raise ValueError(f"feature {feature!r}: max_feature_lengths={length} must be at least 1")
        self.position_weights = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}
        )
        self._lengths = dict(max_feature_lengths)
        self._starts = dict(zip(self._lengths, accumulate([0, *self._lengths.values()]), strict=False))
        self._places: dict[tuple[Any, ...], torch.Tensor] = {}

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same ids; weights that they bring are multiplied by those of their positions.

        Raises:
            ValueError: the input lacks a feature that is to be weighed.
        """
        missing = [name for name in self._lengths if name not in features.index_per_key()]
        if missing:
            raise ValueError(
                f"the input has no feature {missing[0]!r}, which is to be weighed; it has {features.keys()}"
            )
        count, device = features.values().numel(), features.device()
        lengths = features.lengths()
        bags = torch.arange(lengths.numel(), device=device).repeat_interleave(lengths, output_size=count)
        position_N = torch.arange(count, device=device) - features.offsets()[bags]
        start_N, last_N = self._places_of(features)[:, bags]
        weights = self._all_weights(device)[start_N + torch.minimum(position_N, last_N)]
        given = features.weights_or_none()
        return features.with_weights(weights if given is None else weights * given)

    def _all_weights(self, device: torch.device) -> torch.Tensor:
        """Every feature's weights one after the other, then the 1 of all other features."""
        return torch.cat([*self.position_weights.values(), torch.ones(1, device=device)])

    def _places_of(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """int `[2, bags]`: where each bag's weights begin among all, and its last position."""
        strides = features.stride_per_key()
        key = (*features.keys(), *strides, features.device())
        if key not in self._places:
            self._places.clear()  # batches of a run are mostly of one size
            nothing = sum(self._lengths.values())
            by_key = [(self._starts.get(name, nothing), self._lengths.get(name, 1) - 1) for name in features.keys()]
            repeats = torch.tensor(strides, dtype=torch.int64)
            places = torch.tensor(by_key, dtype=torch.int64).view(-1, 2).t().repeat_interleave(repeats, dim=1)
            self._places[key] = places.to(features.device())
        return self._places[key]
