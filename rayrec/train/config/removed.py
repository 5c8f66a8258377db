"""Removed config options and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed option.

    Args:
        default: its former default, which earlier versions wrote to run folders.
        instead: what to use now.
    """

    default: Any
    instead: str


REMOVED = {
    "trainer.accumulate_steps": Removed(1, "use trainer.micro_batches, which saves memory at the same result"),
    "trainer.timeline_steps": Removed(3, "use trainer.profile, which records a trace of the steps that it names"),
    "trainer.guards.dead_gradients": Removed(True, "use trainer.guards.max_ne or trainer.guards.min_auc"),
}


def without_removed(raw: Any, *, of_run: bool = False) -> Any:
    """Drop removed options that have their default value.

    Args:
        raw: plain values of the complete config.
        of_run: the config is that of an existing run: drop removed options with any value.

    Raises:
        PydanticCustomError: a removed option has another value; names the replacement.
    """
    for path, option in REMOVED.items():
        section, _, name = path.rpartition(".")
        values = _section(raw, section)
        if values is None or name not in values:
            continue
        if values[name] != option.default and not of_run:
            text = f"this option was removed; {option.instead}"
            raise PydanticCustomError("config", "{text}", {"path": path, "text": text})
        remaining = {key: value for key, value in values.items() if key != name}
        raw = _replaced(raw, section.split("."), remaining)
    return raw


def _section(raw: Any, path: str) -> Mapping[str, Any] | None:
    for name in path.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw if isinstance(raw, Mapping) else None


def _replaced(raw: Mapping[str, Any], path: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    first, *rest = path
    return {**raw, first: _replaced(raw[first], rest, values) if rest else values}
