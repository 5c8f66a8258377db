"""What a run resolves in the config that it was given: versions of tables, types of ids and of columns.

The run folder keeps both: `given.yaml` is the config as the last launch gave it, with absolute paths and defaults, and
`config.yaml` the same with all that was resolved. A relaunch takes the resolved values over where it names none, and
the data is checked against them. A new field that a run resolves gets a line in `_resolvable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayrec.data.source.dataset import DataSet
from rayrec.train.config.train_config import TrainConfig


class ResolvedValues:
    """Values that a run found for fields that its config leaves open, by a path that names the field.

    Args:
        values: of each resolved field. A data set is named by its path and table, so that another one at the same
            place of the config does not get its version.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    @classmethod
    def of(cls, resolved: Mapping[str, Any] | None) -> ResolvedValues:
        """Those in the plain values of a resolved config; none where there is no config yet."""
        fields = {} if resolved is None else {path: section.get(key) for path, section, key in _resolvable(resolved)}
        return cls({path: value for path, value in fields.items() if value is not None})

    def fill(self, config: TrainConfig) -> TrainConfig:
        """The config with these values where it has none of its own."""
        raw = config.to_dict()
        for path, section, key in _resolvable(raw):
            value, own = self._values.get(path), section.get(key)
            if isinstance(own, Mapping):
                section[key] = {**(value or {}), **own}
            elif own is None:
                section[key] = value
        return TrainConfig(**raw)


def with_versions(config: TrainConfig) -> TrainConfig:
    """The config with the newest version of each Delta and Iceberg table that it names without one.

    Raises:
        DataError: a table that cannot be opened.
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
    """Every field of a config that a run may resolve: the path that names it, the section it is in, and its key."""
    schema, data = raw.get("schema") or {}, raw.get("data") or {}
    for feature in schema.get("sparse") or []:
        yield f"schema.sparse.{feature['name']}.id_type", feature, "id_type"
    if schema:
        yield "schema.column_types", schema, "column_types"
    sets = {field: data.get(field) for field in ("train", "eval", "test")}
    sets |= {f"eval_sets.{name}": data_set for name, data_set in (data.get("eval_sets") or {}).items()}
    for field, value in sets.items():
        seen: dict[str, int] = {}
        for data_set in value if isinstance(value, list) else [value]:
            if isinstance(data_set, dict) and data_set.get("table") is not None:
                table = f"{data_set['table']}:{data_set['path']}"
                seen[table] = seen.get(table, 0) + 1  # a mix may name one table twice, with other filters
                yield f"data.{field}[{table}#{seen[table]}].version", data_set, "version"
