"""`torchrec.modules.feature_processor`: processors of single features, and of all features together."""

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
    """Base class of processors that map features by name."""

    @abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The same features, processed."""


class BaseGroupedFeatureProcessor(nn.Module, ABC):
    """Base class of processors that map all features in one tensor."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same features, processed."""


class PositionWeightedModule(BaseFeatureProcessor):
    """`PositionWeightedProcessor` for features by name. Features without an entry stay unchanged.

    Args:
        max_feature_lengths, device: see `PositionWeightedProcessor`.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weights = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}
        )

    def reset_parameters(self) -> None:
        """Sets all weights to 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {
            name: weighted_by_position(jt, self.position_weights[name]) if name in self.position_weights else jt
            for name, jt in features.items()
        }


class PositionWeightedProcessor(FeatureProcessorsCollection):
    """Multiplies the weight of each id by a learned weight of its feature and position, initially 1.

    Args:
        max_feature_lengths: number of positions by feature; later ids share the weight of the last position. Features
            without an entry keep their weights, or get 1.
        device: device of the parameters.

    Raises:
        ValueError: no features, or a feature without positions.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        if not max_feature_lengths:
            raise ValueError("PositionWeightedProcessor: max_feature_lengths is empty; name at least one feature")
        for feature, length in max_feature_lengths.items():
            if length < 1:
                raise ValueError(f"feature {feature!r}: max_feature_lengths={length} must be at least 1")
        self.position_weights = nn.ParameterDict(
            {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}
        )
        self._lengths = dict(max_feature_lengths)
        self._starts = dict(zip(self._lengths, accumulate([0, *self._lengths.values()]), strict=False))
        self._ranges: dict[tuple[Any, ...], torch.Tensor] = {}

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the ids with weights multiplied by those of their positions.

        Raises:
            ValueError: the input lacks a feature of `max_feature_lengths`.
        """
        missing = [name for name in self._lengths if name not in features.index_per_key()]
        if missing:
            raise ValueError(
                f"the input lacks feature {missing[0]!r}, which has position weights; it has {features.keys()}"
            )
        count, device = features.values().numel(), features.device()
        lengths = features.lengths()
        bags = torch.arange(lengths.numel(), device=device).repeat_interleave(lengths, output_size=count)
        position_N = torch.arange(count, device=device) - features.offsets()[bags]
        start_N, last_N = self._weight_ranges(features)[:, bags]
        weights = self._all_weights(device)[start_N + torch.minimum(position_N, last_N)]
        id_weights = features.weights_or_none()
        return features.with_weights(weights if id_weights is None else weights * id_weights)

    def _all_weights(self, device: torch.device) -> torch.Tensor:
        """Returns the concatenated weights of all features, followed by 1 for the other features."""
        return torch.cat([*self.position_weights.values(), torch.ones(1, device=device)])

    def _weight_ranges(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns int64 `[2, bags]`: the start of each bag in `_all_weights`, and its last position."""
        strides = features.stride_per_key()
        key = (*features.keys(), *strides, features.device())
        if key not in self._ranges:
            self._ranges.clear()  # most batches of a run have the same size
            ones_start = sum(self._lengths.values())
            by_key = [(self._starts.get(name, ones_start), self._lengths.get(name, 1) - 1) for name in features.keys()]
            repeats = torch.tensor(strides, dtype=torch.int64)
            ranges = torch.tensor(by_key, dtype=torch.int64).view(-1, 2).t().repeat_interleave(repeats, dim=1)
            self._ranges[key] = ranges.to(features.device())
        return self._ranges[key]
