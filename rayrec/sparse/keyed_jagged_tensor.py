"""The sparse features of a batch, all keys in one flat tensor, key-major: the input of every embedding collection.

`keyed_jagged` stores and reads it, `joining` and `reshaping` make new ones of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rayrec.sparse import joining, reshaping
from rayrec.sparse.jagged import JaggedTensor
from rayrec.sparse.keyed_jagged import HostCopy, InverseIndices, KeyedJagged, Strides
from rayrec.sparse.messages import Received, joined, joined_varying
from rayrec.sparse.text import keyed_text


class KeyedJaggedTensor(KeyedJagged):
    """F sparse features of B examples: the lists of key 0 for every example, then those of key 1, and so on.

    Immutable by convention: methods return new tensors that share memory with this one.

    Args:
        keys: names of the features. A name may come twice (`permute` makes such tensors); the last one is found by it.
        values: ids of all lists `[N]`.
        weights: one number per id `[N]`, or None.
        lengths: `[F * B]`, key after key.
        offsets: `[F * B + 1]`; either of lengths and offsets is enough.
        stride: B; computed where it is not given.
        stride_per_key_per_rank: for a batch size that varies by key, one list of batch sizes per key (their sum is the
            key's batch size), as a list or as an int tensor `[F, R]`.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: what the
            methods of these names return, if already known.
        inverse_indices: with varying batch sizes, (keys, `[F, B]`): the row of a key's own batch that stands for each
            of the B examples.

    Raises:
        ValueError: no lengths and no offsets, ones that are not integers, or sizes that do not fit together.
    """

    # -- factories

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key for each entry; entries with unequal batch sizes make a batch size that varies by key.

        Raises:
            ValueError: some entries have weights and some have not.
        """
        return cls(**joining.from_jt_dict(jt_dict)) if jt_dict else cls([], torch.empty(0))

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, with lengths and offsets per key computed now (on a GPU this synchronizes)."""
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, with lengths and offsets per key computed now (on a GPU this synchronizes)."""
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """A tensor without keys and examples; values and weights have torch's default dtype unless you pass one."""
        return KeyedJaggedTensor(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """Without a device, a tensor without keys and data but with the stride; with one, uninitialized tensors of the
        same keys and sizes for `copy_`."""
        if device is not None:
            return kjt._map(lambda t: torch.empty_like(t, device=device))
        weights = kjt.weights_or_none()
        return KeyedJaggedTensor(
            keys=[],
            values=kjt.values().new_empty(0),
            weights=None if weights is None else weights.new_empty(0),
            lengths=kjt.lengths().new_empty(0),
            stride=kjt.stride(),
        )

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All keys of all tensors, in order.

        Raises:
            ValueError: nothing to join, strides differ, or only some have weights.
        """
        return _concat(kjt_list)

    # -- reshaping

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of keys, `segments[i]` keys in group i; of one group of all keys, this tensor itself.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        return [self if part is None else KeyedJaggedTensor(**part) for part in reshaping.split(self, segments)]

    def permute(self, indices: Sequence[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at `indices`, in that order; a key may be left out, or taken twice under its one name.

        Args:
            indices_tensor: the same numbers as a tensor on the values' device, which spares making it.
        """
        return KeyedJaggedTensor(**reshaping.permute(self, indices, indices_tensor))

    def expanded(self) -> KeyedJaggedTensor:
        """With a batch size that varies by key, the lists of all B examples, repeated as the inverse indices say; a
        tensor of one batch size is returned as it is.

        Raises:
            ValueError: the batch size varies, and there are no inverse indices.
        """
        return self if self._strides is None else KeyedJaggedTensor(**reshaping.expand(self))

    def with_weights(self, weights: torch.Tensor | None) -> KeyedJaggedTensor:
        """The same ids with these weights `[N]`, or without any.

        Raises:
            ValueError: not one weight a value.
        """
        out = self._map(lambda t: t)
        if weights is not None and weights.shape[0] != self._values.shape[0]:
            raise ValueError(f"{weights.shape[0]} weights for {self._values.shape[0]} values")
        out._weights = weights
        return out

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same tensor with lengths of shape `[F * B]`, where they were passed as `[F, B]`."""
        out = self.with_weights(self._weights)
        out._lengths = self.lengths().view(-1)
        return out

    # -- sizes on the host

    def offset_per_key_or_none(self) -> list[int] | None:
        """`offset_per_key`, if it was passed or computed."""
        return self._offset_per_key

    def sync(self) -> KeyedJaggedTensor:
        """Computes lengths and offsets per key, which later calls read on the host; returns this tensor."""
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Drops what `sync` computed; returns this tensor."""
        self._length_per_key = self._offset_per_key = None
        return self

    # -- exchange between ranks, for users who write it themselves

    def dist_labels(self) -> list[str]:
        """Names of `dist_tensors`."""
        return list(self._dist_parts())

    def dist_tensors(self) -> list[torch.Tensor]:
        """The tensors that an exchange between ranks sends."""
        return list(self._dist_parts().values())

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """Elements of each of `dist_tensors` that belong to each of several consecutive groups of keys.

        Args:
            key_splits: number of keys of each group.
        """
        edges = [0, *accumulate(key_splits)]
        rows, ids = self.lengths_offset_per_key(), self.offset_per_key()
        lengths = [rows[stop] - rows[start] for start, stop in pairwise(edges)]
        values = [ids[stop] - ids[start] for start, stop in pairwise(edges)]
        sizes = [lengths, values] if self._weights is None else [lengths, values, values]
        return [*sizes, list(key_splits)] if self.variable_stride_per_key() else sizes

    @staticmethod
    def dist_init(
        keys: Sequence[str],
        tensors: Sequence[torch.Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: torch.Tensor | None,
        stride_per_rank: Sequence[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """From the `dist_tensors` of all ranks, in order of rank.

        Args:
            keys: keys of this rank.
            tensors: each tensor, concatenated over ranks.
            variable_stride_per_key: the last tensor holds the batch sizes.
            num_workers: number of ranks.
            recat: int32, the permutation from rank-major to key-major; None if the order is right already.
            stride_per_rank: batch size of each rank, unless it varies by key.
            stagger: ranks come in strides of this size.
        """
        received = Received(tuple(keys), tuple(tensors), num_workers, recat, stagger)
        fields = joined_varying(received) if variable_stride_per_key else joined(received, stride_per_rank)
        return KeyedJaggedTensor(**fields).sync()

    def _dist_parts(self) -> dict[str, torch.Tensor]:
        tensors = {"lengths": self.lengths(), "values": self._values}
        if self._weights is not None:
            tensors["weights"] = self._weights
        if self.variable_stride_per_key():
            tensors["strides"] = torch.tensor(self.stride_per_key(), device=self.device())
        return tensors

    # -- moving

    def copy_(self, other: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copies the tensors of `other`, which has the same sizes, into this one's; returns this one.

        Like a copy made by `to`, one on a GPU remembers `other`.

        Raises:
            ValueError: only one of the two has weights.
        """
        super().copy_(other, non_blocking)
        self._length_per_key, self._offset_per_key = other._length_per_key, other._offset_per_key
        self._jagged_by_key = None
        self._remember(other)
        return self

    def clear_storage(self) -> None:
        """Frees the memory of every tensor; none can be read afterwards."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """On another device; `dtype` changes that of the weights.

        A copy on a GPU remembers this tensor, so that sharded collections need not copy the ids back: do not overwrite
        this tensor's memory (a reused pinned buffer) while a step uses the copy. An in-place change by torch of either
        is noticed afterwards; one by NumPy or another process is not.
        """
        moved = self._map(lambda t: t.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        else:
            moved._remember(self)
        return moved

    def _remember(self, source: KeyedJaggedTensor) -> None:
        on_device = source.device().type == "cpu" != self.device().type
        self._host = HostCopy.of(source, self) if on_device else None

    def on_host(self) -> KeyedJaggedTensor:
        """The same on the CPU: what this was copied from, if both are unchanged, or else a copy, which synchronises."""
        if self.device().type == "cpu":
            return self
        host = self.host_copy()
        return host if isinstance(host, KeyedJaggedTensor) else self.to("cpu")

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._map(lambda t: t.pin_memory())

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> KeyedJaggedTensor:
        def apply(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else fn(tensor)

        inverse = self._inverse_indices
        out = KeyedJaggedTensor(
            self._keys,
            fn(self._values),
            apply(self._weights),
            apply(self._lengths),
            apply(self._offsets),
            stride=self._stride,
            stride_per_key_per_rank=self._strides,
            inverse_indices=None if inverse is None else (inverse[0], fn(inverse[1])),
        )
        out._length_per_key, out._offset_per_key = self._length_per_key, self._offset_per_key
        return out

    # -- printing

    def __str__(self) -> str:
        return keyed_text([(key, (jt := self[key]).to_dense(), jt.to_dense_weights()) for key in self.keys()])


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    names, indices = kjt._inverse_indices or (None, None)
    parts = [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, indices]
    return parts, (kjt._keys, kjt._stride, kjt._strides, names)


def _unflatten(parts: Any, context: Any) -> KeyedJaggedTensor:
    out = KeyedJaggedTensor.__new__(KeyedJaggedTensor)  # tracing may hand in placeholders that have no shape to check
    out._keys, out._stride, out._strides, names = context
    out._values, out._weights, out._lengths, out._offsets, indices = parts
    out._inverse_indices = None if names is None else (names, indices)
    out._stride_per_key = None if out._strides is None else [sum(part) for part in out._strides]
    out._length_per_key = out._offset_per_key = out._key_index = out._jagged_by_key = out._host = None
    return out


pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="rayrec.sparse.KeyedJaggedTensor"
)


@torch.fx.wrap  # one node of a traced model
def _concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**joining.concat(kjt_list))
