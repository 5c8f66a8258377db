"""Named blocks of a dense tensor: the output of an embedding bag collection."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from rayrec._runtime.streamable import Pipelineable
from rayrec.sparse.jagged_tensor import Traceable


class KeyedTensor(Pipelineable, metaclass=Traceable):
    """Named blocks of a tensor `values [B, sum of lengths]` along `key_dim`.

    Args:
        keys: name of each block.
        length_per_key: width of each block.
        values: the blocks, concatenated along `key_dim`.
        key_dim: dimension of the blocks; 1 for pooled embeddings.
        offset_per_key, index_per_key: results of the methods of these names, if already known.

    Raises:
        ValueError: widths that do not add up to the tensor's.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: torch.Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        # Without keys, the tensor may be of any shape.
        width = values.shape[key_dim] if self._keys or values.dim() > key_dim else 0
        if len(self._keys) != len(self._length_per_key) or width != sum(self._length_per_key):
            raise ValueError(
                f"KeyedTensor: {len(self._keys)} keys with widths {self._length_per_key} do not fit a tensor of "
                f"shape {list(values.shape)} along dimension {key_dim}"
            )

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Start of each block, and the end of the last."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self._length_per_key)]
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key; the last position of a repeated key."""
        if self._index_per_key is None:
            self._index_per_key = {key: index for index, key in enumerate(self._keys)}
        return self._index_per_key

    def device(self) -> torch.device:
        return self._values.device

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Each key's block, as views."""
        if not self._keys:
            return {}
        return dict(zip(self._keys, self._values.split(self._length_per_key, self._key_dim), strict=True))

    def __getitem__(self, key: str) -> torch.Tensor:
        index = self.index_per_key().get(key)
        if index is None:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        """For each group of keys, their blocks concatenated. If several tensors have a key, the last tensor's is used.

        Raises:
            KeyError: a group names a key that no tensor has.
        """
        return _regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """`regroup` with a name for each group.

        Raises:
            ValueError: another number of names than of groups.
        """
        if len(keys) != len(groups):
            raise ValueError(f"regroup_as_dict: {len(keys)} names for {len(groups)} groups")
        blocks = KeyedTensor.regroup(keyed_tensors, groups)
        # by index: in a traced model the blocks are one node, which has no length
        return {key: blocks[index] for index, key in enumerate(keys)}

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """From one tensor per key, concatenated along `cat_dim`. Without keys the tensor is empty."""
        if not keys:
            return KeyedTensor([], [], torch.empty(0), key_dim)
        return KeyedTensor(keys, [t.shape[key_dim] for t in tensors], torch.cat(list(tensors), dim=cat_dim), key_dim)

    def size_in_bytes(self) -> int:
        """Bytes of the tensor."""
        return self._values.numel() * self._values.element_size()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        if self._values.is_cuda:
            self._values.record_stream(stream)

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedTensor()\n"
        blocks = ",\n".join(f'    "{key}": {block.tolist()}' for key, block in self.to_dict().items())
        return "KeyedTensor({\n" + blocks + "\n})\n"


def _flatten(kt: KeyedTensor) -> tuple[list[Any], Any]:
    return [kt._values], (kt._keys, kt._length_per_key, kt._key_dim)


def _unflatten(tensors: Any, context: Any) -> KeyedTensor:
    keys, lengths, key_dim = context
    # Tracing may pass placeholders without a shape, so the constructor's checks are skipped.
    out = KeyedTensor.__new__(KeyedTensor)
    out._keys, out._length_per_key, out._key_dim = keys, lengths, key_dim
    out._offset_per_key = out._index_per_key = None
    (out._values,) = tensors
    return out


def _flatten_as(kt: KeyedTensor, spec: pytree.TreeSpec) -> list[torch.Tensor]:
    """The tensor with its blocks in the order of the keys that a model was traced or exported with."""
    keys, lengths, key_dim = spec.context
    if (kt._keys, kt._length_per_key, kt._key_dim) == (keys, lengths, key_dim):
        return [kt._values]
    widths = dict(zip(kt._keys, kt._length_per_key, strict=True))
    if kt._key_dim != key_dim or [widths.get(key) for key in keys] != lengths:
        raise ValueError(f"the model takes blocks {dict(zip(keys, lengths, strict=True))}, not {widths}")
    return _regrouped([kt], [keys]) if keys else [kt._values]


pytree.register_pytree_node(KeyedTensor, _flatten, _unflatten, serialized_type_name="rayrec.sparse.KeyedTensor")


register_pytree_flatten_spec(KeyedTensor, _flatten_as)


@torch.fx.wrap  # one node of a traced model: `groups` has no tensors
def _regrouped(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
    blocks: dict[str, torch.Tensor] = {}
    for keyed in keyed_tensors:
        blocks.update(keyed.to_dict())
    missing = [key for group in groups for key in group if key not in blocks]
    if missing:
        raise KeyError(f"regroup: no key {missing[0]!r}; there are {list(blocks)}")
    dim = keyed_tensors[0].key_dim() if keyed_tensors else 1
    nothing = [] if all(groups) else [keyed_tensors[0].values().narrow(dim, 0, 0)]
    return [torch.cat([blocks[key] for key in group] or nothing, dim=dim) for group in groups]
