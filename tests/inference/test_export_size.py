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
    """Tables of 922 MB, cut in three ways by two ranks. The limit is the largest shard and 512 MiB, of which half is
    enough. Pages of mapped files, which the system takes back when it needs them, are not counted."""
    sizes = ["--tables", "9", "--rows", "400000", "--folder", str(tmp_path)]
    done = subprocess.run([sys.executable, BENCH, *sizes, "--json"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["logit_max"] < 0.01
    assert 0 < told["own_bytes"] <= told["allowed_bytes"] / 2
    assert told["reads_of_a_table"] == 1 and told["disk_over_export"] < 6.1, "fp32, int8, and the export"
    assert told["allowed_bytes"] < 4 * told["numbers"], "the tables must be larger than what is allowed"
