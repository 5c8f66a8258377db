"""Lists of values in one flat tensor: the base class `Jagged`, and `JaggedTensor`, one sparse feature of B examples."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rayrec._runtime.streamable import Pipelineable
from rayrec.sparse import ops


def checked_integers(type_name: str, argument: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns lengths or offsets, converted to int64 if they describe no lists (`torch.tensor([])` is float32).

    Raises:
        ValueError: a float or bool tensor with elements.
    """
    if tensor is None or not (tensor.is_floating_point() or tensor.dtype is torch.bool):
        return tensor
    if tensor.numel():
        raise ValueError(f"{type_name}: {argument} are {tensor.dtype}; use an integer type, for example torch.int64")
    return tensor.new_zeros(int(argument == "offsets"), dtype=torch.int64)


class Traceable(ABCMeta):
    """Metaclass that makes constructor calls with an `fx.Proxy` argument a node of the traced graph."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, fx.Proxy):
                return value.tracer.create_proxy("call_function", cls, args, kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature, for `inspect.signature` and `help`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Jagged(Pipelineable, metaclass=Traceable):
    """Base class: lists of one or several features, concatenated in one flat tensor.

    Lengths are computed from offsets, and offsets from lengths, on first use.
    """

    _values: torch.Tensor
    _weights: torch.Tensor | None
    _lengths: torch.Tensor | None
    _offsets: torch.Tensor | None

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        if self._weights is None:
            raise ValueError(f"this {type(self).__name__} has no weights")
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def lengths(self) -> torch.Tensor:
        """Length of each list, as integers."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def offsets(self) -> torch.Tensor:
        """Start of each list, and the end of the last one, as integers."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = ops.complete_cumsum(self._lengths.view(-1))
        return self._offsets

    def lengths_or_none(self) -> torch.Tensor | None:
        """The lengths, if they were passed or computed."""
        return self._lengths

    def offsets_or_none(self) -> torch.Tensor | None:
        """The offsets, if they were passed or computed."""
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def copy_(self, other: Self, non_blocking: bool = False) -> Self:
        """Copies the tensors of `other`, which has the same sizes, into this one's; returns this one.

        Raises:
            ValueError: only one of the two has weights.
        """
        for name in ("_values", "_weights", "_lengths", "_offsets"):
            target, source = getattr(self, name), getattr(other, name)
            if source is not None and target is not None:
                target.copy_(source, non_blocking=non_blocking)
            elif name in ("_lengths", "_offsets"):  # each is computed from the other, which was copied
                setattr(self, name, source)
            elif (target is None) != (source is None):
                raise ValueError(f"copy_: only one of the two {type(self).__name__}s has {name[1:]}")
        return self

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (t for t in (self._values, self._weights, self._lengths, self._offsets) if t is not None)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for tensor in self._tensors():
            if tensor.is_cuda:
                tensor.record_stream(stream)


class JaggedTensor(Jagged):
    """B lists of values: `values [N]` (or `[N, D]`), split by `lengths [B]` or `offsets [B + 1]`.

    Args:
        values: all lists, concatenated.
        weights: one number per value, or None.
        lengths: number of values of each example.
        offsets: start of each example, and the end of the last one.

    Raises:
        ValueError: neither lengths nor offsets, ones that are not integers, or weights of another length than values.
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise ValueError("JaggedTensor needs lengths or offsets")
        # In torch.export the number of values of a feature is symbolic, so a comparison would become a guard.
        comparable = not torch.compiler.is_exporting()
        if weights is not None and comparable and weights.shape[0] != values.shape[0]:
            raise ValueError(f"JaggedTensor: {weights.shape[0]} weights for {values.shape[0]} values")
        lengths = checked_integers("JaggedTensor", "lengths", lengths)
        offsets = checked_integers("JaggedTensor", "offsets", offsets)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """A tensor without examples; values and weights have torch's default dtype unless you pass one."""
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | str | None = None) -> JaggedTensor:
        """Without a device, a tensor without examples; with one, uninitialized tensors of equal sizes for `copy_`."""
        if device is not None:
            return jt._map(lambda t: torch.empty_like(t, device=device))
        weights = jt.weights_or_none()
        return JaggedTensor(
            jt.values().new_empty(0), None if weights is None else weights.new_empty(0), jt.lengths().new_empty(0)
        )

    @staticmethod
    def from_dense(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None = None) -> JaggedTensor:
        """From one tensor per example.

        Raises:
            ValueError: no examples, so dtype and device are unknown.
        """
        if not values:
            raise ValueError("from_dense: needs at least one example; use JaggedTensor.empty()")
        lengths = torch.tensor([v.shape[0] for v in values], dtype=torch.int32, device=values[0].device)
        return JaggedTensor(torch.cat(list(values)), torch.cat(list(weights)) if weights is not None else None, lengths)

    @staticmethod
    def from_dense_lengths(
        values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None
    ) -> JaggedTensor:
        """From padded values `[B, L]` or `[B, L, D]`; example b uses the first `lengths[b]`."""
        mask = torch.arange(values.shape[1], device=values.device)[None, :] < lengths[:, None]
        return JaggedTensor(values[mask], weights[mask] if weights is not None else None, lengths)

    def to_dense(self) -> list[torch.Tensor]:
        """One view per example."""
        return [self._values[start:stop] for start, stop in pairwise(self.offsets().tolist())]

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        """One view of the weights per example; None without weights."""
        if self._weights is None:
            return None
        return [self._weights[start:stop] for start, stop in pairwise(self.offsets().tolist())]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """`[B, desired_length]` (default: the longest list); longer lists are truncated, shorter ones padded."""
        lengths, starts = self.lengths(), self.offsets()[:-1]
        width = desired_length if desired_length is not None else int(lengths.max()) if lengths.numel() else 0
        out = self._values.new_full((lengths.shape[0], width, *self._values.shape[1:]), padding_value)
        column = torch.arange(width, device=self.device())[None, :]
        mask = column < lengths[:, None]
        out[mask] = self._values[(starts[:, None] + column)[mask]]
        return out

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        """The weights, padded as by `to_padded_dense`; None without weights."""
        if self._weights is None:
            return None
        weights = JaggedTensor(self._weights, None, self.lengths(), self.offsets())
        return weights.to_padded_dense(desired_length, padding_value)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        return self._map(lambda t: t.pin_memory())

    def _map(self, fn: Any) -> JaggedTensor:
        weights, lengths, offsets = (
            None if t is None else fn(t) for t in (self._weights, self._lengths, self._offsets)
        )
        return JaggedTensor(fn(self._values), weights, lengths, offsets)

    def __str__(self) -> str:
        return "JaggedTensor({\n    " + lists_text(self.to_dense(), self.to_dense_weights(), indent="    ") + "\n})\n"


def lists_text(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None, indent: str) -> str:
    """The lists of one feature as text; with weights, the body of a dict of values and weights."""
    text = str([v.tolist() for v in values])
    if weights is None:
        return text
    return f'"values": {text},\n{indent}"weights": {[w.tolist() for w in weights]}'


def _flatten(jt: JaggedTensor) -> tuple[list[Any], None]:
    return [jt._values, jt._weights, jt._lengths, jt._offsets], None


def _unflatten(tensors: Any, _: Any) -> JaggedTensor:
    # Tracing may pass placeholders without a shape, so the constructor's checks are skipped.
    out = JaggedTensor.__new__(JaggedTensor)
    out._values, out._weights, out._lengths, out._offsets = tensors
    return out


pytree.register_pytree_node(JaggedTensor, _flatten, _unflatten, serialized_type_name="rayrec.sparse.JaggedTensor")
