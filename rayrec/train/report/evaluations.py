"""The report's tables of evaluation figures: every evaluation, and the last one by stretches of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rayrec.train.report.run import Line, history, number, of_task, task_names

FIGURES = {
    "auc": "AUC",
    "gauc": "GAUC",
    "ne": "normalized entropy",
    "logloss": "log loss",
    "calibration": "calibration",
    "auprc": "AUPRC",
    "accuracy": "accuracy",
    "ndcg@10": "NDCG@10",
    "recall@10": "recall@10",
    "rmse": "RMSE",
    "r2": "R²",
}
MOST_ROWS = 200
ALWAYS = ("auc", "ne", "logloss", "calibration")  # of a label that is 0 or 1


def evaluations_table(evals: Sequence[Line]) -> str:
    """A row for each evaluation that stands, and each of several labels; the best AUC, or RMSE, is marked."""
    lines, _ = history(evals)
    if not lines:
        return ""
    names = task_names(lines)
    shown = _shown(lines, names)
    rows = [
        _row(name, [epoch_text(line), count_text(line, "step")], line, shown, best=line is best and len(of) > 1)
        for name, of in [(name, of_task(lines, name)) for name in names] or [("", lines)]
        for best in [max(of, key=_goodness)]
        for line in of
        if line is best or line in of[-MOST_ROWS:]
    ]
    note = f"<p class='note'>the last {MOST_ROWS} evaluations, and the best of those that are drawn</p>"
    table = _table(["label"] if names else [], ["epoch", "step", *shown.values(), "rows"], rows)
    return table + (note if len(lines) > MOST_ROWS else "")


def by_time_table(evals: Sequence[Line]) -> str:
    """The last evaluation's figures by stretches of time (UTC); nothing where rows have no times."""
    lines, _ = history(evals)
    stretches = lines[-1].get("by_time") if lines else None
    lines = [line for line in stretches if isinstance(line, dict)] if isinstance(stretches, list) else []
    if not lines:
        return ""
    names = task_names(lines)
    shown = _shown(lines, names)
    rows = [
        _row(name, [escape(str(line.get("start")))], line, shown)
        for name, of in [(name, of_task(lines, name)) for name in names] or [("", lines)]
        for line in of
    ]
    return _table(["label"] if names else [], ["from (UTC)", *shown.values(), "rows"], rows)


def _goodness(line: Line) -> float:
    return -(number(line, "rmse") or 0.0) if "rmse" in line else number(line, "auc") or 0.0


def _shown(lines: Sequence[Line], names: Sequence[str]) -> dict[str, str]:
    """The figures that some line has, of any of several labels."""
    every = [line for name in names for line in of_task(lines, name)] or lines
    always = () if all("rmse" in line for line in every) else ALWAYS
    return {key: title for key, title in FIGURES.items() if key in always or any(key in line for line in every)}


def _row(task: str, first: Sequence[str], line: Line, shown: Mapping[str, str], best: bool = False) -> str:
    """`task` is the name of the label, where there are several."""
    cells = [*first, *(figure_text(line, key) for key in shown), count_text(line, "samples")]
    return (
        f"<tr{' class=best' if best else ''}>{f'<td>{escape(task)}</td>' if task else ''}"
        + "".join(f"<td class='num'>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _table(names: Sequence[str], numbers: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names) + "".join(f"<th class='num'>{name}</th>" for name in numbers)
    body = "".join(rows)
    return f"<div class='wide'><table class='even'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def figure_text(line: Line, key: str) -> str:
    value = number(line, key)
    return "–" if value is None else f"{value:.4f}"


def count_text(line: Line, key: str) -> str:
    value = number(line, key)
    return "–" if value is None else f"{value:,.0f}"


def epoch_text(line: Line) -> str:
    """Of a line of metrics.jsonl, which counts epochs from 0, for people."""
    epoch = number(line, "epoch")
    return "–" if epoch is None else f"{epoch + 1:,.0f}"
