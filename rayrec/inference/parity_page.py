"""`parity.html`: what `parity.json` says, for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from rayrec.inference.parity import FIGURES, Parity, by_label


def parity_page(parity: Parity, index: Mapping[str, Any]) -> str:
    """One HTML file without links, `parity.html` here filled in."""
    sides = {"as trained": parity.trained, "exported": parity.exported}
    if parity.recorded is not None:
        sides["written down by the trainer"] = parity.recorded
    shown = [figure for figure in FIGURES if any(figure in of for of in by_label(parity.trained).values())]
    rows = []
    for name in by_label(parity.trained):
        for side, figures in sides.items():
            values = [by_label(figures).get(name, {}).get(figure) for figure in shown]
            rows.append([f"{name}, {side}", *("–" if value is None else f"{value:.6f}" for value in values)])
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    page = environment.from_string(Path(__file__).with_name("parity.html").read_text("utf-8"))
    return page.render(parity=parity, index=index, shown=shown, figures=rows)
