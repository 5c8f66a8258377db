"""What an export takes of memory does not grow with the tables: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "jobs" / "bench_export_memory.py"


@pytest.mark.long
def test_an_export_takes_less_than_its_tables(tmp_path: Path) -> None:
    """Of tables cut in three ways by two ranks; the limit is the largest shard and 512 MiB."""
    sizes = ["--tables", "9", "--rows", "400000", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, BENCH, *sizes, "--json"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["logit_max"] < 0.01
    assert told["resident_bytes"] <= told["allowed_bytes"] < 4 * told["numbers"]
    assert told["own_bytes"] <= told["resident_bytes"]
