"""Names of TorchRec's that rayrec does not offer: asking for one says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class NotOffered(ImportError):
    """A name of TorchRec's that rayrec does not have; the message says what to use."""


def without(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: its `__name__`.
        instead: for each name, what to use.
    """

    def missing(name: str) -> NoReturn:
        if name in instead:
            raise NotOffered(f"{module} has no {name}: {instead[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
