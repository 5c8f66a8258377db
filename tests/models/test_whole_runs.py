"""A built-in model of one label, named in a config, trains on Parquet over two ranks and learns the planted signal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, raw_config, write_all


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("models"))


def test_a_named_model_trains(data: Path) -> None:
    args = {"deep_arch": [16, 1], "dropout": 0.1}
    raw = raw_config(data, name="deepfm", model={"name": "deepfm", "args": args}, trainer__epochs=3)
    results = on_ranks(2, fit_on_rank, raw, timeout_s=350)
    assert results[0]["eval"]["auc"] > 0.8, results[0]
    assert results[0]["eval"] == results[1]["eval"]
