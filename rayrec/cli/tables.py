"""Tables that stay readable in a narrow terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rayrec.data.tools.init.inspect import Inspection

_WIDEST = 10_000


def show(shown: Table, console: Console) -> None:
    """Prints a table, as wide as necessary if stdout is not a terminal."""
    if not console.is_terminal:
        wide = console.options.update(width=_WIDEST)
        console.width = max(console.width, console.measure(shown, options=wide).maximum)
    console.print(shown)


def show_columns(inspection: Inspection, *, to_stderr: bool) -> None:
    """Prints the proposed role of each column, with notes below the table."""
    from rich.console import Console

    from rayrec.train.terminal import plain, table

    console = Console(stderr=to_stderr, soft_wrap=True)
    files = f"{inspection.files:,} file{'' if inspection.files == 1 else 's'}"
    title = f"{inspection.rows:,} rows in {files}, {inspection.inspected_rows:,} inspected"
    columns = table("column", "type", "role", "nulls>", "ids>", "range", title=title)
    for c in inspection.columns:
        ids = f"{c.distinct:,}" if c.role.startswith(("id", "weighted")) else ""
        span = "" if c.low is None or c.high is None else f"{c.low:g} to {c.high:g}"
        columns.add_row(plain(c.name), plain(c.kind), c.role, f"{c.nulls:,}" if c.nulls else "", ids, span)
    show(columns, console)
    notes = [f"{c.name}: {c.note}" for c in inspection.columns if c.note and c.role != "label"]
    for line in [*notes, *_label_line(inspection)]:
        console.print(plain(line), highlight=False)


def _label_line(inspection: Inspection) -> list[str]:
    label = inspection.label
    if label is None:
        return []
    rule = " and ".join(f"{key} {value!r}" for key, value in label.schema.items() if key != "column")
    description = f"{label.column}{rule and f', {rule}'} ({label.why})"
    return [f"label: {description}; {label.positives.mean():.1%} of {len(label.positives):,} rows have 1"]


def show_importance(parts: Sequence[Mapping[str, Any]]) -> None:
    """Prints permutation importance, the most important input first."""
    from rich.console import Console

    from rayrec.train.terminal import plain, table

    changes = table("input", "kind", "NE>", "AUC>", title="change when permuted")
    for row in parts:
        changes.add_row(plain(row["name"]), row["kind"], f"{row['ne']:+.4f}", f"{-row['auc']:+.4f}")
    show(changes, Console())
