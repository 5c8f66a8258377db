"""Results that are waited for: computed or received once, when first needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")
_UNSET = object()


class Awaitable(ABC, Generic[T]):
    """Something under way; `wait` returns its result, the same object every time."""

    _result: Any = _UNSET
    _callbacks: list[Callable[[T], T]] | None = None

    def wait(self) -> T:
        if self._result is _UNSET:
            result = self._wait_impl()
            for callback in self._callbacks or ():
                result = callback(result)
            self._result = result
        return self._result

    @property
    def callbacks(self) -> list[Callable[[T], T]]:
        """What the result goes through, one after the other, before `wait` returns it."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    @abstractmethod
    def _wait_impl(self) -> T:
        """Finishes the work; called once."""


class LazyAwaitable(Awaitable[T]):
    """An awaitable that waits by itself where its result is used: an attribute, an item, in a torch function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def ready(value: Any) -> Any:
            if isinstance(value, LazyAwaitable):
                return value.wait()
            if isinstance(value, list | tuple):
                return type(value)(ready(item) for item in value)
            return value

        return func(*ready(tuple(args)), **{name: ready(value) for name, value in (kwargs or {}).items()})


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor radd rsub rmul rtruediv rpow rmatmul"
_OTHERS = "eq ne lt le gt ge neg pos abs invert len iter contains"


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyAwaitable[Any], *others: Any) -> Any:
        ready = [other.wait() if isinstance(other, LazyAwaitable) else other for other in others]
        return getattr(self.wait(), name)(*ready)

    return operate


for _name in f"{_ARITHMETIC} {_OTHERS}".split():  # Python looks them up on the class
    setattr(LazyAwaitable, f"__{_name}__", _operator(f"__{_name}__"))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign]


class NoWait(Awaitable[T]):
    """A result that is there already, and has to be asked for."""

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


class LazyNoWait(LazyAwaitable[T]):
    """A result that is there already."""

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


class DeviceToHostTensorAwaitable(LazyAwaitable[torch.Tensor]):
    """A tensor on its way from a device to the host.

    Args:
        tensor_on_device: of any device; its copy begins at once.
    """

    def __init__(self, tensor_on_device: torch.Tensor) -> None:
        self._tensor = tensor_on_device.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if tensor_on_device.is_cuda else None

    def _wait_impl(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class LazyGetItemMixin(Generic[K, T]):
    """Put before `LazyAwaitable` among the bases: an item of the result is itself waited for when it is used."""

    def __getitem__(self, key: K) -> LazyAwaitable[T]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]


class GetItemLazyAwaitable(LazyAwaitable[T]):
    """An item of a result that is under way."""

    def __init__(self, parent: Awaitable[Any], key: Any) -> None:
        self._parent, self._key = parent, key

    def _wait_impl(self) -> T:
        return self._parent.wait()[self._key]


class Deferred(LazyAwaitable[T]):
    """A result that `finish` computes."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def _wait_impl(self) -> T:
        return self._finish()
