"""Built-in models of one label, named in a config, trains on Parquet over two ranks and learns the planted signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, raw_config, write_all

ARGS: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_arch": [16, 8], "over_arch": [16, 1]},
    "dcn": {"dense_arch": [16], "over_arch": [16, 1], "cross_layers": 2, "cross_rank": 8},
    "deepfm": {"deep_arch": [16, 1], "dropout": 0.1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", list(ARGS))
def test_a_named_model_trains(name: str, data: Path) -> None:
    raw = raw_config(data, name=name, model={"name": name, "args": ARGS[name]}, trainer__epochs=3)
    results = on_ranks(2, fit_on_rank, raw, timeout_s=350)
    assert results[0]["eval"]["auc"] > 0.8, results[0]
    assert results[0]["eval"] == results[1]["eval"]
