"""The lists of several sparse features in one flat tensor, and what can be read of them. See `keyed_jagged_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rayrec.sparse.jagged import Jagged, JaggedTensor, counts_of

InverseIndices = tuple[list[str], torch.Tensor]
Strides = Sequence[Sequence[int]] | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The source on the CPU of a tensor on a device, with the version of every tensor of both when it was copied."""

    source: KeyedJagged
    versions: tuple[tuple[torch.Tensor, int], ...]

    @classmethod
    def of(cls, source: KeyedJagged, copy: KeyedJagged) -> HostCopy:
        tensors = (*source._tensors(), *copy._tensors())
        return cls(source, tuple((t, t._version) for t in tensors if not t.is_inference()))  # these have no version

    def changed(self) -> bool:
        """Whether a tensor was modified in place since, as far as torch knows."""
        return any(tensor._version != version for tensor, version in self.versions)


class KeyedJagged(Jagged):
    """F sparse features of B examples, key after key: what a KeyedJaggedTensor stores, and how it is read.

    Arguments and errors are those of `KeyedJaggedTensor`.
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
        self._lengths = counts_of("KeyedJaggedTensor", "lengths", lengths)
        self._offsets = counts_of("KeyedJaggedTensor", "offsets", offsets)
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

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        """B, the number of examples."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Each key's batch size; B for all unless it varies by key."""
        return self._stride_per_key if self._stride_per_key is not None else [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Each key's batch sizes by rank; empty unless they vary by key."""
        return self._strides or []

    def variable_stride_per_key(self) -> bool:
        """Whether the batch size varies by key."""
        return self._strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Keys, and `[F, B]`: the list of each key that stands for each example.

        Raises:
            ValueError: there are none.
        """
        if self._inverse_indices is None:
            sizes = dict(zip(self._keys, self.stride_per_key(), strict=True))
            raise ValueError(
                f"this KeyedJaggedTensor has no inverse indices; where batch sizes differ by key ({sizes}), give "
                "inverse_indices, which say which list stands for each example"
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """How many values each key has. On a GPU the first call may synchronise."""
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

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        if self._key_index is None:
            self._key_index = {key: place for place, key in enumerate(self._keys)}
        return self._key_index

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's lengths start, and the end: F + 1 numbers."""
        return [0, *accumulate(self.stride_per_key())]

    def host_copy(self) -> KeyedJagged | None:
        """The tensor on the CPU that this one was copied from; None without one, or if either has changed since."""
        return None if self._host is None or self._host.changed() else self._host.source

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Each key's lists, as views; without `compute_offsets` their offsets are computed on first use."""
        if self._jagged_by_key is None:
            if compute_offsets:
                self.offsets()
            self._jagged_by_key = {key: self.feature(place) for place, key in enumerate(self._keys)}
        return self._jagged_by_key

    def feature(self, place: int) -> JaggedTensor:
        """The lists of the key at position `place`, as views."""
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


def _as_lists(strides: Strides) -> list[list[int]] | None:
    if strides is None:
        return None
    return strides.tolist() if isinstance(strides, torch.Tensor) else [list(s) for s in strides]


def check_input(kjt: KeyedJagged, wanted: Sequence[str], weighted: bool = False) -> None:
    """Raises ValueError where the input lacks a feature that a table reads, or weights of a weighted collection."""
    missing = [name for name in wanted if name not in kjt.index_per_key()]
    if missing:
        raise ValueError(f"the input has no feature {missing[0]!r}, which a table reads; it has {kjt.keys()}")
    if weighted and kjt.weights_or_none() is None:
        raise ValueError("the collection is weighted, but the input has no weights")
