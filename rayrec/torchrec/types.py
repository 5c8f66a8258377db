"""`DataType`, and base classes of modules with a cache or their own way of copying."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from rayrec.modules.configs import DataType

__all__ = ["CacheMixin", "CopyMixIn", "DataType", "ModuleCopyMixin", "ModuleNoCopyMixin"]


class CacheMixin(ABC):
    """Something that keeps results between calls."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forgets them."""


class CopyMixIn(ABC):
    """Something that knows how it is copied to a device."""

    @abstractmethod
    def copy(self, device: torch.device) -> Any:
        """The copy."""


class ModuleCopyMixin(CopyMixIn):
    """A module that is moved."""

    def copy(self, device: torch.device) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self.to(device)


class ModuleNoCopyMixin(CopyMixIn):
    """A module that stays where it is and is shared."""

    def copy(self, device: torch.device) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self
