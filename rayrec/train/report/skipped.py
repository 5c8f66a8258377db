"""The report's section on rows that could not be used and were left out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rayrec.train.report.run import Line, number

MOST_SAMPLES = 50
COLUMNS = {
    "problem": "what is wrong",
    "column": "column",
    "value": "value",
    "row": "row",
    "row_group": "row group",
    "file": "file",
}


def skipped_section(events: Sequence[Line]) -> str:
    """How many rows were left out of what, and the described ones with their places; nothing where there were none."""
    skipped = [line for line in events if line.get("event") == "skipped"]
    if not skipped:
        return ""
    notes = "".join(f"<p class='note'>{escape(str(line.get('message', '')))}</p>" for line in skipped[-MOST_SAMPLES:])
    samples = [sample for line in skipped for sample in line.get("samples") or () if isinstance(sample, dict)]
    head = "".join(f"<th>{title}</th>" for title in COLUMNS.values())
    rows = "".join(
        "<tr>" + "".join(f"<td class='text'>{_cell(sample, key)}</td>" for key in COLUMNS) + "</tr>"
        for sample in samples[:MOST_SAMPLES]
    )
    more = len(samples) - MOST_SAMPLES
    rest = f"<p class='note'>{more:,} more are in metrics.jsonl</p>" if more > 0 else ""
    return f"{notes}<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{rest}"


def skipped_rows(events: Sequence[Line]) -> int:
    """Rows of all events."""
    return sum(int(number(line, "count") or 0) for line in events if line.get("event") == "skipped")


def _cell(sample: Line, key: str) -> str:
    value = sample.get(key)
    return "–" if value is None else escape(str(value))
