"""The notebooks run as they stand, and hold the outputs of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def printed(notebook: Any) -> list[list[str]]:
    """What each cell has printed, without its numbers."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [re.sub(r"[\d.]+ *", "0", output["text"]) for output in cell.outputs if output.get("name") == "stdout"]
        for cell in cells
    ]


@pytest.mark.parametrize("name", ["own_data", "own_model"])
def test_a_notebook_prints_what_it_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kept = nbformat.read(ROOT / "jobs" / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook = nbformat.from_dict({**kept, "cells": [nbformat.from_dict(dict(cell)) for cell in kept.cells]})
    NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert printed(notebook) == printed(kept) and any(map(len, printed(kept)))
    (found,) = re.findall(
        r"AUC (0\.\d+)", "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    )[:1]
    assert float(found) > 0.85
