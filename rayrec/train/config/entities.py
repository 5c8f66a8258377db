"""Features of `data.entities`: `from: item.category, by: item_id` becomes a derived column of kind `entity`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec._runtime.strict import refusal
from rayrec.storage.errors import suggestion

_OF_TABLE = ("path", "key", "valid_from", "at", "unit")


def with_entities(raw: Any) -> Any:
    """The config with a derived column for each feature that has `from`.

    Raises:
        PydanticCustomError: `from` or `by` is missing, or names a table or column that `data.entities` lacks.
    """
    schema = raw.get("schema") if isinstance(raw, Mapping) else None
    if not isinstance(schema, Mapping) or not any({"from", "by"} & {*feature} for _, _, feature in _features(schema)):
        return raw
    data = raw.get("data")
    tables = (data.get("entities") if isinstance(data, Mapping) else None) or {}
    out, derived = dict(schema), list(schema.get("derived") or [])
    columns = {
        feature.get("name"): feature.get("column") for _, _, feature in _features(schema) if "from" not in feature
    }
    for section, number, feature in _features(schema):
        if "from" not in feature and "by" not in feature:
            continue
        spec = _derived(f"schema.{section}.{feature.get('name', number)}", feature, tables, columns)
        if spec not in derived:
            derived.append(spec)
        plain = {name: value for name, value in feature.items() if name not in ("from", "by")}
        out[section] = [*out[section]]
        out[section][number] = plain | {"column": spec["name"]}
    return {**raw, "schema": out | {"derived": derived}}


def _features(schema: Mapping[str, Any]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Section, position and fields of each feature."""
    return [
        (section, number, feature)
        for section in ("dense", "sparse")
        for number, feature in enumerate(schema.get(section) or [])
        if isinstance(feature, Mapping)
    ]


def _derived(path: str, feature: Mapping[str, Any], tables: Mapping[str, Any], columns: Mapping[Any, Any]) -> Any:
    """The derived column that a feature reads."""
    source, by = feature.get("from"), feature.get("by")
    if not isinstance(source, str) or not isinstance(by, str):
        text = "give both `from` (table.column of data.entities) and `by` (the column of the rows with the keys)"
        raise refusal(path, text)
    if feature.get("column") is not None:
        raise refusal(path, "give `column`, for a column of the rows, or `from`, for a column of a table, not both")
    name, _, column = source.partition(".")
    table = tables.get(name)
    if not isinstance(table, Mapping) or not column:
        known = ", ".join(tables) or "none"
        text = f"from: {source} must be TABLE.COLUMN of a table in data.entities ({known}){suggestion(name, tables)}"
        raise refusal(path, text)
    listed = table.get("columns")
    if isinstance(listed, list) and column not in listed:
        raise refusal(path, f"from: {source}: data.entities.{name}.columns has no {column!r}; add it")
    keys = columns.get(by) or by
    null = feature.get("default") is not None or feature.get("on_null", "error") != "error"
    spec = {"name": f"{source} by {keys}", "kind": "entity", "column": keys, "take": column}
    spec |= {field: table[field] for field in _OF_TABLE if table.get(field) is not None}
    return spec | ({"name": f"{spec['name']} or null", "on_missing": "null"} if null else {})
