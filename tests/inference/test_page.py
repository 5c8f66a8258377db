"""The commands of `deploy/SERVING.md` up to the service, run one after the other where a new user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "SERVING.md").read_text(encoding="utf-8")


def blocks(section: str) -> list[tuple[str, str]]:
    """(language, text) of a section's code."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_a_run_is_exported_read_and_scored_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(ROOT / "data")
    tools = str(Path(sys.executable).parent)
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": ":".join(filter(None, path))}

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    quick = ["trainer.num_workers=0", "trainer.epochs=1", f"storage.path={tmp_path / 'runs'}"]
    run("rayrec", "train", "data/movielens/train.yaml", *(part for one in quick for part in ("--set", one)))
    for section in ("Export", "Score files"):
        assert blocks(section)
        for language, text in blocks(section):
            run(*(["bash", "-ec", text] if language == "bash" else [sys.executable, "-c", text]))
    rows = pq.read_table(tmp_path / "predictions" / "eval")
    assert rows.num_rows == pq.read_table(ROOT / "data/movielens/parquet/eval").num_rows
    assert rows["prediction"].null_count == 0
    assert "exports/v1/parity.html" in (tmp_path / "runs/movielens/report.html").read_text()
