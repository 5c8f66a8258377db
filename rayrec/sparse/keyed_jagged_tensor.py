"""The sparse features of a batch, key-major in one flat tensor: the input of every embedding collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree

from rayrec.sparse import ops
from rayrec.sparse.jagged_tensor import Jagged, JaggedTensor, checked_integers, lists_text
from rayrec.sparse.messages import Received, joined, joined_varying

InverseIndices = tuple[list[str], torch.Tensor]
Strides = Sequence[Sequence[int]] | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The CPU tensor that a device tensor was copied from, with the versions of both tensors' memory at that time."""

    source: KeyedJaggedTensor
    versions: tuple[tuple[torch.Tensor, int], ...]

    @classmethod
    def of(cls, source: KeyedJaggedTensor, copy: KeyedJaggedTensor) -> HostCopy:
        tensors = (*source._tensors(), *copy._tensors())
        return cls(source, tuple((t, t._version) for t in tensors if not t.is_inference()))  # these have no version

    def changed(self) -> bool:
        """Whether torch has modified a tensor in place since."""
        return any(tensor._version != version for tensor, version in self.versions)


class KeyedJaggedTensor(Jagged):
    """F sparse features of B examples: the lists of key 0 for every example, then those of key 1, and so on.

    Immutable by convention: methods return new tensors that share memory with this one.

    Args:
        keys: names of the features. A name may come twice (`permute` makes such tensors); a lookup by name then returns
            the last one.
        values: ids of all lists `[N]`.
        weights: one number per id `[N]`, or None.
        lengths: `[F * B]`, key-major.
        offsets: `[F * B + 1]`; lengths or offsets suffice.
        stride: B; computed by default.
        stride_per_key_per_rank: for a batch size that varies by key, one list of batch sizes per key (their sum is the
            key's batch size), as a list or as an int tensor `[F, R]`.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: results of the
            methods of these names, if already known.
        inverse_indices: with varying batch sizes, (keys, `[F, B]`): the row of a key's own batch for each of the B
            examples.

    Raises:
        ValueError: no lengths and no offsets, ones that are not integers, or sizes that do not fit together.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        self._keys = list(keys)
        self._values = values
        self._weights = weights
        if lengths is None and offsets is None and not self._keys:
            lengths = torch.zeros(0, dtype=torch.int32, device=values.device)
        self._lengths = checked_integers("KeyedJaggedTensor", "lengths", lengths)
        self._offsets = checked_integers("KeyedJaggedTensor", "offsets", offsets)
        self._inverse_indices = inverse_indices
        self._strides = _as_lists(stride_per_key_per_rank)
        self._stride_per_key = [sum(s) for s in self._strides] if self._strides is not None else None
        self._stride = self._checked_stride(stride)
        self._host: HostCopy | None = None
        self._length_per_key = length_per_key
        self._offset_per_key = offset_per_key
        self._key_index = index_per_key
        self._jagged_by_key = jt_dict

    def _checked_stride(self, stride: int | None) -> int:
        if self._lengths is None and self._offsets is None:
            raise ValueError("KeyedJaggedTensor needs lengths or offsets")
        if self._weights is not None and self._weights.shape[0] != self._values.shape[0]:
            raise ValueError(f"{self._weights.shape[0]} weights for {self._values.shape[0]} values")
        keys = self._keys
        actual = max(0, self._offsets.numel() - 1) if self._lengths is None else self._lengths.numel()  # type: ignore[union-attr]
        if self._stride_per_key is not None:
            if len(self._stride_per_key) != len(keys):
                raise ValueError(
                    f"stride_per_key_per_rank has {len(self._stride_per_key)} entries for {len(keys)} keys"
                )
            expected = sum(self._stride_per_key)
            if self._inverse_indices is not None:
                missing = [key for key in keys if key not in self._inverse_indices[0]]
                if missing:
                    raise ValueError(f"inverse_indices lack key {missing[0]!r}; they have {self._inverse_indices[0]}")
                stride = self._inverse_indices[1].shape[-1]
            elif stride is None:
                stride = max(self._stride_per_key, default=0)
        else:
            if stride is None:
                stride = actual // len(keys) if keys else 0
            expected = stride * len(keys)
        if actual != expected and keys:
            batch = f"{len(keys)} keys × {stride} examples" if self._stride_per_key is None else "the strides given"
            raise ValueError(f"{actual} lengths do not fit {batch}: {expected} are needed")
        return stride

    # -- factories

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry; entries of unequal batch sizes make a batch size that varies by key.

        Raises:
            ValueError: only some entries have weights.
        """
        if not jt_dict:
            return cls([], torch.empty(0))
        jts = list(jt_dict.values())
        strides = [jt.lengths().shape[0] for jt in jts]
        return cls(
            keys=list(jt_dict),
            values=_cat([jt.values() for jt in jts]),
            weights=_cat_weights([(key, jt.weights_or_none()) for key, jt in jt_dict.items()]),
            lengths=_cat([jt.lengths() for jt in jts]),
            stride_per_key_per_rank=[[s] for s in strides] if len(set(strides)) > 1 else None,
        )

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
            ValueError: an empty list, unequal strides, or only some tensors have weights.
        """
        return _concat(kjt_list)

    # -- reading

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """B, the number of examples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Each key's batch size; B for all keys unless it varies."""
        return self._stride_per_key if self._stride_per_key is not None else [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Each key's batch sizes by rank; empty unless batch sizes vary by key."""
        return self._strides or []

    def variable_stride_per_key(self) -> bool:
        """Whether the batch size varies by key."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Keys, and `[F, B]`: the list of each key for each example.

        Raises:
            ValueError: the tensor has none.
        """
        if self._inverse_indices is None:
            sizes = dict(zip(self._keys, self.stride_per_key(), strict=True))
            raise ValueError(
                f"this KeyedJaggedTensor has no inverse indices; its batch sizes differ by key ({sizes}), so give "
                "inverse_indices, which map each example to a list of each key"
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """Number of values of each key. The first call may synchronize with a GPU."""
        host = None if self._host is None else self.host_copy()
        if self._length_per_key is None and host is not None:
            self._length_per_key = host.length_per_key()
        if self._length_per_key is None:
            if self._strides is None:
                counts = (
                    self.lengths().reshape(len(self._keys), self._stride).sum(1) if self._keys else self.lengths()[:0]
                )
                self._length_per_key = counts.tolist()
            else:
                ends = torch.tensor([0, *accumulate(self.stride_per_key())], device=self.device())
                edges = self.offsets()[ends]
                self._length_per_key = (edges[1:] - edges[:-1]).tolist()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Start of each key's values, and the end of the last: F + 1 numbers."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self.length_per_key())]
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        if self._key_index is None:
            self._key_index = {key: index for index, key in enumerate(self._keys)}
        return self._key_index

    def lengths_offset_per_key(self) -> list[int]:
        """Start of each key's lengths, and the end of the last: F + 1 numbers."""
        return [0, *accumulate(self.stride_per_key())]

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Each key's lists, as views; without `compute_offsets` their offsets are computed on first use."""
        if self._jagged_by_key is None:
            if compute_offsets:
                self.offsets()
            self._jagged_by_key = {key: self.feature(index) for index, key in enumerate(self._keys)}
        return self._jagged_by_key

    def feature(self, index: int) -> JaggedTensor:
        """The lists of the key at position `index`, as views."""
        start, stop = self.offset_per_key()[index : index + 2]
        strides = self.stride_per_key()
        first = sum(strides[:index]) if self._strides is not None else index * self._stride
        last = first + strides[index]
        offsets = None if self._offsets is None else self._offsets[first : last + 1] - self._offsets[first]
        return JaggedTensor(
            values=self._values[start:stop],
            weights=None if self._weights is None else self._weights[start:stop],
            lengths=self.lengths().view(-1)[first:last],
            offsets=offsets,
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        index = self.index_per_key().get(key)
        if index is None:
            raise KeyError(f"no feature {key!r}; there are {self._keys}")
        return self.feature(index)

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        return "KeyedJaggedTensor({\n" + ",\n".join(self._feature_text(key) for key in self._keys) + "\n})\n"

    def _feature_text(self, key: str) -> str:
        lists, weights = self[key].to_dense(), self[key].to_dense_weights()
        text = lists_text(lists, weights, indent=" " * 8)
        return f'    "{key}": {text}' if weights is None else f'    "{key}": {{\n        {text}\n    }}'

    # -- reshaping

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of keys, `segments[i]` keys in group i; a group of all keys is this tensor itself.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        num_keys = len(self._keys)
        if sum(segments) != num_keys:
            raise ValueError(f"split: segments {list(segments)} do not add up to {num_keys} keys")
        edges = pairwise([0, *accumulate(segments)])
        return [self if num_keys and edge == (0, num_keys) else self._slice(*edge) for edge in edges]

    def _slice(self, first: int, last: int) -> KeyedJaggedTensor:
        """Keys `first` to `last`."""
        start, stop = self.offset_per_key()[first], self.offset_per_key()[last]
        rows = self.lengths_offset_per_key()
        return KeyedJaggedTensor(
            keys=self._keys[first:last],
            values=self._values[start:stop],
            weights=None if self._weights is None else self._weights[start:stop],
            lengths=self.lengths()[rows[first] : rows[last]],
            stride=self._stride,
            stride_per_key_per_rank=None if self._strides is None else self._strides[first:last],
            inverse_indices=self._inverse_of(range(first, last)),
        )

    def permute(self, indices: Sequence[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at `indices`, in that order; a key may be left out, or repeated under its one name.

        Args:
            indices_tensor: the same numbers as a tensor on the values' device, which saves making it.
        """
        keys = [self._keys[i] for i in indices]
        if self._strides is not None:
            return self._permute_varying(indices, keys)
        order = indices_tensor
        if order is None:
            order = torch.tensor(list(indices), dtype=torch.int32, device=self.device())
        sizes = self._length_per_key
        lengths, values, weights = ops.permute_segments(
            order.to(torch.int32),
            self.lengths().view(len(self._keys), self._stride),
            self._values,
            self._weights,
            sum(sizes[i] for i in indices) if sizes is not None else None,
        )
        return KeyedJaggedTensor(keys, values, weights, lengths.view(-1), stride=self._stride)

    def _permute_varying(self, indices: Sequence[int], keys: list[str]) -> KeyedJaggedTensor:
        features, weights = [self.feature(i) for i in indices], self._weights
        if weights is not None:
            weights = _cat([jt.weights() for jt in features]) if features else weights[:0]
        assert self._strides is not None
        return KeyedJaggedTensor(
            keys=keys,
            values=_cat([jt.values() for jt in features]) if features else self._values[:0],
            weights=weights,
            lengths=_cat([jt.lengths() for jt in features]) if features else self.lengths()[:0],
            stride=self._stride,
            stride_per_key_per_rank=[self._strides[i] for i in indices],
            inverse_indices=self._inverse_of(indices),
        )

    def _inverse_of(self, indices: Sequence[int]) -> InverseIndices | None:
        """The inverse indices of the keys at `indices`."""
        if self._inverse_indices is None:
            return None
        keys, indices_FB = self._inverse_indices
        names = [self._keys[index] for index in indices]
        return names, indices_FB[[keys.index(name) for name in names]]

    def expanded(self) -> KeyedJaggedTensor:
        """With a batch size that varies by key, the lists of all B examples, repeated according to the inverse indices;
        else this tensor itself.

        Raises:
            ValueError: the batch size varies, and the tensor has no inverse indices.
        """
        if self._strides is None:
            return self
        keys, indices_FB = self.inverse_indices()
        order = [keys.index(key) for key in self._keys]
        starts = torch.tensor(self.lengths_offset_per_key()[:-1], device=self.device())
        rows = (indices_FB[order] + starts[:, None]).view(-1).to(torch.int32)
        lengths, values, weights = ops.permute_segments(rows, self.lengths()[:, None], self._values, self._weights)
        return KeyedJaggedTensor(self._keys, values, weights, lengths.view(-1), stride=self._stride)

    def with_weights(self, weights: torch.Tensor | None) -> KeyedJaggedTensor:
        """The same ids with these weights `[N]`, or without weights.

        Raises:
            ValueError: weights of another length than the values.
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
        """Computes lengths and offsets per key, which later calls read on the host; returns this tensor. Does nothing
        on the meta device, where lengths have no values."""
        if self.device().type != "meta":
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
        self._set_host_copy(other)
        return self

    def clear_storage(self) -> None:
        """Frees the memory of every tensor; none can be read afterwards."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """A copy on another device; `dtype` changes that of the weights.

        A copy on a GPU keeps a reference to this tensor, so that sharded collections need not copy the ids back: do not
        overwrite this tensor's memory (a reused pinned buffer) while a step uses the copy. In-place changes of either
        by torch are detected; those by NumPy or another process are not.
        """
        moved = self._map(lambda t: t.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        else:
            moved._set_host_copy(self)
        return moved

    def _set_host_copy(self, source: KeyedJaggedTensor) -> None:
        to_device = source.device().type == "cpu" != self.device().type
        self._host = HostCopy.of(source, self) if to_device else None

    def host_copy(self) -> KeyedJaggedTensor | None:
        """The CPU tensor that this one was copied from; None without one, or if either has changed since."""
        return None if self._host is None or self._host.changed() else self._host.source

    def on_host(self) -> KeyedJaggedTensor:
        """The same on the CPU: `host_copy()` if there is one, or else a copy, which synchronizes."""
        if self.device().type == "cpu":
            return self
        return self.host_copy() or self.to("cpu")

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


def check_input(kjt: KeyedJaggedTensor, features: Sequence[str], weighted: bool = False) -> None:
    """Raises ValueError if the input lacks a feature that a table reads, or the weights of a weighted collection."""
    missing = [name for name in features if name not in kjt.index_per_key()]
    if missing:
        raise ValueError(f"the input has no feature {missing[0]!r}, which a table reads; it has {kjt.keys()}")
    if weighted and kjt.weights_or_none() is None:
        raise ValueError("the collection is weighted, but the input has no weights")


def _as_lists(strides: Strides) -> list[list[int]] | None:
    if strides is None:
        return None
    return strides.tolist() if isinstance(strides, torch.Tensor) else [list(s) for s in strides]


@torch.fx.wrap  # one node of a traced model
def _concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if not kjt_list:
        raise ValueError("concat: there is nothing to join")
    varying = any(kjt.variable_stride_per_key() for kjt in kjt_list)
    inverses = [inverse for kjt in kjt_list if (inverse := kjt.inverse_indices_or_none()) is not None]
    joinable = len(inverses) == len(kjt_list)
    if (not varying or joinable) and len({kjt.stride() for kjt in kjt_list}) > 1:
        raise ValueError(f"concat: strides differ: {[kjt.stride() for kjt in kjt_list]}")
    strides = [s for kjt in kjt_list for s in kjt.stride_per_key_per_rank() or [[kjt.stride()] for _ in kjt.keys()]]
    return KeyedJaggedTensor(
        keys=[key for kjt in kjt_list for key in kjt.keys()],
        values=_cat([kjt.values() for kjt in kjt_list]),
        weights=_cat_weights([(", ".join(kjt.keys()), kjt.weights_or_none()) for kjt in kjt_list]),
        lengths=_cat([kjt.lengths() for kjt in kjt_list]),
        stride=None if varying else kjt_list[0].stride(),
        stride_per_key_per_rank=strides if varying else None,
        inverse_indices=(
            ([key for keys, _ in inverses for key in keys], torch.cat([indices for _, indices in inverses]))
            if joinable
            else None
        ),
    )


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _cat_weights(named: Sequence[tuple[str, torch.Tensor | None]]) -> torch.Tensor | None:
    """All weights joined; the names are for the error."""
    weights = [w for _, w in named if w is not None]
    if not weights:
        return None
    if len(weights) != len(named):
        unweighted = [name for name, w in named if w is None]
        raise ValueError(f"weighted and unweighted features cannot be joined; without weights: {unweighted}")
    return _cat(weights)


def _flatten(kjt: KeyedJaggedTensor) -> tuple[list[Any], Any]:
    names, indices = kjt._inverse_indices or (None, None)
    tensors = [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, indices]
    return tensors, (kjt._keys, kjt._stride, kjt._strides, names)


def _unflatten(tensors: Any, context: Any) -> KeyedJaggedTensor:
    # Tracing may pass placeholders without a shape, so the constructor's checks are skipped.
    out = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    out._keys, out._stride, out._strides, names = context
    out._values, out._weights, out._lengths, out._offsets, indices = tensors
    out._inverse_indices = None if names is None else (names, indices)
    out._stride_per_key = None if out._strides is None else [sum(strides) for strides in out._strides]
    out._length_per_key = out._offset_per_key = out._key_index = out._jagged_by_key = out._host = None
    return out


def _flatten_as(kjt: KeyedJaggedTensor, spec: pytree.TreeSpec) -> list[torch.Tensor | None]:
    """The tensors of the keys that a model was traced or exported with, in their order."""
    keys: list[str] = spec.context[0]
    if kjt._keys != keys:
        index = kjt.index_per_key()
        missing = [key for key in keys if key not in index]
        if missing:
            raise ValueError(f"the model takes a feature {missing[0]!r}; the input has {kjt._keys}")
        kjt = kjt.permute([index[key] for key in keys])
    return _flatten(kjt)[0]


pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="rayrec.sparse.KeyedJaggedTensor"
)
register_pytree_flatten_spec(KeyedJaggedTensor, _flatten_as)
