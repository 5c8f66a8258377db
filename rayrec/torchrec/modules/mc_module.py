"""`ManagedCollisionModule`, the interface of managed collisions, which map ids to rows of a table."""

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
        device: device of the state.
        output_segments: ascending rows at which it may be cut; at most 1025.
        skip_state_validation: do not store the segments in the state.
        read_only_suffix, enable_per_feature_lookups: ignored.

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
        """Called by DistributedModelParallel; afterwards, each step counts the ids of all ranks."""
        self.gather = partial(all_gather_uneven, group=process_group)

    @property
    def readable_suffix(self) -> str:
        return self._read_only_suffix

    @property
    def device(self) -> torch.device:
        return self._device

    @abstractmethod
    def preprocess(self, features: Features) -> Features:
        """Transforms the ids first, for example by a hash."""

    @abstractmethod
    def evict(self) -> torch.Tensor | None:
        """Returns the rows that were reassigned since the last call; None without a decision."""

    @abstractmethod
    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: torch.Tensor | None = None
    ) -> Features:
        """Maps ids to rows."""

    @abstractmethod
    def profile(self, features: Features) -> Features:
        """Counts the ids of a step; returns them."""

    @abstractmethod
    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Preprocesses, profiles and remaps ids."""

    @abstractmethod
    def output_size(self) -> int:
        """Returns the number of rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Returns the end of the id range."""

    @abstractmethod
    def buckets(self) -> int:
        """Returns the number of equal segments into which it can be cut."""

    @abstractmethod
    def validate_state(self) -> None:
        """Checks a loaded state."""

    @abstractmethod
    def open_slots(self) -> torch.Tensor:
        """Returns the number of free rows."""

    @abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """Returns a module for a range of rows."""
