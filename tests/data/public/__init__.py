"""Inputs as people publish and report them: what they ask of the data path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rayrec.data.tools.init.make_config import Machine, start


def started(
    source: Path | Sequence[Path],
    folder: Path,
    label: str | list[str] | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """The config that `rayrec init` makes of files on a machine of two cores, with `folder` for what it writes."""
    sources = [source] if isinstance(source, Path) else source
    return start([str(path) for path in sources], "a", folder, Machine(cores=2), label, tell).config
