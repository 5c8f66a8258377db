"""Features of `data.entities` and `data.events`: each becomes a feature of a derived column.

A feature with `from: item.category, by: item_id` reads a derived column of kind `entity`. A sequence with `from: plays`
and the features with `from: SEQUENCE.COLUMN` read derived columns of kind `events`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec._runtime.strict import refusal
from rayrec.storage.errors import suggestion

Fields = Mapping[str, Any]
_OF_ENTITIES, _OF_EVENTS = ("path", "key", "valid_from", "at", "unit"), ("path", "key", "time", "unit")
_OF_SEQUENCE = ("from", "by", "before", "last", "where")


def with_joins(raw: Any) -> Any:
    """The config with a derived column for each feature and list that has `from`.

    Raises:
        PydanticCustomError: `from`, `by`, `before` or `last` is missing, or names a table, sequence or column that is
            not there.
    """
    schema = raw.get("schema") if isinstance(raw, Mapping) else None
    if not isinstance(schema, Mapping):
        return raw
    joined = [one for _, _, one in _fields(schema) if {"from", "by"} & {*one}]
    if not joined:
        return raw
    return {**raw, "schema": _Joins(schema, raw.get("data")).schema()}


class _Joins:
    """The schema of a config while its features become features of derived columns."""

    def __init__(self, schema: Fields, data: Any) -> None:
        self._schema = {**schema, "derived": [*(schema.get("derived") or [])]}
        data = data if isinstance(data, Mapping) else {}
        self._entities, self._events = (data.get(kind) or {} for kind in ("entities", "events"))
        self._columns = {one.get("name"): one.get("column") for _, _, one in _fields(schema) if "from" not in one}
        self._sequences: dict[str, Fields] = {
            str(one.get("name")): one for section, _, one in _fields(schema) if section == "sequences" and "from" in one
        }
        self._ids: dict[str, list[str]] = {name: [] for name in self._sequences}

    def schema(self) -> dict[str, Any]:
        for section, number, fields in _fields(self._schema):
            path = f"schema.{section}.{fields.get('name', number)}"
            if section != "sequences" and {"from", "by"} & {*fields}:
                self._schema[section] = _replaced(self._schema[section], number, self._feature(path, section, fields))
        for section, number, fields in _fields(self._schema):
            if section == "sequences" and "from" in fields:
                self._schema[section] = _replaced(self._schema[section], number, self._sequence(fields))
        return self._schema

    def _feature(self, path: str, section: str, fields: Fields) -> dict[str, Any]:
        source = fields.get("from")
        if not isinstance(source, str):
            raise refusal(path, "give `from`: TABLE.COLUMN of data.entities, or SEQUENCE.COLUMN of a sequence")
        if fields.get("column") is not None:
            raise refusal(path, "give `column`, for a column of the rows, or `from`, for one of a table, not both")
        name, _, column = source.partition(".")
        plain = {key: value for key, value in fields.items() if key not in ("from", "by")}
        if name in self._sequences and column:
            if section == "dense":
                raise refusal(path, f"from: {source} is a list of numbers; give it as one of the sequence's `values`")
            self._ids[name].append(str(fields.get("name")))
            return {"kind": "id_list"} | plain | {"column": self._of_events(self._sequences[name], column)}
        table = self._entities.get(name)
        if not isinstance(table, Mapping) or not column:
            known = ", ".join([*self._entities, *self._sequences]) or "none"
            near = suggestion(name, [*self._entities, *self._sequences])
            text = f"from: {source} must be a column of a table in data.entities or of a sequence of events"
            raise refusal(path, f"{text}, as TABLE.COLUMN ({known}){near}")
        return plain | {"column": self._of_entities(path, fields, table)}

    def _of_entities(self, path: str, fields: Fields, table: Fields) -> str:
        """Adds a derived column of kind `entity`; returns its name."""
        source, by = fields["from"], fields.get("by")
        if not isinstance(by, str):
            raise refusal(path, f"from: {source} needs `by`: the column of the rows with the keys")
        _check_column(path, f"data.entities.{source.partition('.')[0]}", table, column := source.partition(".")[2])
        keys = self._columns.get(by) or by
        null = fields.get("default") is not None or fields.get("on_null", "error") != "error"
        spec = {"name": f"{source} by {keys}", "kind": "entity", "column": keys, "take": column}
        spec |= {name: table[name] for name in _OF_ENTITIES if table.get(name) is not None}
        return self._add(spec | ({"name": f"{spec['name']} or null", "on_missing": "null"} if null else {}))

    def _of_events(self, sequence: Fields, column: str) -> str:
        """Adds a derived column of kind `events`; returns its name."""
        name = sequence.get("name")
        path, table = f"schema.sequences.{name}", self._events.get(sequence["from"])
        if not isinstance(table, Mapping):
            known = ", ".join(self._events) or "none"
            near = suggestion(str(sequence["from"]), self._events)
            raise refusal(path, f"from: {sequence['from']} must be a table in data.events ({known}){near}")
        if "before" not in sequence or "last" not in sequence:
            text = "a sequence of events needs `before` (the column of the rows with their time) and `last`"
            raise refusal(path, text)
        _check_column(path, f"data.events.{sequence['from']}", table, column)
        by = sequence.get("by") or table.get("key")
        spec = {
            "name": f"{name}.{column}",
            "kind": "events",
            "column": self._columns.get(by) or by,
            "take": column,
            "at": sequence["before"],
            "last": sequence["last"],
        }
        spec |= {field: table[field] for field in _OF_EVENTS if table.get(field) is not None}
        where = {key: value if isinstance(value, list) else [value] for key, value in _items(sequence.get("where"))}
        return self._add(spec | ({"where": where} if where else {}))

    def _sequence(self, fields: Fields) -> dict[str, Any]:
        """The sequence with its features, and with the derived columns of its values."""
        values = [
            {key: value for key, value in one.items() if key != "from"}
            | {"column": self._of_events(fields, one.get("from") or one.get("name"))}
            for one in fields.get("values") or []
        ]
        plain = {key: value for key, value in fields.items() if key not in _OF_SEQUENCE}
        plain |= {
            "ids": [*dict.fromkeys([*(fields.get("ids") or []), *self._ids[str(fields.get("name"))]])],
            "length": fields["last"],
        }
        return plain | ({"values": values} if values else {})

    def _add(self, spec: dict[str, Any]) -> str:
        """Adds a derived column, before those that read it."""
        derived, name = self._schema["derived"], str(spec["name"])
        if spec not in derived:
            readers = [number for number, one in enumerate(derived) if isinstance(one, Mapping) and name in _read(one)]
            derived.insert(readers[0] if readers else len(derived), spec)
        return name


def _fields(schema: Fields) -> list[tuple[str, int, Fields]]:
    """Section, position and fields of each feature and sequence."""
    return [
        (section, number, one)
        for section in ("dense", "sparse", "sequences")
        for number, one in enumerate(schema.get(section) or [])
        if isinstance(one, Mapping)
    ]


def _read(derived: Fields) -> list[Any]:
    """The columns that a derived column reads."""
    columns = derived.get("columns")
    return [derived.get("column"), derived.get("at"), *(columns if isinstance(columns, list) else [])]


def _items(where: Any) -> Any:
    return where.items() if isinstance(where, Mapping) else ()


def _replaced(items: list[Any], number: int, item: Any) -> list[Any]:
    return [*items[:number], item, *items[number + 1 :]]


def _check_column(path: str, field: str, table: Fields, column: str) -> None:
    listed = table.get("columns")
    if isinstance(listed, list) and column not in listed:
        raise refusal(path, f"{field}.columns has no {column!r}; add it")
