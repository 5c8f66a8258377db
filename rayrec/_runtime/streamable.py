"""Interfaces that a pipeline requires of a batch: moving it to a device, and keeping its memory for a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Multistreamable(ABC):
    """An object with memory that several streams may use."""

    @abstractmethod
    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory until the current work of `stream` is done."""


class Pipelineable(Multistreamable):
    """An object that a pipeline can move to its model's device, such as a batch."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """Returns a copy on `device`."""
