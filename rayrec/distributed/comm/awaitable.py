"""Results that are computed or received once, at their first use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

T = TypeVar("T")
_UNSET = object()


class Awaitable(ABC, Generic[T]):
    """A result that is being computed or received. `wait` returns the same object every time."""

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
        """Functions that `wait` applies to the result, in order, before it returns it."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    @abstractmethod
    def _wait_impl(self) -> T:
        """Returns the result; called once."""


class LazyAwaitable(Awaitable[T]):
    """An awaitable that waits at the first use of its result: an attribute, an item, an operator or a torch function.

    A wait may be a collective, so code that only some ranks run must not cause one. `repr` and `str` never wait, nor
    does `hasattr` for names that `result_type` does not have.
    """

    result_type: ClassVar[type | None] = None
    """Class of the result, with all its public attributes. If None, every public attribute waits."""

    def __getattr__(self, name: str) -> Any:
        result_type = self.result_type if self._result is _UNSET and not self._callbacks else None
        if name.startswith("_") or (result_type is not None and not hasattr(result_type, name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
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
_OTHER_OPERATORS = "eq ne lt le gt ge neg pos abs invert len iter contains"


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyAwaitable[Any], *operands: Any) -> Any:
        ready = [operand.wait() if isinstance(operand, LazyAwaitable) else operand for operand in operands]
        return getattr(self.wait(), name)(*ready)

    return operate


for _name in f"{_ARITHMETIC} {_OTHER_OPERATORS}".split():  # Python looks up operators on the class
    setattr(LazyAwaitable, f"__{_name}__", _operator(f"__{_name}__"))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign]


class Deferred(LazyAwaitable[T]):
    """A lazy result computed by `finish`."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def _wait_impl(self) -> T:
        return self._finish()
