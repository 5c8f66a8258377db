"""What an export takes of memory and disk does not grow with the tables: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "jobs" / "bench" / "export.py"


@pytest.mark.long
def test_an_export_takes_less_than_its_tables(tmp_path: Path) -> None:
    """Tables of 1,843 MB, cut in three ways by two ranks. Pages of mapped files, which the system takes back when it
    needs them, are not counted."""
    sizes = ["--tables", "9", "--rows", "800000", "--eval-rows", "20000", "--folder", str(tmp_path)]
    words = [sys.executable, BENCH, *sizes, "--parity", "100000", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["logit_max"] < 0.01 and told["parity_rows"] == 20480
    assert 0 < told["own_peak_bytes"] < 800 << 20 < told["tables_bytes"]
    assert told["read_over_tables"] < 1.3, "each table is read once"
    assert told["disk_over_export"] < 1.1
