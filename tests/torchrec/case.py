"""A case: a call on both packages, for a line of the table of TorchRec's public API (`lines.txt`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torchrec.package import RAISES, Package, plain

HERE = Path(__file__).parent
SECTIONS = (
    "sparse",
    "modules",
    "models",
    "optim",
    "distributed",
    "replicas",
    "types",
    "planner",
    "pipelines",
    "metrics",
    "datasets",
    "drawn",
    "fx",
    "quant",
    "criteo",
    "computations",
    "further",
    "properties",
)


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Args:
        key: section number and first name.
        star: ported scripts need it most.
        listed: only listed, not asked for.
        names: what the line speaks of.
    """

    key: str
    star: bool
    listed: bool
    names: str


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        line: key of its line.
        name: of the case, unique in its section.
        run: gives plain data (see `plain`), or raises.
        meant: why rayrec answers otherwise, where that is meant.
    """

    line: str
    name: str
    run: Callable[[Package], Any]
    meant: str | None

    def result(self, package: str) -> Any:
        """Plain data; `RAISES` for an error."""
        try:
            value = self.run(Package(package))
        except Exception:
            return RAISES
        return plain(value, package)


class Cases(list[Case]):
    """A section's cases, collected by decorating functions."""

    def __call__(
        self, line: str, meant: str | None = None
    ) -> Callable[[Callable[[Package], Any]], Callable[[Package], Any]]:
        def keep(run: Callable[[Package], Any]) -> Callable[[Package], Any]:
            self.append(Case(line, run.__name__, run, meant))
            return run

        return keep


def lines() -> dict[str, Line]:
    out = {}
    for text in (HERE / "lines.txt").read_text(encoding="utf-8").splitlines():
        key, mark, names = text.split("\t")
        out[key] = Line(key, mark == "*", mark == "-", names)
    return out


def cases(section: str) -> list[Case]:
    found: list[Case] = importlib.import_module(f"tests.torchrec.cases_{section}").CASES
    return found


def recorded(section: str) -> dict[str, Any]:
    """What TorchRec answered, by case."""
    path = HERE / "recorded" / f"{section}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
