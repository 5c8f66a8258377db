"""Programs written for TorchRec run unchanged on rayrec, and lose what they lose there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LOSSES = json.loads((HERE / "recorded" / "programs.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours() -> dict[str, list[float]]:
    every = str(HERE / "programs" / "every.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "rayrec.torchrec", every],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_program_loses_what_it_loses_under_torchrec(ours: dict[str, list[float]], name: str) -> None:
    assert ours[name] == pytest.approx(LOSSES[name], abs=1e-5)


def test_every_program_is_recorded_and_names_torchrec_alone() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (HERE / "programs").glob("*.py")}
    programs = {name: text for name, text in texts.items() if name not in ("__init__", "every")}
    assert programs.keys() == LOSSES.keys()
    assert all("rayrec" not in text and "torchrec" in text for text in programs.values())
