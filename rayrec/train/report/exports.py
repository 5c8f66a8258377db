"""The exports of a run as the report's table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rayrec.train.report.evaluations import count_text
from rayrec.train.report.run import Line, number

PAGE = "parity.html"


def exports_table(exports: Sequence[Line], run_dir: Path) -> str:
    """Newest first, each with a link to its page; a removed one is marked."""
    if not exports:
        return ""
    rows = "".join(_row(line, run_dir) for line in reversed(exports))
    head = "".join(
        f"<th{kind}>{name}</th>"
        for name, kind in (
            ("export", ""),
            ("version", ""),
            ("step", " class='num'"),
            ("tables", ""),
            ("dense", ""),
            ("target", ""),
            ("size of fp32", " class='num'"),
            ("AUC as trained", " class='num'"),
            ("AUC exported", " class='num'"),
            ("within its limits", ""),
        )
    )
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _row(line: Line, run_dir: Path) -> str:
    folder = Path(str(line.get("path", "")))
    page = folder / PAGE
    name, path = escape(folder.name), escape(str(folder), quote=True)
    if page.exists():
        name = f"<a href='{quote(os.path.relpath(page, run_dir.absolute()))}' title='{path}'>{name}</a>"
    else:
        name = f"<span class='soft' title='{path}'>{name} (removed)</span>"
    share = number(line, "share")
    cells = [
        ("", name),
        ("", escape(str(line.get("version", "")))),
        ("num", count_text(line, "step")),
        ("", escape(str(line.get("tables", "")))),
        ("", escape(str(line.get("dense", "")))),
        ("", escape(str(line.get("target", "")))),
        ("num", "–" if share is None else f"{share:.0%}"),
        ("num", _auc(line.get("trained"))),
        ("num", _auc(line.get("exported"))),
        ("", "yes" if line.get("within_limits") else "no"),
    ]
    return "<tr>" + "".join(f"<td class='{kind}'>{text}</td>" for kind, text in cells) + "</tr>"


def _auc(figures: Any) -> str:
    """Of one label, or of each of several."""
    figures = figures if isinstance(figures, dict) else {}
    tasks = figures.get("tasks")
    of = list(tasks.values()) if isinstance(tasks, dict) else [figures]
    values = [number(one, "auc") if isinstance(one, dict) else None for one in of]
    return ", ".join("–" if value is None else f"{value:.6f}" for value in values)
