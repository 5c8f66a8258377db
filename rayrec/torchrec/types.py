"""`torchrec.types`: `DataType`, and base classes of modules with a cache or a custom copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from rayrec.modules.configs import DataType

__all__ = ["CacheMixin", "CopyMixIn", "DataType", "ModuleCopyMixin", "ModuleNoCopyMixin"]


class CacheMixin(ABC):
    """An object with a cache."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Clears the cache."""


class CopyMixIn(ABC):
    """An object that can be copied to a device."""

    @abstractmethod
    def copy(self, device: torch.device) -> Any:
        """Returns the copy."""


class ModuleCopyMixin(CopyMixIn):
    """A module that `copy` moves."""

    def copy(self, device: torch.device) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self.to(device)


class ModuleNoCopyMixin(CopyMixIn):
    """A module that `copy` returns unchanged."""

    def copy(self, device: torch.device) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self
