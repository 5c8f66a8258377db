"""Whether ids still mean the rows that they meant when a checkpoint was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.checkpoint.errors import CheckpointError

MAPPING = Mapping[str, Mapping[str, Any]]


def check_mapping(path: str, saved: MAPPING | None, here: MAPPING | None) -> None:
    """Compare what maps ids to rows, by feature; nothing is compared where either side does not say.

    Raises:
        CheckpointError: names the first feature that differs, and in what.
    """
    if saved is None or here is None:
        return
    for feature in sorted({*saved, *here}):
        before, now = saved.get(feature), here.get(feature)
        if before is None or now is None:
            where = "the checkpoint" if before is None else "the config"
            raise CheckpointError(f"{path}: {where} has no feature {feature!r}; {_FIX}")
        for name in differing(before, now):
            raise CheckpointError(
                f"{path}: feature {feature!r}: its ids would mean other rows: {name.replace('_', ' ')} is "
                f"{_short(before.get(name))} in the checkpoint and {_short(now.get(name))} here; {_FIX}"
            )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two mappings of a feature differ. Earlier checkpoints do not have the type of ids."""
    known = {*before, *now} - ({"id_type"} if None in (before.get("id_type"), now.get("id_type")) else set())
    return sorted(name for name in known if before.get(name) != now.get(name))


_FIX = "go back to the schema and vocabulary files that it was trained with, or start a new run under another name"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
