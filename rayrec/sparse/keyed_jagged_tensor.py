"""The sparse features of a batch, all keys in one flat tensor, key-major: the input of every embedding collection.

What joins, cuts and reorders such tensors is written in `joining` and `reshaping`, what exchanges them in `messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rayrec.sparse import joining, messages, reshaping
from rayrec.sparse.jagged import Jagged, JaggedTensor, check_counts
from rayrec.sparse.text import keyed_text

InverseIndices = tuple[list[str], torch.Tensor]
Strides = Sequence[Sequence[int]] | torch.Tensor | None


class KeyedJaggedTensor(Jagged):
    """F sparse features of B examples: the lists of key 0 for every example, then those of key 1, and so on.

    Immutable by convention: methods return new tensors that share memory with this one.

    Args:
        keys: names of the features. A name may come twice (`permute` makes such tensors); the last one is found by it.
        values: ids of all lists `[N]`.
        weights: one number an id `[N]`, or None.
        lengths: `[F * B]`, key after key.
        offsets: `[F * B + 1]`; either of lengths and offsets is enough.
        stride: B; computed where it is not given.
        stride_per_key_per_rank: for a batch size that varies by key, one list of batch sizes a key (their sum is the
            key's batch size), as a list or as an int tensor `[F, R]`.
        stride_per_key, length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: what the methods
            of these names return, where it is known already.
        inverse_indices: with varying batch sizes, (keys, `[F, B]`): the row of a key's own batch that stands for each
            of the B examples.

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
        self._lengths = lengths
        self._offsets = offsets
        self._inverse_indices = inverse_indices
        self._strides = _as_lists(stride_per_key_per_rank)
        self._stride_per_key = [sum(s) for s in self._strides] if self._strides is not None else None
        self._stride = self._checked_stride(stride)
        self._host: KeyedJaggedTensor | None = None  # what this was copied from
        self._length_per_key = length_per_key
        self._offset_per_key = offset_per_key
        self._key_index = index_per_key
        self._jagged_by_key = jt_dict

    def _checked_stride(self, stride: int | None) -> int:
        if self._lengths is None and self._offsets is None:
            raise ValueError("KeyedJaggedTensor needs lengths or offsets")
        check_counts("KeyedJaggedTensor", lengths=self._lengths, offsets=self._offsets)
        if self._weights is not None and self._weights.shape[0] != self._values.shape[0]:
            raise ValueError(f"{self._weights.shape[0]} weights for {self._values.shape[0]} values")
        keys = self._keys
        given = max(0, self._offsets.numel() - 1) if self._lengths is None else self._lengths.numel()  # type: ignore[union-attr]
        if self._stride_per_key is not None:
            if len(self._stride_per_key) != len(keys):
                raise ValueError(
                    f"stride_per_key_per_rank has {len(self._stride_per_key)} entries for {len(keys)} keys"
                )
            wanted = sum(self._stride_per_key)
            if self._inverse_indices is not None:
                without = [key for key in keys if key not in self._inverse_indices[0]]
                if without:
                    raise ValueError(f"inverse_indices lack key {without[0]!r}; they have {self._inverse_indices[0]}")
                stride = self._inverse_indices[1].shape[-1]
            elif stride is None:
                stride = max(self._stride_per_key, default=0)
        else:
            if stride is None:
                stride = given // len(keys) if keys else 0
            wanted = stride * len(keys)
        if given != wanted and keys:
            batch = f"{len(keys)} keys × {stride} examples" if self._stride_per_key is None else "the strides given"
            raise ValueError(f"{given} lengths do not fit {batch}: {wanted} are needed")
        return stride

    # -- factories

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        lengths: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
        made = cls(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        )
        return made.sync()

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
        made = cls(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        )
        return made.sync()

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key for each entry; entries with unequal batch sizes make a batch size that varies by key.

        Raises:
            ValueError: some entries have weights and some have not.
        """
        return cls(**joining.from_jt_dict(jt_dict)) if jt_dict else cls.empty()

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All keys of all tensors, in order.

        Raises:
            ValueError: nothing to join, strides differ, or only some have weights.
        """
        return cls(**joining.concat(kjt_list))

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys and no examples; values and weights of torch's default type unless said otherwise."""
        return cls(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @classmethod
    def empty_like(cls, kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """Without a device: no keys and no data, the stride kept. With one: the same keys and sizes there, not filled,
        for `copy_`. `without_examples` keeps the keys and has no rows."""
        if device is None:
            return cls(**joining.no_keys(kjt))
        return kjt._map(lambda t: torch.empty_like(t, device=device))

    def without_examples(self) -> KeyedJaggedTensor:
        """The keys, types and device of this one, and no examples: what a rank without data brings to a step."""
        weights = None if self._weights is None else self._weights.new_empty(0)
        return KeyedJaggedTensor(self._keys, self._values.new_empty(0), weights, self.lengths().new_empty(0), stride=0)

    # -- reading

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """B, the number of examples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Each key's batch size; B for all unless it varies by key."""
        return self._stride_per_key if self._stride_per_key is not None else [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        return self._strides if self._strides is not None else [[self._stride] for _ in self._keys]

    def variable_stride_per_key(self) -> bool:
        """Whether the batch size varies by key."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        if self._inverse_indices is None:
            raise ValueError("this KeyedJaggedTensor has no inverse indices")
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """How many values each key has (on a GPU the first call synchronises)."""
        if self._length_per_key is None and self._host is not None:
            self._length_per_key = self._host.length_per_key()
        if self._length_per_key is None:
            if self._strides is None:
                counts = (
                    self.lengths().reshape(len(self._keys), self._stride).sum(1) if self._keys else self.lengths()[:0]
                )
                self._length_per_key = counts.tolist()
            else:
                ends = torch.tensor([0, *accumulate(self.stride_per_key())], device=self.device())
                at = self.offsets()[ends]
                self._length_per_key = (at[1:] - at[:-1]).tolist()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key's values start, and the end: F + 1 numbers."""
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self.length_per_key())]
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Place of each key."""
        if self._key_index is None:
            self._key_index = {key: place for place, key in enumerate(self._keys)}
        return self._key_index

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's lengths start, and the end: F + 1 numbers."""
        return [0, *accumulate(self.stride_per_key())]

    def sync(self) -> KeyedJaggedTensor:
        """Computes what later needs the host (lengths and offsets per key); returns itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forgets what `sync` computed; returns itself."""
        self._length_per_key = self._offset_per_key = None
        return self

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Each key's lists, as views; without `compute_offsets` their offsets are computed when first asked for."""
        if self._jagged_by_key is None:
            if compute_offsets:
                self.offsets()
            self._jagged_by_key = {key: self.feature(place) for place, key in enumerate(self._keys)}
        return self._jagged_by_key

    def feature(self, place: int) -> JaggedTensor:
        """The lists of the key at a place, as views."""
        start, stop = self.offset_per_key()[place : place + 2]
        strides = self.stride_per_key()
        first = sum(strides[:place]) if self._strides is not None else place * self._stride
        last = first + strides[place]
        offsets = None if self._offsets is None else self._offsets[first : last + 1] - self._offsets[first]
        return JaggedTensor(
            values=self._values[start:stop],
            weights=None if self._weights is None else self._weights[start:stop],
            lengths=self.lengths().view(-1)[first:last],
            offsets=offsets,
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        place = self.index_per_key().get(key)
        if place is None:
            raise KeyError(f"no feature {key!r}; there are {self._keys}")
        return self.feature(place)

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

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same with lengths `[F * B]`, where they were given as `[F, B]`."""
        return self._map(lambda t: t, lengths=self.lengths().view(-1))

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

    # -- moving

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """On another device; `dtype` changes that of the weights."""
        moved = self._map(lambda t: t.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        elif self.device().type == "cpu":
            moved._host = self
        return moved

    def on_host(self) -> KeyedJaggedTensor:
        """The same on the CPU: what this was copied from, as long as it has the same weights, or else a copy, for which
        the host waits."""
        if self.device().type == "cpu":
            return self
        return self.to("cpu") if self._host is None else self._host

    def pin_memory(self) -> KeyedJaggedTensor:
        return self._map(lambda t: t.pin_memory())

    def _map(
        self, fn: Callable[[torch.Tensor], torch.Tensor], lengths: torch.Tensor | None = None
    ) -> KeyedJaggedTensor:
        def apply(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else fn(tensor)

        inverse = self._inverse_indices
        out = KeyedJaggedTensor(
            self._keys,
            fn(self._values),
            apply(self._weights),
            lengths if lengths is not None else apply(self._lengths),
            apply(self._offsets),
            stride=self._stride,
            stride_per_key_per_rank=self._strides,
            inverse_indices=None if inverse is None else (inverse[0], fn(inverse[1])),
        )
        out._length_per_key, out._offset_per_key = self._length_per_key, self._offset_per_key
        return out

    def copy_(self, other: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Fills this one's tensors from `other`'s, which have the same sizes; returns itself.

        Raises:
            ValueError: weights that only one of the two has.
        """
        super().copy_(other, non_blocking)
        self._length_per_key, self._offset_per_key = other._length_per_key, other._offset_per_key
        self._jagged_by_key = None
        return self

    def clear_storage(self) -> None:
        """Frees the memory of every tensor; nothing can be read afterwards."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    # -- exchange and printing

    def dist_labels(self) -> list[str]:
        """Names of `dist_tensors`."""
        return list(messages.parts(self))

    def dist_tensors(self) -> list[torch.Tensor]:
        """What an exchange between ranks carries."""
        return list(messages.parts(self).values())

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """For consecutive groups of keys, the split sizes of each of `dist_tensors`."""
        return messages.splits(self, key_splits)

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
        """From what arrived of every rank's `dist_tensors`, rank after rank.

        Args:
            keys: of this rank.
            tensors: each of the parts, joined over ranks.
            variable_stride_per_key: the last part holds the batch sizes.
            num_workers: ranks.
            recat: int32, the order that puts rank-major parts key-major; None where they are in order.
            stride_per_rank: each rank's batch size, unless it varies by key.
            stagger: ranks come in strides of this many.
        """
        arrived = messages.Arrived(tuple(keys), tuple(tensors), num_workers, recat, stagger)
        made = (
            messages.joined_varying(arrived) if variable_stride_per_key else messages.joined(arrived, stride_per_rank)
        )
        return KeyedJaggedTensor(**made).sync()

    def __str__(self) -> str:
        return keyed_text(self)


def _as_lists(strides: Strides) -> list[list[int]] | None:
    if strides is None:
        return None
    return strides.tolist() if isinstance(strides, torch.Tensor) else [list(s) for s in strides]


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
