"""The report's tables: evaluations, also by time and by value; exports; feature importance; skipped rows."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from rayrec.train.config.metric_titles import TITLES, cutoff
from rayrec.train.report.run import Line, history, number, of_task, task_names
from rayrec.train.report.svg import reliability_diagrams
from rayrec.train.report.templates import Column, table

PAGE = "parity.html"
EXPORT_COLUMNS = (
    Column("export"), Column("version"), Column("step", "num"), Column("tables"), Column("dense"), Column("target"),
    Column("size of fp32", "num"), Column("AUC as trained", "num"), Column("AUC exported", "num"),
    Column("compared on rows", "num"),
    Column("within its limits"),
)  # fmt: skip
IMPORTANCE_COLUMNS = (
    Column("part"), Column("", "soft"), Column("normalized entropy", "num"), Column("AUC", "num"), Column(""),
)  # fmt: skip
DYNAMIC_COLUMNS = (
    Column("table"), Column("rows used", "num"), Column("of rows", "num"), Column("full buckets", "num"),
    Column("lookups with an own row", "num"), Column("admitted", "num"), Column("waiting", "num"),
    Column("refused", "num"), Column("evicted", "num"), Column("expired", "num"),
)  # fmt: skip
_CAME_AND_WENT = ("admitted", "waiting", "refused", "evicted", "expired")
LINK = Markup("<a href='{}' title='{}'>{}</a>")
REMOVED = Markup("<span class='soft' title='{}'>{} (removed)</span>")
BAR = Markup("<progress max='1' value='{:.3f}'></progress>")
NOTE = Markup("<p class='note'>{}</p>")
MOST_SAMPLES = 50  # of skipped rows
SAMPLES = {
    "problem": "problem",
    "column": "column",
    "value": "value",
    "row": "row",
    "row_group": "row group",
    "file": "file",
}
MOST_ROWS = 200
ALWAYS = ("auc", "ne", "logloss", "calibration")  # for a binary label


def evaluations_table(evals: Sequence[Line]) -> Markup:
    """A row per valid evaluation and label; the best AUC, RMSE or NDCG@10 is marked."""
    lines, _ = history(evals)
    windows = any("window" in line for line in lines)
    rows, marked = list[tuple[str, Sequence[str], Line]](), set[int]()
    for name, of_label in _by_label(lines):
        best = max(of_label, key=_goodness)
        for line in of_label:
            if line is best or line in of_label[-MOST_ROWS:]:
                if line is best and len(of_label) > 1:
                    marked.add(len(rows))
                first = [epoch_text(line), count_text(line, "step")]
                rows.append((name, [*first, str(line.get("window", "–"))] if windows else first, line))
    note = NOTE.format(f"the last {MOST_ROWS} evaluations, and the best evaluation in the charts")
    return _table(lines, ["epoch", "step", *(["evaluated window"] if windows else [])], rows, marked) + (
        note if len(lines) > MOST_ROWS else ""
    )


def popularity_table(evals: Sequence[Line]) -> Markup:
    """The last evaluation of a retriever against the popularity baseline; empty for other models."""
    popular = _of_last(evals, "popularity")
    if not isinstance(popular, dict):
        return Markup("")
    lines = [history(evals)[0][-1], popular]
    return _table([popular], ["ranked by"], list(zip(("", ""), (["the model"], ["popularity"]), lines, strict=True)))


def reliability_section(evals: Sequence[Line]) -> Markup:
    """The reliability diagrams of the last evaluation; empty for models without binary labels."""
    bands = _lines(_of_last(evals, "reliability"))
    keys = ("weight", "predicted", "observed")
    return reliability_diagrams([band for band in bands if all(number(band, key) is not None for key in keys)])


def by_time_table(evals: Sequence[Line]) -> Markup:
    """Metrics of the last evaluation by time interval (UTC); empty for rows without times."""
    lines = _lines(_of_last(evals, "by_time"))
    rows = [(name, [str(line.get("start"))], line) for name, of_label in _by_label(lines) for line in of_label]
    return _table(lines, ["from (UTC)"], rows)


def by_value_table(evals: Sequence[Line]) -> Markup:
    """Metrics of the last evaluation by value of each feature in `trainer.slices`; empty without slices."""
    slices = _of_last(evals, "by_value")
    rows = [
        (label, [name, str(line.get("value"))], line)
        for name, values in (slices.items() if isinstance(slices, dict) else ())
        for label, of_label in _by_label(_lines(values)[:MOST_ROWS])
        for line in of_label
    ]
    return _table([line for _, _, line in rows], ["feature", "value"], rows)


def _of_last(evals: Sequence[Line], key: str) -> object:
    """The value of `key` in the last valid evaluation."""
    lines, _ = history(evals)
    return lines[-1].get(key) if lines else None


def _lines(value: object) -> list[Line]:
    return [line for line in value if isinstance(line, dict)] if isinstance(value, list) else []


def _by_label(lines: Sequence[Line]) -> list[tuple[str, Sequence[Line]]]:
    """(label, lines with its metrics); the name is empty for a run with one label."""
    if not lines:
        return []
    return [(name, of_task(lines, name)) for name in task_names(lines)] or [("", lines)]


def _goodness(line: Line) -> float:
    if "rmse" in line:
        return -(number(line, "rmse") or 0.0)
    return number(line, f"ndcg@{cutoff(line)}" if "mrr" in line else "auc") or 0.0


def _titles(lines: Sequence[Line]) -> dict[str, str]:
    """Metric → column title, for the metrics that occur in any line and label."""
    by_label = [line for _, of_label in _by_label(lines) for line in of_label] or lines
    always = () if all("rmse" in line or "mrr" in line for line in by_label) else ALWAYS
    titles = {key: title for key, title in TITLES.items() if key in always or any(key in line for line in by_label)}
    if not any("mrr" in line for line in by_label):
        return titles
    k = cutoff(by_label[-1])
    others = {f"{kind}@{k}": f"{kind.upper()}@{k}" for kind in ("recall", "ndcg", "precision", "map")}
    others |= {key: key for line in by_label for key in line if key.startswith("coverage@")}
    return titles | {key: title for key, title in others.items() if any(key in line for line in by_label)} | titles


def _table(
    lines: Sequence[Line],
    first: Sequence[str],
    rows: Sequence[tuple[str, Sequence[str], Line]],
    marked: Collection[int] = (),
) -> Markup:
    """A table of metrics.

    Args:
        rows: (label, first cells, line with the metrics) each.
    """
    titles = _titles(lines)
    labels = [Column("label")] if task_names(lines) else []
    columns = [*labels, *(Column(name, "num") for name in (*first, *titles.values(), "rows"))]
    cells = [
        [*([name] if labels else []), *start, *(figure_text(line, key) for key in titles), count_text(line, "samples")]
        for name, start, line in rows
    ]
    return table(columns, cells, "even", marked)


def figure_text(line: Line, key: str) -> str:
    value = number(line, key)
    return "–" if value is None else f"{value:.4f}"


def count_text(line: Line, key: str) -> str:
    value = number(line, key)
    return "–" if value is None else f"{value:,.0f}"


def epoch_text(line: Line) -> str:
    """The epoch counted from 1; metrics.jsonl counts from 0."""
    epoch = number(line, "epoch")
    return "–" if epoch is None else f"{epoch + 1:,.0f}"


def dynamic_ids_table(lines: Sequence[Line]) -> Markup:
    """A row for each table with dynamic ids, of the last line of training that tells of them."""
    told = [line["dynamic_ids"] for line in history(lines)[0] if isinstance(line.get("dynamic_ids"), dict)]
    rows = []
    for name, figures in told[-1].items() if told else ():
        shares = [f"{number(figures, key) or 0:.1%}" for key in ("full_share", "own_share")]
        rows.append([name, *(count_text(figures, key) for key in ("rows_used", "rows")), *shares,
                     *(count_text(figures, key) for key in _CAME_AND_WENT)])  # fmt: skip
    note = NOTE.format("At the last line of metrics; lookups and numbers of ids are those since the line before.")
    return note + table(DYNAMIC_COLUMNS, rows, "even") if rows else Markup("")


def exports_table(exports: Sequence[Line], run_dir: Path) -> Markup:
    """The exports, newest first, with links to their pages; removed exports are marked."""
    return table(EXPORT_COLUMNS, [_export(line, run_dir) for line in reversed(exports)])


def _export(line: Line, run_dir: Path) -> list[object]:
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
    """The AUC of each label, separated by commas."""
    figures = figures if isinstance(figures, dict) else {}
    tasks = figures.get("tasks")
    labels = list(tasks.values()) if isinstance(tasks, dict) else [figures]
    values = [number(metrics, "auc") if isinstance(metrics, dict) else None for metrics in labels]
    return ", ".join("–" if value is None else f"{value:.6f}" for value in values)


def importance_table(lines: Sequence[Line]) -> Markup:
    """A row with a bar per table and dense feature; empty if importance was not measured."""
    figures = [(line, number(line, "ne"), number(line, "auc")) for line in lines]
    valid = [(line, ne, auc) for line, ne, auc in figures if ne is not None and auc is not None]
    scale = max((0.0, *(ne for _, ne, _ in valid))) or 1.0
    rows = [
        [line.get("name"), line.get("kind"), f"{ne:+.4f}", f"{-auc:+.4f}", BAR.format(max(0.0, ne) / scale)]
        for line, ne, auc in valid
    ]
    note = NOTE.format("How the evaluation changes when a part's values are permuted over the rows.")
    return note + table(IMPORTANCE_COLUMNS, rows, "even") if rows else Markup("")


def skipped_section(events: Sequence[Line]) -> Markup:
    """Counts of skipped rows, and samples with their file and row; empty if none were skipped."""
    skipped = [line for line in events if line.get("event") == "skipped"]
    notes = [NOTE.format(line.get("message", "")) for line in skipped[-MOST_SAMPLES:]]
    samples = [sample for line in skipped for sample in line.get("samples") or () if isinstance(sample, dict)]
    columns = [Column(title, "text") for title in SAMPLES.values()]
    rows = [["–" if sample.get(key) is None else sample[key] for key in SAMPLES] for sample in samples[:MOST_SAMPLES]]
    unlisted = len(samples) - MOST_SAMPLES
    rest = [NOTE.format(f"{unlisted:,} more are in metrics.jsonl")] if unlisted > 0 else []
    return Markup("").join([*notes, table(columns, rows), *rest])


def skipped_rows(events: Sequence[Line]) -> int:
    """Number of skipped rows over all events."""
    return sum(int(number(line, "count") or 0) for line in events if line.get("event") == "skipped")
