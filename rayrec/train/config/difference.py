"""What differs between configs, field by field; on their plain values, so that those of older versions can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def differing(configs: Sequence[Any]) -> dict[str, list[Any]]:
    """The fields in which configs differ, with the value of each, None where it has none."""
    every = [flat(config) for config in configs]
    values = {name: [one.get(name) for one in every] for name in dict.fromkeys(name for one in every for name in one)}
    return {name: given for name, given in values.items() if any(value != given[0] for value in given)}


def same(one: Any, other: Any) -> bool:
    """Whether two configs, or parts of them, say the same; a field that is null is as good as none."""
    return bool(_without_nulls(one) == _without_nulls(other))


def flat(node: Any, mark: str = ".", prefix: str = "") -> dict[str, Any]:
    """`{"trainer.epochs": 2, …}`; a list of named sections is taken by name, any other as one value."""
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
    """What a config has at `a.b.c`; None where it has nothing there."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _without_nulls(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return [_without_nulls(value) for value in node] if isinstance(node, list) else node
