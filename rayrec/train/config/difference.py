"""Compares configs field by field, as plain values, so that configs of older versions can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differing(configs: Sequence[Any]) -> dict[str, list[Any]]:
    """Field path → values of all configs, for fields that differ; a missing field counts as None."""
    every = [flat(config) for config in configs]
    values = {name: [one.get(name) for one in every] for name in dict.fromkeys(name for one in every for name in one)}
    return {name: given for name, given in values.items() if any(value != given[0] for value in given)}


def same(one: Any, other: Any) -> bool:
    """Whether two configs, or parts of them, are equal; null equals a missing field."""
    return bool(_without_nulls(one) == _without_nulls(other))


def flat(node: Any, mark: str = ".", prefix: str = "") -> dict[str, Any]:
    """`{"trainer.epochs": 2, …}`. Items of a list of named sections are keyed by name; other lists are one value."""
    if isinstance(node, Mapping) and node:
        parts = {str(key): value for key, value in node.items()}
    elif isinstance(node, list) and node and all(isinstance(part, Mapping) and "name" in part for part in node):
        parts = {str(part["name"]): part for part in node}
    else:
        return {prefix: node}
    return {
        key: value
        for name, part in parts.items()
        for key, value in flat(part, mark, f"{prefix}{mark}{name}" if prefix else name).items()
    }


def value_at(config: Any, path: str) -> Any:
    """The value at path `a.b.c`; None if there is none."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _without_nulls(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return [_without_nulls(value) for value in node] if isinstance(node, list) else node
