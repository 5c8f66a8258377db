"""`torchrec.modules.regroup`: regrouping of pooled vectors as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.modules.configs import DataType
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import KeyedTensor

__getattr__ = names_left_out(__name__)

__all__ = ["KTRegroupAsDict"]


class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` with fixed groups.

    Args:
        groups: the keys of each group.
        keys: the names of the groups.
        emb_dtype: data type of the output; default: that of the input.
        multi_device: ignored; the module has no cache.

    Raises:
        ValueError: the number of names differs from the number of groups.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"KTRegroupAsDict: {len(keys)} names for {len(groups)} groups")
        self._groups, self._keys = [list(group) for group in groups], list(keys)
        self._dtype = None if emb_dtype is None else emb_dtype.dtype

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, torch.Tensor]:
        """Returns `[B, total width of the keys]` of each group, by name."""
        blocks = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        if self._dtype is None:
            return blocks
        return {name: block.to(self._dtype) for name, block in blocks.items()}

    def clear_cache(self) -> None:
        """Does nothing; the module has no cache."""
