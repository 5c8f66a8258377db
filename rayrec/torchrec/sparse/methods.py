"""Methods of TorchRec's sparse types that rayrec itself does without. rayrec's classes have them once
`rayrec.torchrec.sparse` is imported: see `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.sparse.jagged_tensor import Jagged
from rayrec.sparse.keyed_jagged_tensor import InverseIndices, Strides
from rayrec.torchrec.sparse import messages

Device = torch.device | str | None
JaggedT = TypeVar("JaggedT", bound=Jagged)

# -- of JaggedTensor and KeyedJaggedTensor


def lengths_or_none(jagged: Jagged) -> torch.Tensor | None:
    """The lengths, where they were given or computed."""
    return jagged._lengths


def offsets_or_none(jagged: Jagged) -> torch.Tensor | None:
    """The offsets, where they were given or computed."""
    return jagged._offsets


def size_in_bytes(jagged: Jagged) -> int:
    """Bytes of all its tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in jagged._tensors())


def copy_(jagged: JaggedT, other: JaggedT, non_blocking: bool = False) -> JaggedT:
    """Fills this one's tensors from `other`'s, which have the same sizes; returns it.

    Raises:
        ValueError: only one of the two has weights.
    """
    for name in ("_values", "_weights", "_lengths", "_offsets"):
        mine, theirs = getattr(jagged, name), getattr(other, name)
        if theirs is not None and mine is not None:
            mine.copy_(theirs, non_blocking=non_blocking)
        elif name in ("_lengths", "_offsets"):  # either is computed from the other, which was copied
            setattr(jagged, name, theirs)
        elif (mine is None) != (theirs is None):
            raise ValueError(f"copy_: only one of the two {type(jagged).__name__}s has {name[1:]}")
    return jagged


# -- of JaggedTensor


