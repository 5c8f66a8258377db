"""Imports in less time: of many modules at once, and of names when they are used."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: what its `if TYPE_CHECKING:` imports is imported when it is first used.

    Args:
        package: its `__name__`.
    """

    @cache
    def homes() -> dict[str, str]:
        import ast  # most programs need it for nothing else

        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        lines = [line for block in tree.body if isinstance(block, ast.If) for line in block.body]
        return {one.name: str(line.module) for line in lines if isinstance(line, ast.ImportFrom) for one in line.names}

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return getattr(importlib.import_module(homes()[name]), name)

    return get


@contextmanager
def quick_imports() -> Iterator[None]:
    """The body imports what is large: torch, Ray, our own modules.

    Modules are never garbage, but the collector scans them again and again while they are imported: a quarter of the
    time (measured: 3.6 s of CPU time, 2.7 s without). So the collector is off in the body, and the objects that exist
    at its end are frozen.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
