"""What a run keeps to after its first launch: versions of Delta and Iceberg tables, and types of ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.data.source.dataset import DataSet
from rayrec.train.config.train_config import TrainConfig


def with_versions(config: TrainConfig, earlier: Mapping[str, Any] | None) -> TrainConfig:
    """The config with a version for every table.

    Args:
        earlier: the config that the run was begun with, whose versions stay where the config names none.

    Raises:
        DataError: a table that cannot be opened.
    """
    data, before = config.data, (earlier or {}).get("data", {})
    found: dict[str, Any] = {}
    for field in ("train", "eval", "test"):
        given, known = getattr(data, field), _sections(before.get(field))
        found[field] = [_pinned(one, known) for one in given] if isinstance(given, list) else _pinned(given, known)
    sets = before.get("eval_sets", {})
    found["eval_sets"] = {name: _pinned(one, _sections(sets.get(name))) for name, one in data.eval_sets.items()}
    return config.model_copy(update={"data": data.model_copy(update=found)})


def with_id_types(config: TrainConfig, earlier: Mapping[str, Any] | None) -> TrainConfig:
    """The config with the types of ids that the run was begun with, where it names none."""
    schema = config.data_schema
    before = {
        feature["name"]: feature.get("id_type") for feature in (earlier or {}).get("schema", {}).get("sparse", [])
    }
    sparse = [
        feature if feature.id_type else feature.model_copy(update={"id_type": before.get(feature.name)})
        for feature in schema.sparse
    ]
    return config.model_copy(update={"data_schema": schema.model_copy(update={"sparse": sparse})})


def _sections(data: Any) -> list[Mapping[str, Any]]:
    return [one for one in (data if isinstance(data, list) else [data]) if isinstance(one, dict)]


def _pinned(data: DataSet | None, earlier: list[Mapping[str, Any]]) -> DataSet | None:
    if data is None or data.table is None or data.version is not None:
        return data
    for one in earlier:
        if (one["path"], one.get("table")) == (data.path, data.table) and one.get("version") is not None:
            return data.model_copy(update={"version": one["version"]})
    return data.pinned()
