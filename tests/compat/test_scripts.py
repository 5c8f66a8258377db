"""Every script loses under rayrec what it loses under TorchRec, and goes on from a checkpoint that TorchRec wrote."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.compat.losses import FOLDER, STEPS, script
from tests.ranks import on_ranks

RECORDED = Path(__file__).parent / "recorded"
LOSSES = json.loads((RECORDED / "losses.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours() -> dict[str, list[float]]:
    run = [sys.executable, "-W", "ignore", "-m", "tests.compat.losses", "rayrec"]
    done = subprocess.run(run, cwd=RECORDED.parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_are_torchrecs(ours: dict[str, list[float]], name: str) -> None:
    assert len(LOSSES[name]) == STEPS and LOSSES[name][0] != LOSSES[name][-1]
    for step, (mine, theirs) in enumerate(zip(ours[name], LOSSES[name], strict=True)):
        assert math.isclose(mine, theirs, abs_tol=1e-5), f"{name}, step {step}: {mine}, TorchRec {theirs}"


def resumed(group: dist.ProcessGroup, cuts: str) -> Any:
    from rayrec.distributed import sharding_plan as by

    world = group.size()
    generators = {
        "table_wise": {"t_a": by.table_wise(0), "t_b": by.table_wise(world - 1)},
        "row_wise": {"t_a": by.row_wise(), "t_b": by.row_wise()},
        "column_wise": {"t_a": by.row_wise(), "t_b": by.column_wise([0, world - 1])},
    }[cuts]
    return script(FOLDER / "checkpoint.py", "rayrec")["resume"](str(RECORDED / "checkpoint"), STEPS, generators)


@pytest.mark.parametrize(("world", "cuts"), [(1, "table_wise"), (2, "table_wise"), (2, "row_wise")])
def test_a_checkpoint_that_torchrec_wrote_goes_on_under_any_plan(world: int, cuts: str) -> None:
    """With equal batches on every rank, the mean over ranks is the loss of one."""
    expected = LOSSES["checkpoint"][STEPS // 2 :]
    for losses in on_ranks(world, resumed, cuts):
        assert losses == pytest.approx(expected, abs=1e-5)
