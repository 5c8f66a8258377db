"""The door to numba, which compiles the loops over ids and rows for which torch has no operator.

What is compiled for a machine is kept beside the sources, or in the user's cache folder if that cannot be written, so
that only the first process pays for it. Without numba callers use torch's operators, which give the same results and
take longer; a warning says so once.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
_logger = logging.getLogger(__name__)


@cache
def loops(module: str) -> Any:
    """The module of this name, whose functions `compiled` made; None where numba is missing or cannot compile."""
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        _logger.warning(
            "numba cannot be used (%s): ids are routed by torch's operators, which takes several times as long; "
            "`pip install numba` mends it",
            error,
        )
        return None
    return found


def compiled(types: Mapping[str, str]) -> Callable[[F], F]:
    """Compiles a function of numbers and arrays, which then runs without the interpreter's lock.

    Indices that may be negative cost time: use unsigned ones.

    Args:
        types: of its parameters, among others: "uint64", "float32[::1]", "int64[:,::1]".
    """
    import numba

    def decorate(function: F) -> F:
        signature = f"({', '.join(types[name] for name in inspect.signature(function).parameters)})"
        try:
            return cast(F, numba.njit([signature], nogil=True, cache=True)(function))
        except (RuntimeError, OSError):  # there is no folder that can be written, or no room in it
            return cast(F, numba.njit([signature], nogil=True)(function))

    return decorate
