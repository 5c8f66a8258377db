"""What a batch promises a pipeline: that it can be moved to a device, and that streams can hold its memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Multistreamable(ABC):
    """Something whose memory several streams may use."""

    @abstractmethod
    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory until what `stream` has under way is done."""


class Pipelineable(Multistreamable):
    """Something that a pipeline can move to its model's device; a batch type may derive from it."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The same on `device`."""
