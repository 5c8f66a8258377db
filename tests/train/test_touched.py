"""What training tells of how tables are looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.worker.window import touched
from tests.train.small import USERS, Heard, fit_job, make_job, raw_config, write_all


def test_rows_and_skew_by_table() -> None:
    lengths = torch.tensor([1, 1, 2, 0, 0, 3])  # of a, b and c, two examples each
    sparse = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([4, 4, 4, 9, 0, 1, 2]), lengths=lengths)
    found = touched(sparse, [("both", ["a", "b"]), ("own", ["c"])])
    assert found == {"both": {"ids": 4, "rows": 2, "top": 0.75}, "own": {"ids": 3, "rows": 3, "top": 1 / 3}}


def test_a_table_without_an_id_has_no_skew() -> None:
    nothing = KeyedJaggedTensor(["a"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int64))
    assert touched(nothing, [("t", ["a"])]) == {"t": {"ids": 0, "rows": 0, "top": None}}


def test_a_run_tells_it_once_a_minute(tmp_path: Path) -> None:
    write_all(tmp_path)
    told: list[dict[str, Any]] = []
    fit_job(make_job(raw_config(tmp_path, trainer__log_every=1)), None, Heard(told.append))
    first, *later = [record for record in told if record["kind"] == "train"]
    assert later and not any("tables" in record for record in later)
    user = first["tables"]["user"]
    assert set(first["tables"]) == {"user", "item", "tag"}
    assert user["ids"] == first["samples"]
    assert 1 < user["rows"] <= USERS and 1 / USERS <= user["top"] < 1
