"""`ManagedCollisionModule`, the interface of managed collisions: ids in, rows of one table out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.comm import all_gather_uneven
from rayrec.torchrec.sparse import JaggedTensor

Features = dict[str, JaggedTensor]
SEGMENTS = 1025  # fixed length of the segments in the state


class ManagedCollisionModule(nn.Module, ABC):
    """Maps ids to rows `[0, output_size())`.

    Args:
        device: of its state.
        output_segments: ascending rows at which parts of it may begin and end; at most 1025.
        skip_state_validation: keeps none of this in its state.
        read_only_suffix, enable_per_feature_lookups: stored, not used.

    Raises:
        ValueError: too many segments.
    """

    gather: Callable[[torch.Tensor], torch.Tensor] | None = None  # ids `[N]` of all ranks, in rank order

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._read_only_suffix = read_only_suffix
        self._enable_per_feature_lookups = enable_per_feature_lookups
        if skip_state_validation:
            return
        if len(output_segments) > SEGMENTS:
            raise ValueError(f"{len(output_segments)} output segments are more than {SEGMENTS}")
        segments = [*output_segments, *[-1] * (SEGMENTS - len(output_segments))]
        self.register_buffer("_output_segments_tensor", torch.tensor(segments, device=device))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(lambda module, keys: module.validate_state())

    def on_sharded(self, process_group: dist.ProcessGroup | None) -> None:
        """Called by DistributedModelParallel: from now on a step counts the ids of all ranks."""
        self.gather = partial(all_gather_uneven, group=process_group)

    @property
    def readable_suffix(self) -> str:
        return self._read_only_suffix

    @property
    def device(self) -> torch.device:
        return self._device

    @abstractmethod
    def preprocess(self, features: Features) -> Features:
        """The first transformation of ids, for example a hash."""

    @abstractmethod
    def evict(self) -> torch.Tensor | None:
        """Rows that got another id since the last call; None without a decision."""

    @abstractmethod
    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: torch.Tensor | None = None
    ) -> Features:
        """The rows of ids."""

    @abstractmethod
    def profile(self, features: Features) -> Features:
        """Counts a step's ids; returns them."""

    @abstractmethod
    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Preprocess, profile and remap."""

    @abstractmethod
    def output_size(self) -> int:
        """Number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """End of the range of ids."""

    @abstractmethod
    def buckets(self) -> int:
        """Number of equal parts that it can be cut into."""

    @abstractmethod
    def validate_state(self) -> None:
        """Called after a state is loaded."""

    @abstractmethod
    def open_slots(self) -> torch.Tensor:
        """Number of rows without an id."""

    @abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """Returns a module for a part of the rows."""
