"""Defines which config fields may change between two launches of a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rayrec.train.config.difference import differing, same, value_at


class Rule(NamedTuple):
    """Whether a field may change between launches. Also applies to fields below it without their own rule."""

    field: str
    may_change: bool
    meaning: str


# Used both to compare relaunches and to print the config reference.
RULES = (
    Rule("name", False, "Another name is another run."),
    Rule(
        "schema",
        False,
        "If `id_type`, `column_types`, or a mapping's `text_law`, `spread_over`, `evict` or `admit` is not set, the "
        "run keeps what it began with.",
    ),
    Rule("schema.sparse[].mapping.path", True, "The ids are compared instead; new ones may come at the end."),
    Rule("tables", False, "The checkpoint holds these tables."),
    Rule("tables[].init", True, "Read only while the run has no checkpoint."),
    Rule("model", False, "The checkpoint holds the weights of this model."),
    Rule("optimizers", True, "Learning rates, schedules, clipping and freezing hold from the next step."),
    Rule("optimizers.dense.kind", False, "The checkpoint holds this optimizer's state."),
    Rule("optimizers.sparse.kind", False, "The checkpoint holds this optimizer's state."),
    Rule("optimizers.tables[].kind", False, "As above. The default of a table is `optimizers.sparse.kind`."),
    Rule(
        "data", True, "The run keeps the version of a Delta or Iceberg table from its first launch, unless you set one."
    ),
    Rule("data.read.text", False, "Other options make other rows of the same files."),
    Rule("data.negative_rate", False, "Evaluations correct predictions for it."),
    Rule("trainer", True, "Among them the number of workers, epochs, intervals and limits."),
    Rule("trainer.batch_size", True, "Learning-rate schedules count steps, which then have other rows."),
    Rule("trainer.seed", False, "It decides the order of rows."),
    Rule("sharding", True, "A checkpoint loads under every plan."),
    Rule("storage", True, "Another `storage.path` is another run."),
    Rule("init_from", True, "Read only while the run has no checkpoint."),
)
# `[]` means every item. The fixed field is the list itself: `_comparable` removes its items' other fields.
FIXED_FIELDS = tuple(rule.field.partition("[]")[0] for rule in RULES if not rule.may_change and rule.field != "name")
MAX_CHANGES = 5  # of one field, in an error


def rules_table() -> list[str]:
    """The rules as Markdown."""
    lines = ["| field | may change | note |", "|---|---|---|"]
    return [*lines, *(f"| `{rule.field}` | {'yes' if rule.may_change else 'no'} | {rule.meaning} |" for rule in RULES)]


def refused_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Changes of fields that may not change, as text with both values. Lists up to `MAX_CHANGES` per field.

    Args:
        before, now: plain values of two configs.
    """
    named = {name for raw in (before, now) for name in value_at(raw, "optimizers.tables") or {}}
    old, new = _comparable(before, named), _comparable(now, named)
    return [
        change
        for field in FIXED_FIELDS
        if not same(value_at(old, field), value_at(new, field))
        for change in _changes(field, value_at(old, field), value_at(new, field))
    ]


def _comparable(raw: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """A copy to compare by fixed fields.

    Vocabulary paths are removed, because loading a checkpoint compares checksums of the ids instead. `tables[].init` is
    removed. Of `optimizers.tables`, only the kind is kept, for each table in `named`.
    """
    config: dict[str, Any] = copy.deepcopy(dict(raw))
    for feature in (config.get("schema") or {}).get("sparse") or []:
        if isinstance(mapping := feature.get("mapping"), dict):
            mapping.pop("path", None)
    for table in config.get("tables") or []:
        table.pop("init", None)
    if isinstance(optimizers := config.get("optimizers"), dict):
        default = value_at(optimizers, "sparse.kind")
        kinds = {name: value_at(optimizers, f"tables.{name}.kind") for name in named}
        optimizers["tables"] = {name: {"kind": kind or default} for name, kind in kinds.items()}
    return config


def _changes(field: str, before: Any, now: Any) -> list[str]:
    """The first differing fields at or below a field with their values, and a count of the rest."""
    lines = [
        f"{'.'.join(filter(None, (field, below)))}: {_short(old)} → {_short(new)}"
        for below, (old, new) in differing([before, now]).items()
        if old is not None or new is not None
    ]
    rest = len(lines) - MAX_CHANGES
    return [*lines[:MAX_CHANGES], *([f"{field}: {rest} more fields"] if rest > 0 else [])] or [
        f"{field}: the same items in another order"
    ]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
