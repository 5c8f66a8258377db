"""The exports of a run as the report's table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from rayrec.train.report.evaluations import count_text
from rayrec.train.report.run import Line, number
from rayrec.train.report.templates import Column, table

PAGE = "parity.html"


COLUMNS = (
    Column("export"), Column("version"), Column("step", "num"), Column("tables"), Column("dense"), Column("target"),
    Column("size of fp32", "num"), Column("AUC as trained", "num"), Column("AUC exported", "num"),
    Column("compared on rows", "num"),
    Column("within its limits"),
)  # fmt: skip
LINK = Markup("<a href='{}' title='{}'>{}</a>")
REMOVED = Markup("<span class='soft' title='{}'>{} (removed)</span>")


def exports_table(exports: Sequence[Line], run_dir: Path) -> Markup:
    """Newest first, each with a link to its page; a removed one is marked."""
    return table(COLUMNS, [_cells(line, run_dir) for line in reversed(exports)])


def _cells(line: Line, run_dir: Path) -> list[object]:
    folder = Path(str(line.get("path", "")))
    page, share = folder / PAGE, number(line, "share")
    link = REMOVED.format(folder, folder.name)
    if page.exists():
        link = LINK.format(quote(os.path.relpath(page, run_dir.absolute())), folder, folder.name)
    return [
        link,
        line.get("version", ""),
        count_text(line, "step"),
        *(line.get(name, "") for name in ("tables", "dense", "target")),
        "–" if share is None else f"{share:.0%}",
        _auc(line.get("trained")),
        _auc(line.get("exported")),
        count_text(line, "rows") + (" drawn" if line.get("sampled") else ""),
        "yes" if line.get("within_limits") else "no",
    ]


def _auc(figures: Any) -> str:
    """Of one label, or of each of several."""
    figures = figures if isinstance(figures, dict) else {}
    tasks = figures.get("tasks")
    of = list(tasks.values()) if isinstance(tasks, dict) else [figures]
    values = [number(one, "auc") if isinstance(one, dict) else None for one in of]
    return ", ".join("–" if value is None else f"{value:.6f}" for value in values)