def empty(
    is_weighted: bool = False,
    device: Device = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> JaggedTensor:
    """A tensor of no examples; values and weights of torch's default type unless said otherwise."""
    return JaggedTensor(
        values=torch.empty(0, dtype=values_dtype, device=device),
        weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
        lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
    )


def empty_like(jt: JaggedTensor, device: Device = None) -> JaggedTensor:
    """Without a device: no examples. With one: the same sizes there, not filled, for `copy_`."""
    if device is not None:
        return jt._map(lambda t: torch.empty_like(t, device=device))
    weights = jt.weights_or_none()
    return JaggedTensor(
        jt.values().new_empty(0), None if weights is None else weights.new_empty(0), jt.lengths().new_empty(0)
    )


def from_dense(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None) -> JaggedTensor:
    """From one tensor per example.

    Raises:
        ValueError: no examples, so that dtype and device are unknown.
    """
    if not values:
        raise ValueError("from_dense: there are no examples; use JaggedTensor.empty()")
    lengths = torch.tensor([v.shape[0] for v in values], dtype=torch.int32, device=values[0].device)
    return JaggedTensor(torch.cat(list(values)), torch.cat(list(weights)) if weights is not None else None, lengths)


def from_dense_lengths(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
) -> JaggedTensor:
    """From a padded `[B, L]` (or `[B, L, D]`) of which example b holds the first `lengths[b]` values."""
    mask = torch.arange(values.shape[1], device=values.device)[None, :] < lengths[:, None]
    return JaggedTensor(values[mask], weights[mask] if weights is not None else None, lengths)


def to_padded_dense_weights(
    jt: JaggedTensor, desired_length: int | None = None, padding_value: float = 0.0
) -> torch.Tensor | None:
    """As `to_padded_dense`, for the weights; None without weights."""
    weights = jt.weights_or_none()
    if weights is None:
        return None
    return JaggedTensor(weights, None, jt.lengths(), jt.offsets()).to_padded_dense(desired_length, padding_value)


# -- of KeyedJaggedTensor


def from_lengths_sync(
    keys: Sequence[str],
    values: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None = None,
    stride: int | None = None,
    stride_per_key_per_rank: Strides = None,
    inverse_indices: InverseIndices | None = None,
) -> KeyedJaggedTensor:
    """From lengths, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
    made = KeyedJaggedTensor(
        keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
    )
    return sync(made)


def from_offsets_sync(
    keys: Sequence[str],
    values: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
    stride: int | None = None,
    stride_per_key_per_rank: Strides = None,
    inverse_indices: InverseIndices | None = None,
) -> KeyedJaggedTensor:
    """From offsets, with lengths and offsets per key computed at once (a GPU synchronises here, not later)."""
    made = KeyedJaggedTensor(
        keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
    )
    return sync(made)


def keyed_empty(
    is_weighted: bool = False,
    device: Device = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    """No keys and no examples; values and weights of torch's default type unless given."""
    return KeyedJaggedTensor(
        keys=[],
        values=torch.empty(0, dtype=values_dtype, device=device),
        weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
        lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        stride=0,
    )


def keyed_empty_like(kjt: KeyedJaggedTensor, device: Device = None) -> KeyedJaggedTensor:
    """Without a device: no keys and no data, the stride kept. With one: the same keys and sizes there, not filled, for
    `copy_`."""
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


def keyed_copy_(kjt: KeyedJaggedTensor, other: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
    """As of JaggedTensor; a copy on a GPU remembers `other`, as that of `to` does."""
    copy_(kjt, other, non_blocking)
    kjt._length_per_key, kjt._offset_per_key = other._length_per_key, other._offset_per_key
    kjt._jagged_by_key = None
    kjt._set_host_copy(other)
    return kjt


def offset_per_key_or_none(kjt: KeyedJaggedTensor) -> list[int] | None:
    """`offset_per_key`, where it was given or computed."""
    return kjt._offset_per_key


def sync(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Computes lengths and offsets per key, which later calls need on the host; returns the tensor."""
    kjt.offset_per_key()
    return kjt


def unsync(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Forgets what `sync` computed; returns the tensor."""
    kjt._length_per_key = kjt._offset_per_key = None
    return kjt


def flatten_lengths(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same with lengths `[F * B]`, where they were given as `[F, B]`."""
    out = kjt.with_weights(kjt.weights_or_none())
    out._lengths = kjt.lengths().view(-1)
    return out


def clear_storage(kjt: KeyedJaggedTensor) -> None:
    """Frees the memory of every tensor; nothing can be read afterwards."""
    for tensor in kjt._tensors():
        tensor.untyped_storage().resize_(0)


# -- of KeyedTensor


def from_tensor_list(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], key_dim: int = 1, cat_dim: int = 1
) -> KeyedTensor:
    """One key a tensor, joined along `cat_dim`."""
    return KeyedTensor(keys, [t.shape[key_dim] for t in tensors], torch.cat(list(tensors), dim=cat_dim), key_dim)


def block_bytes(kt: KeyedTensor) -> int:
    """Bytes of its tensor."""
    return kt.values().numel() * kt.values().element_size()


def regroup_as_dict(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
) -> dict[str, torch.Tensor]:
    """As `regroup`, with a name for each group.

    Raises:
        ValueError: not one name a group.
    """
    if len(keys) != len(groups):
        raise ValueError(f"regroup_as_dict: {len(keys)} names for {len(groups)} groups")
    found = KeyedTensor.regroup(keyed_tensors, groups)
    return {key: found[place] for place, key in enumerate(keys)}


# The methods of each class by name; those that make a tensor are static.
METHODS: dict[type, dict[str, Callable[..., Any] | staticmethod[..., Any]]] = {
    Jagged: {
        "lengths_or_none": lengths_or_none,
        "offsets_or_none": offsets_or_none,
        "size_in_bytes": size_in_bytes,
    },
    JaggedTensor: {
        "copy_": copy_,
        "empty": staticmethod(empty),
        "empty_like": staticmethod(empty_like),
        "from_dense": staticmethod(from_dense),
        "from_dense_lengths": staticmethod(from_dense_lengths),
        "to_padded_dense_weights": to_padded_dense_weights,
    },
    KeyedJaggedTensor: {
        "clear_storage": clear_storage,
        "copy_": keyed_copy_,
        "dist_init": staticmethod(messages.dist_init),
        "dist_labels": messages.dist_labels,
        "dist_splits": messages.splits,
        "dist_tensors": messages.dist_tensors,
        "empty": staticmethod(keyed_empty),
        "empty_like": staticmethod(keyed_empty_like),
        "flatten_lengths": flatten_lengths,
        "from_lengths_sync": staticmethod(from_lengths_sync),
        "from_offsets_sync": staticmethod(from_offsets_sync),
        "offset_per_key_or_none": offset_per_key_or_none,
        "sync": sync,
        "unsync": unsync,
    },
    KeyedTensor: {
        "from_tensor_list": staticmethod(from_tensor_list),
        "regroup_as_dict": staticmethod(regroup_as_dict),
        "size_in_bytes": block_bytes,
    },
}
for kind, methods in METHODS.items():
    for name, method in methods.items():
        setattr(kind, name, method)
