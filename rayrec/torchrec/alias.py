"""Makes `torchrec` an alias of `rayrec.torchrec`: the module `torchrec.x` is the object `rayrec.torchrec.x`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ALIAS = "torchrec"
TARGET = "rayrec.torchrec"

logger = logging.getLogger(__name__)


class _Loader:
    """Loads a module of the alias by importing its target."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores `__spec__`, which importlib has replaced by that of the alias; the module is already executed."""
        module.__spec__ = self._spec


class _Finder:
    """Finds `torchrec` and its submodules. First in `sys.meta_path`, before an installed TorchRec."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != ALIAS and not name.startswith(f"{ALIAS}."):
            return None
        real = f"{TARGET}{name.removeprefix(ALIAS)}"
        target_spec = importlib.util.find_spec(real)
        if target_spec is None:
            return None
        spec = ModuleSpec(name, _Loader(real), origin=target_spec.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = target_spec.submodule_search_locations
        return spec


def install() -> None:
    """Makes `import torchrec` import `rayrec.torchrec` in this process, also in libraries.

    Call it before anything imports `torchrec`. If TorchRec is installed, a warning names the unused copy.

    Raises:
        ImportError: TorchRec is already imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(ALIAS)
    if loaded is not None:
        raise ImportError(
            f"torchrec is already imported from {getattr(loaded, '__file__', None)}; call rayrec.torchrec.install() "
            "before anything imports torchrec"
        )
    installed = _installed()
    sys.meta_path.insert(0, _Finder())
    if installed is not None and multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0":
        logger.warning("`import torchrec` means rayrec.torchrec; TorchRec in %s is not used", installed)


def _installed() -> str | None:
    """Returns the folder of an installed TorchRec; None without one."""
    for finder in sys.meta_path:
        spec = finder.find_spec(ALIAS, None)
        if spec is not None:
            return os.path.dirname(spec.origin) if spec.origin else ALIAS
    return None
