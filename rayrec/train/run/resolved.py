"""Resolves open config fields: table versions, id types, column types, and the laws by which ids get rows.

The run folder stores two files: `given.yaml`, the config of the last launch with absolute paths and defaults, and
`config.yaml`, the same with resolved values. A relaunch reuses resolved values for fields that it leaves open, and the
data is checked against them. To make another field resolvable, add it to `_resolvable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayrec.data.mapping.rules import FIRST_TEXT_LAW, Admit
from rayrec.data.source.dataset import DataSet
from rayrec.train.config.dynamic_ids import shared_rules
from rayrec.train.config.train_config import TrainConfig

# Open fields of mappings by kind, and their values in runs of releases that did not record them.
_ROW_LAWS: dict[str, dict[str, Any]] = {
    "hash": {"text_law": FIRST_TEXT_LAW},
    "vocabulary": {"spread_over": 0},
    "dynamic": {"evict": "lfu", "admit": Admit().model_dump()},
}


class ResolvedValues:
    """Resolved values of fields that the config leaves open.

    Args:
        values: field path → value. Data sets are identified by their path and table, so that a different data set at
            the same position of the config does not get the version.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    @classmethod
    def of(cls, resolved: Mapping[str, Any] | None) -> ResolvedValues:
        """The resolved values in a config (plain values); empty for None.

        A run of a release that had one hash of strings, and one order of rows, recorded none: it keeps them.
        """
        first = {law: value for laws in _ROW_LAWS.values() for law, value in laws.items()}
        fields = {
            path: first.get(key) if section.get(key) is None else section[key]
            for path, section, key in ([] if resolved is None else _resolvable(resolved))
        }
        return cls({path: value for path, value in fields.items() if value is not None})

    def fill(self, config: TrainConfig) -> TrainConfig:
        """The config with its open fields set to these values.

        Features that share rows have equal rules, so what the config sets for one of them goes before these values.
        """
        schema = shared_rules(config.tables, config.data_schema)
        raw = config.model_copy(update={"data_schema": schema}).to_dict()
        for path, section, key in _resolvable(raw):
            value, configured = self._values.get(path), section.get(key)
            if isinstance(configured, Mapping):
                section[key] = {**(value or {}), **configured}
            elif configured is None:
                section[key] = value
        return TrainConfig(**raw)


def with_versions(config: TrainConfig) -> TrainConfig:
    """The config with Delta and Iceberg tables without a version pinned to their newest one.

    Raises:
        DataError: a table cannot be opened.
    """
    data = config.data
    pinned: dict[str, Any] = {field: _pinned(getattr(data, field)) for field in ("train", "eval", "test")}
    pinned["eval_sets"] = {name: _pinned(data_set) for name, data_set in data.eval_sets.items()}
    return config.model_copy(update={"data": data.model_copy(update=pinned)})


def _pinned(data: Any) -> Any:
    if isinstance(data, list):
        return [_pinned(data_set) for data_set in data]
    return data.pinned() if isinstance(data, DataSet) else data


def _resolvable(raw: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(identifying path, section, key) of every resolvable field of a config."""
    schema, data = raw.get("schema") or {}, raw.get("data") or {}
    for feature in schema.get("sparse") or []:
        yield f"schema.sparse.{feature['name']}.id_type", feature, "id_type"
        if (kind := (mapping := feature.get("mapping") or {}).get("kind")) in _ROW_LAWS:
            for law in _ROW_LAWS[kind]:
                yield f"schema.sparse.{feature['name']}.mapping.{law}", mapping, law
    if schema:
        yield "schema.column_types", schema, "column_types"
    sets = {field: data.get(field) for field in ("train", "eval", "test")}
    sets |= {f"eval_sets.{name}": data_set for name, data_set in (data.get("eval_sets") or {}).items()}
    for field, value in sets.items():
        seen: dict[str, int] = {}
        for data_set in value if isinstance(value, list) else [value]:
            if isinstance(data_set, dict) and data_set.get("table") is not None:
                table = f"{data_set['table']}:{data_set['path']}"
                seen[table] = seen.get(table, 0) + 1  # a mix may list a table twice, with different filters
                yield f"data.{field}[{table}#{seen[table]}].version", data_set, "version"
