"""Which version of a Delta or Iceberg table a run reads: the newest when it begins, the same one ever after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.data.source.dataset import DataSet
from rayrec.train.config import TrainConfig


def with_versions(config: TrainConfig, earlier: Mapping[str, Any] | None) -> TrainConfig:
    """The config with a version for every table.

    Args:
        earlier: the config that the run was begun with, whose versions stay where the config names none.

    Raises:
        DataError: a table that cannot be opened.
    """
    data, before = config.data, (earlier or {}).get("data", {})
    train = data.train
    found = {
        "train": _pinned(train, _sections(before.get("train")))
        if isinstance(train, DataSet)
        else [_pinned(one, _sections(before.get("train"))) for one in train],
        "eval": None if data.eval is None else _pinned(data.eval, _sections(before.get("eval"))),
    }
    return config.model_copy(update={"data": data.model_copy(update=found)})


def _sections(data: Any) -> list[Mapping[str, Any]]:
    return [one for one in (data if isinstance(data, list) else [data]) if isinstance(one, dict)]


def _pinned(data: DataSet, earlier: list[Mapping[str, Any]]) -> DataSet:
    if data.table is None or data.version is not None:
        return data
    for one in earlier:
        if (one["path"], one.get("table")) == (data.path, data.table) and one.get("version") is not None:
            return data.model_copy(update={"version": one["version"]})
    return data.pinned()
