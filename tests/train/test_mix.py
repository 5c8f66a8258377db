"""A run over several data sets mixed by weight: killed, resumed on more ranks, each row as often as due."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.ranks import RankError, on_ranks
from tests.train.row_log import Noted, noted, with_row_ids
from tests.train.small import fit_job, make_job, table, write
from tests.train.test_exactly_once import committed

LONG, SHORT = 240, 50


def launch(group: dist.ProcessGroup, raw: dict[str, Any], log: str, dies: dict[int, int]) -> dict[str, Any]:
    return fit_job(replace(make_job(raw), factory=partial(Noted, log, dies)), group)


def test_a_killed_run_over_a_mix_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    write(tmp_path / "eval", 20, files=1, seed=1)
    whole = table(LONG + SHORT)
    for name, part in (("long", whole.slice(0, LONG)), ("short", whole.slice(LONG))):
        (tmp_path / name).mkdir()
        pq.write_table(part, tmp_path / name / "part-0.parquet", row_group_size=40)
    raw = with_row_ids(
        tmp_path, LONG + SHORT, trainer__batch_size=24, trainer__checkpoint_every=3, storage__background=False
    )
    raw["data"]["train"] = [
        {"path": str(tmp_path / "long"), "weight": 2},
        {"path": str(tmp_path / "short"), "filters": [["row", ">=", LONG]]},
    ]
    with pytest.raises(RankError):
        on_ranks(2, launch, raw, str(tmp_path / "first"), {1: 8})
    done = committed(tmp_path)
    assert done == 6
    outcome, *_ = on_ranks(3, launch, raw, str(tmp_path / "second"), {})
    steps = [_together(tmp_path / "first", 2, step) for step in range(done)]
    steps += [_together(tmp_path / "second", 3, step) for step in range(outcome["steps"] - done)]
    for step in steps[:10]:
        assert abs(sum(row < LONG for row in step) - 16) <= 2, "two of three rows are of the long set"
    seen = Counter(row for step in steps for row in step)
    assert all(seen[row] == 2 for row in range(LONG)), "two epochs"
    times = [seen[row] for row in range(LONG, LONG + SHORT)]
    assert sum(times) == pytest.approx(LONG, abs=24) and max(times) - min(times) <= 3


def _together(log: Path, world: int, step: int) -> list[int]:
    """What all ranks trained on in one step of a launch."""
    return [row for rank in range(world) for row in noted(log, rank)[step]]
