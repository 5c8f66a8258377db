"""Raises an error with the alternative when you import a module or name of TorchRec that rayrec lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rayrec.torchrec.left_out import MODULES
from rayrec.torchrec.left_out_names import NAMES

_ROOT = "rayrec.torchrec."
_INSTEAD = MODULES | {f"{module}.{name}": text for module, names, text in NAMES for name in names.split()}


class NotOffered(ModuleNotFoundError):
    """A module or name of TorchRec that rayrec lacks; the message names the alternative."""


def names_left_out(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module, which raises NotOffered for names and submodules in `left_out`.

    Args:
        module: `__name__` of the module.
    """

    def missing(name: str) -> NoReturn:
        instead = _INSTEAD.get(f"{module}.{name}".removeprefix(_ROOT))
        if instead is not None:
            raise NotOffered(f"{module} has no {name}: {instead}", name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return missing


def instead_of(module: str) -> str | None:
    """Returns the alternative to a module, or to a package that contains it; None if neither is left out."""
    path = module.removeprefix(_ROOT)
    while path:
        if path in MODULES:
            return MODULES[path]
        path = path.rpartition(".")[0]
    return None


class _Finder:
    """Last in `sys.meta_path`; raises NotOffered for modules of TorchRec that no other finder finds."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.startswith(_ROOT) and (instead := instead_of(name)) is not None:
            raise NotOffered(f"there is no {name}: {instead}", name=name)


def install() -> None:
    """Makes imports of missing modules raise NotOffered."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
