"""`parity.html`: what `parity.json` says, for people."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rayrec.inference.parity import FIGURES, Parity, by_label

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1d2433}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #d8dce5;"
    "text-align:right}td:first-child,th:first-child{text-align:left}.good{color:#14794e}.bad{color:#b3261e}"
)


def parity_page(parity: Parity, index: Mapping[str, Any]) -> str:
    """One HTML file without links."""
    good = not parity.problems
    verdict = "within its limits" if good else "outside its limits"
    drawn = " drawn from the evaluation rows" if parity.sampled else ""
    told = [*parity.problems, *([] if parity.slow is None else [parity.slow])]
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in told)
    origin = " · ".join(f"{key} {value}" for key, value in index["origin"].items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Parity of {escape(index['version'])}</title>"
        f"<style>{_STYLE}</style><h1>Export {escape(index['version'])}</h1><p>{escape(origin)}</p>"
        f"<p class={'good' if good else 'bad'}><b>{verdict}</b>, on {parity.rows:,} rows{drawn}</p><ul>{problems}</ul>"
        f"{_figures(parity)}{_differences(parity)}{_tables(index, parity)}</html>\n"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _figures(parity: Parity) -> str:
    sides = {"as trained": parity.trained, "exported": parity.exported}
    if parity.recorded is not None:
        sides["written down by the trainer"] = parity.recorded
    shown = [f for f in FIGURES if any(f in of for of in by_label(parity.trained).values())]
    rows = []
    for name in by_label(parity.trained):
        for side, figures in sides.items():
            of = by_label(figures).get(name, {})
            rows.append([f"{name}, {side}", *("–" if of.get(f) is None else f"{of[f]:.6f}" for f in shown)])
    return _table(["", *shown], rows)


def _differences(parity: Parity) -> str:
    time = parity.ms_per_1000_rows
    rows = [
        ["greatest difference of a logit", f"{parity.logit_max:.3g}"],
        ["mean difference of a logit", f"{parity.logit_mean:.3g}"],
        ["greatest difference of a probability, or number", f"{parity.probability_max:.3g}"],
        ["ms for 1,000 rows, as trained", f"{time['trained']:.2f}"],
        ["ms for 1,000 rows, exported", f"{time['exported']:.2f}"],
        ["bytes of the tables as fp32", f"{parity.bytes['fp32']:,}"],
        ["bytes of the tables exported", f"{parity.bytes['tables']:,}"],
    ]
    return _table(["", ""], rows)


def _tables(index: Mapping[str, Any], parity: Parity) -> str:
    rows = [[p["table"], p["format"], f"{p['rows']:,}", str(p["dim"])] for p in index["places"]]
    return _table(["table", "format", "rows", "dim"], rows)
