"""The notebooks run as they stand, and hold the outputs of a run."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
CELL = "--- cell"


def without_numbers(texts: list[str]) -> list[str]:
    return [re.sub(r"[\d.]+ *", "0", text) for text in texts]


@pytest.mark.long
@pytest.mark.parametrize("name", ["own_data", "own_model"])
def test_a_notebook_prints_what_it_holds(name: str, tmp_path: Path) -> None:
    """Its cells, one after the other, as a program."""
    notebook = nbformat.read(ROOT / "jobs" / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kept = ["".join(out["text"] for out in cell.outputs if out.get("name") == "stdout") for cell in cells]
    (tmp_path / "cells.py").write_text("\n".join(f"print({CELL!r})\n{cell.source}" for cell in cells))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = run_forked(tmp_path / "cells.py", tmp_path, environment)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = done.stdout.split(f"{CELL}\n")[1:]
    assert without_numbers(printed) == without_numbers(kept) and any(kept)
    auc = re.search(r"AUC (0\.\d+)", done.stdout)
    assert auc is not None and float(auc[1]) > 0.85
