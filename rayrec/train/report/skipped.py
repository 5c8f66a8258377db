"""The report's section on rows that could not be used and were left out."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rayrec.train.report.run import Line, number
from rayrec.train.report.templates import Column, table

MOST_SAMPLES = 50
NOTE = Markup("<p class='note'>{}</p>")
COLUMNS = {
    "problem": "what is wrong",
    "column": "column",
    "value": "value",
    "row": "row",
    "row_group": "row group",
    "file": "file",
}


def skipped_section(events: Sequence[Line]) -> Markup:
    """How many rows were left out of what, and the described ones with their places; nothing where there were none."""
    skipped = [line for line in events if line.get("event") == "skipped"]
    notes = [NOTE.format(line.get("message", "")) for line in skipped[-MOST_SAMPLES:]]
    samples = [sample for line in skipped for sample in line.get("samples") or () if isinstance(sample, dict)]
    columns = [Column(title, "text") for title in COLUMNS.values()]
    rows = [["–" if sample.get(key) is None else sample[key] for key in COLUMNS] for sample in samples[:MOST_SAMPLES]]
    more = len(samples) - MOST_SAMPLES
    rest = [NOTE.format(f"{more:,} more are in metrics.jsonl")] if more > 0 else []
    return Markup("").join([*notes, table(columns, rows), *rest])


def skipped_rows(events: Sequence[Line]) -> int:
    """Rows of all events."""
    return sum(int(number(line, "count") or 0) for line in events if line.get("event") == "skipped")
