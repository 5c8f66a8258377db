"""The sparse features of a batch, all keys in one flat tensor, key-major: the input of every embedding collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rayrec.sparse import ops
from rayrec.sparse.jagged import Jagged, JaggedTensor, jagged_text

InverseIndices = tuple[list[str], torch.Tensor]


class KeyedJaggedTensor(Jagged):
    """F sparse features of B examples: the lists of key 0 for every example, then those of key 1, and so on.

    Immutable by convention: methods return new tensors that share memory with this one.

    Args:
        keys: names of the features, each once.
        values: ids of all lists `[N]`.
        weights: one number an id `[N]`, or None.
        lengths: `[F * B]`, key after key.
        offsets: `[F * B + 1]`; either of lengths and offsets is enough.
        stride: B; computed where it is not given.
        stride_per_key_per_rank: for a batch size that varies by key, one list of batch sizes a key (their sum is the
            key's batch size), as a list or as an int tensor `[F, R]`.
        inverse_indices: with varying batch sizes, (keys, `[F, B]`): the row of a key's own batch that stands for each
            of the B examples.

    Raises:
        ValueError: no lengths and no offsets, sizes that do not fit together, or a key that comes twice.
    """

    __slots__ = (
        "_inverse_indices",
        "_jagged_by_key",
        "_key_index",
        "_keys",
        "_length_per_key",
        "_offset_per_key",
        "_stride",
        "_stride_per_key",
        "_strides",
    )

    def __init__(
        self,
        keys: Sequence[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | torch.Tensor | None = None,
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
        self._length_per_key: list[int] | None = None
        self._offset_per_key: list[int] | None = None
        self._key_index: dict[str, int] | None = None
        self._jagged_by_key: dict[str, JaggedTensor] | None = None

    def _checked_stride(self, stride: int | None) -> int:
        if self._lengths is None and self._offsets is None:
            raise ValueError("KeyedJaggedTensor needs lengths or offsets")
        if self._weights is not None and self._weights.shape[0] != self._values.shape[0]:
            raise ValueError(f"{self._weights.shape[0]} weights for {self._values.shape[0]} values")
        keys = self._keys
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {twice!r} comes twice; use permute to read a feature several times")
        given = self._offsets.numel() - 1 if self._lengths is None else self._lengths.numel()  # type: ignore[union-attr]
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
        **kwargs: Any,
    ) -> KeyedJaggedTensor:
        """From lengths, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
        return cls(keys, values, weights, lengths=lengths, **kwargs).sync()

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> KeyedJaggedTensor:
        """From offsets, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
        return cls(keys, values, weights, offsets=offsets, **kwargs).sync()

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key for each entry; entries with unequal batch sizes make a batch size that varies by key.

        Raises:
            ValueError: some entries have weights and some have not.
        """
        if not jt_dict:
            return cls.empty()
        jts = list(jt_dict.values())
        strides = [jt.lengths().shape[0] for jt in jts]
        return cls(
            keys=list(jt_dict),
            values=_cat([jt.values() for jt in jts]),
            weights=_cat_weights({key: jt.weights_or_none() for key, jt in jt_dict.items()}),
            lengths=_cat([jt.lengths() for jt in jts]),
            stride_per_key_per_rank=[[s] for s in strides] if len(set(strides)) > 1 else None,
        )

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All keys of all tensors, in order.

        Raises:
            ValueError: strides differ, a key comes twice, or only some have weights.
        """
        if not kjt_list:
            raise ValueError("concat: there is nothing to join; use KeyedJaggedTensor.empty() for no features")
        varying = any(kjt.variable_stride_per_key() for kjt in kjt_list)
        joined = _join_inverse(kjt_list)
        if (not varying or joined is not None) and len({kjt.stride() for kjt in kjt_list}) > 1:
            raise ValueError(f"concat: strides differ: {[kjt.stride() for kjt in kjt_list]}")
        weights = {", ".join(kjt.keys()): kjt.weights_or_none() for kjt in kjt_list}
        return cls(
            keys=[key for kjt in kjt_list for key in kjt.keys()],
            values=_cat([kjt.values() for kjt in kjt_list]),
            weights=_cat_weights(weights),
            lengths=_cat([kjt.lengths() for kjt in kjt_list]),
            stride=None if varying else kjt_list[0].stride(),
            stride_per_key_per_rank=[s for kjt in kjt_list for s in kjt.stride_per_key_per_rank()] if varying else None,
            inverse_indices=None if joined is None else (joined[0], torch.cat(joined[1])),
        )

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype = torch.int64,
        weights_dtype: torch.dtype = torch.float32,
        lengths_dtype: torch.dtype = torch.int64,
    ) -> KeyedJaggedTensor:
        """No keys and no examples."""
        return cls(
            keys=[],
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            stride=0,
        )

    @classmethod
    def empty_like(cls, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The keys, dtypes and device of `kjt`, and no examples: what a rank without data brings to a step."""
        weights = kjt.weights_or_none()
        return cls(
            keys=kjt.keys(),
            values=kjt.values().new_empty(0),
            weights=None if weights is None else weights.new_empty(0),
            lengths=kjt.lengths().new_empty(0),
            stride=0,
        )

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
        if self._length_per_key is None:
            if self._strides is None:
                counts = self.lengths().view(len(self._keys), self._stride).sum(1) if self._keys else self.lengths()
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

    def sync(self) -> KeyedJaggedTensor:
        """Computes what later needs the host (lengths and offsets per key); returns itself."""
        self.offset_per_key()
        return self

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each key's lists, as views."""
        if self._jagged_by_key is None:
            self._jagged_by_key = {key: self._feature(place) for place, key in enumerate(self._keys)}
        return self._jagged_by_key

    def _feature(self, place: int) -> JaggedTensor:
        start, stop = self.offset_per_key()[place : place + 2]
        strides = self.stride_per_key()
        first = sum(strides[:place]) if self._strides is not None else place * self._stride
        last = first + strides[place]
        offsets = None if self._offsets is None else self._offsets[first : last + 1] - self._offsets[first]
        return JaggedTensor(
            values=self._values[start:stop],
            weights=None if self._weights is None else self._weights[start:stop],
            lengths=self.lengths()[first:last],
            offsets=offsets,
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        place = self.index_per_key().get(key)
        if place is None:
            raise KeyError(f"no feature {key!r}; there are {self._keys}")
        return self._feature(place)

    # -- reshaping

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Consecutive groups of keys, `segments[i]` keys in group i.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        if sum(segments) != len(self._keys):
            raise ValueError(f"split: segments {list(segments)} do not add up to {len(self._keys)} keys")
        edges = [0, *accumulate(segments)]
        return [self._slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]

    def _slice(self, first: int, last: int) -> KeyedJaggedTensor:
        start, stop = self.offset_per_key()[first], self.offset_per_key()[last]
        rows = [0, *accumulate(self.stride_per_key())]
        return KeyedJaggedTensor(
            keys=self._keys[first:last],
            values=self._values[start:stop],
            weights=None if self._weights is None else self._weights[start:stop],
            lengths=self.lengths()[rows[first] : rows[last]],
            stride=self._stride,
            stride_per_key_per_rank=None if self._strides is None else self._strides[first:last],
            inverse_indices=self._inverse_of(range(first, last), self._keys[first:last]),
        )

    def _inverse_of(self, places: Sequence[int], names: list[str]) -> InverseIndices | None:
        """The inverse indices of the keys at `places`, under new names."""
        if self._inverse_indices is None:
            return None
        keys, indices_FB = self._inverse_indices
        return names, indices_FB[[keys.index(self._keys[place]) for place in places]]

    def permute(self, indices: Sequence[int], indices_tensor: torch.Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at `indices`, in that order. A key taken twice is named `name`, `name@1`, `name@2` …"""
        order = indices_tensor
        if order is None:
            order = torch.tensor(list(indices), dtype=torch.int32, device=self.device())
        keys = _distinct([self._keys[i] for i in indices])
        if self._strides is not None:
            parts = [self._feature(i) for i in indices]
            return KeyedJaggedTensor(
                keys=keys,
                values=_cat([p.values() for p in parts]),
                weights=None if self._weights is None else _cat([p.weights() for p in parts]),
                lengths=_cat([p.lengths() for p in parts]),
                stride=self._stride,
                stride_per_key_per_rank=[self._strides[i] for i in indices],
                inverse_indices=self._inverse_of(indices, keys),
            )
        known = self._length_per_key
        lengths, values, weights = ops.permute_segments(
            order.to(torch.int32),
            self.lengths().view(len(self._keys), self._stride),
            self._values,
            self._weights,
            sum(known[i] for i in indices) if known is not None else None,
        )
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths.view(-1), stride=self._stride)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same with lengths `[F * B]`, where they were given as `[F, B]`."""
        return self._map(lambda t: t, lengths=self.lengths().view(-1))

    def expanded(self) -> KeyedJaggedTensor:
        """With a batch size that varies by key, the lists of all B examples, repeated as the inverse indices say; a
        tensor of one batch size is returned as it is.

        Raises:
            ValueError: the batch size varies, and there are no inverse indices.
        """
        if self._strides is None:
            return self
        if self._inverse_indices is None:
            raise ValueError(
                f"batch sizes differ by key ({dict(zip(self._keys, self.stride_per_key(), strict=True))}); "
                "give inverse_indices, which say which list stands for each example"
            )
        keys, indices_FB = self._inverse_indices
        order = [keys.index(key) for key in self._keys]
        starts = torch.tensor([0, *accumulate(self.stride_per_key())][:-1], device=self.device())
        rows = (indices_FB[order] + starts[:, None]).view(-1).to(torch.int32)
        lengths, values, weights = ops.permute_segments(rows, self.lengths()[:, None], self._values, self._weights)
        return KeyedJaggedTensor(self._keys, values, weights, lengths=lengths.view(-1), stride=self._stride)

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
        return moved

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

    # -- exchange and printing

    def dist_labels(self) -> list[str]:
        """Names of `dist_tensors`."""
        return ["lengths", "values"] if self._weights is None else ["lengths", "values", "weights"]

    def dist_tensors(self) -> list[torch.Tensor]:
        """What an exchange between ranks carries."""
        tensors = [self.lengths(), self._values]
        return tensors if self._weights is None else [*tensors, self._weights]

    def dist_splits(self, key_splits: Sequence[int]) -> list[list[int]]:
        """For consecutive groups of keys, the split sizes of each of `dist_tensors`."""
        parts = self.split(key_splits)
        lengths, values = [p.lengths().numel() for p in parts], [p.values().numel() for p in parts]
        return [lengths, values] if self._weights is None else [lengths, values, values]

    def __str__(self) -> str:
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        return (
            "KeyedJaggedTensor({\n" + ",\n".join(self._key_text(k, jt) for k, jt in self.to_dict().items()) + "\n})\n"
        )

    def _key_text(self, key: str, jt: JaggedTensor) -> str:
        text = jagged_text(jt, indent=" " * 8)
        return f'    "{key}": {text}' if self._weights is None else f'    "{key}": {{\n        {text}\n    }}'


def _as_lists(strides: Sequence[Sequence[int]] | torch.Tensor | None) -> list[list[int]] | None:
    if strides is None:
        return None
    return strides.tolist() if isinstance(strides, torch.Tensor) else [list(s) for s in strides]


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _cat_weights(weights: Mapping[str, torch.Tensor | None]) -> torch.Tensor | None:
    present = [w for w in weights.values() if w is not None]
    if not present:
        return None
    if len(present) != len(weights):
        without = [name for name, w in weights.items() if w is None]
        raise ValueError(f"weighted and unweighted features cannot be joined; without weights: {without}")
    return _cat(present)


def _join_inverse(kjt_list: Sequence[KeyedJaggedTensor]) -> tuple[list[str], list[torch.Tensor]] | None:
    parts = [part for kjt in kjt_list if (part := kjt.inverse_indices_or_none()) is not None]
    if len(parts) < len(kjt_list):
        return None
    return [key for keys, _ in parts for key in keys], [indices for _, indices in parts]


def _distinct(keys: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for key in keys:
        count = seen.get(key, 0)
        out.append(key if count == 0 else f"{key}@{count}")
        seen[key] = count + 1
    return out


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
    out._length_per_key = out._offset_per_key = out._key_index = out._jagged_by_key = None
    return out


pytree.register_pytree_node(
    KeyedJaggedTensor, _flatten, _unflatten, serialized_type_name="rayrec.sparse.KeyedJaggedTensor"
)
