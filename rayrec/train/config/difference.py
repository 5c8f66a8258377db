"""Compares configs field by field, as plain values, so that configs of older versions can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differing(configs: Sequence[Any]) -> dict[str, list[Any]]:
    """Field path → values of all configs, for fields that differ; a missing field counts as None."""
    flattened = [flat(config) for config in configs]
    names = dict.fromkeys(name for fields in flattened for name in fields)
    rows = {name: [fields.get(name) for fields in flattened] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def same(first: Any, second: Any) -> bool:
    """Whether two configs or sections are equal; null equals a missing field."""
    return bool(_without_nulls(first) == _without_nulls(second))


def flat(node: Any, mark: str = ".", prefix: str = "") -> dict[str, Any]:
    """`{"trainer.epochs": 2, …}`. Items of a list of named sections are keyed by name; other lists are one value."""
    if isinstance(node, Mapping) and node:
        items = {str(key): value for key, value in node.items()}
    elif isinstance(node, list) and node and all(isinstance(item, Mapping) and "name" in item for item in node):
        items = {str(item["name"]): item for item in node}
    else:
        return {prefix: node}
    return {
        key: value
        for name, item in items.items()
        for key, value in flat(item, mark, f"{prefix}{mark}{name}" if prefix else name).items()
    }


def value_at(config: Any, path: str) -> Any:
    """The value at path `a.b.c`, list items by name or index as in `with_field`; None if missing."""
    for key in path.split("."):
        config = _child(config, key)
    return config


def _child(node: Any, key: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(key)
    if not isinstance(node, list):
        return None
    named = {str(item["name"]): item for item in node if isinstance(item, Mapping) and "name" in item}
    return named.get(key, node[int(key)] if key.isdigit() and int(key) < len(node) else None)


def _without_nulls(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return [_without_nulls(value) for value in node] if isinstance(node, list) else node
