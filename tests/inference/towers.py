"""Query towers over histories of table rows, with their first weights."""

from __future__ import annotations

from typing import Any

from rayrec.inference.tower import Tower, TowerSpec


def tower_of(family: str, settings: dict[str, Any], items: int, dim: int, raw: dict[str, Any] | None = None) -> Tower:
    """`raw`: schema and tables of a config, whose mapping the tower has."""
    tables = {"item": (items, dim, ["history"])}
    return Tower.of(TowerSpec(name=family, settings={"history": "history", **settings}, tables=tables), raw=raw)
