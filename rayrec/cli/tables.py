"""Tables that stay readable in a narrow terminal and in a pipe, and the table of a data set's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rayrec.data.tools.init.inspect import Inspection

_WIDEST = 10_000


def show(shown: Table, console: Console) -> None:
    """Prints a table: as wide as it needs to be where no terminal limits it, with each name on one line."""
    if not console.is_terminal:
        wide = console.options.update(width=_WIDEST)
        console.width = max(console.width, console.measure(shown, options=wide).maximum)
    console.print(shown)


def show_columns(found: Inspection, *, to_stderr: bool) -> None:
    """What every column is taken for, and a line below for each of which more is to be said."""
    from rich.console import Console

    from rayrec.train.driver.terminal import plain, table

    console = Console(stderr=to_stderr, soft_wrap=True)
    files = f"{found.files:,} file{'' if found.files == 1 else 's'}"
    title = f"{found.rows:,} rows in {files}, {found.inspected_rows:,} inspected"
    columns = table("column", "type", "taken for", "nulls>", "ids>", "range", title=title)
    for c in found.columns:
        ids = f"{c.distinct:,}" if c.role.startswith(("id", "weighted")) else ""
        span = "" if c.low is None or c.high is None else f"{c.low:g} to {c.high:g}"
        columns.add_row(plain(c.name), plain(c.kind), c.role, f"{c.nulls:,}" if c.nulls else "", ids, span)
    show(columns, console)
    notes = [f"{c.name}: {c.note}" for c in found.columns if c.note and c.role != "label"]
    for line in [*notes, *_label_line(found)]:
        console.print(plain(line), highlight=False)


def _label_line(found: Inspection) -> list[str]:
    label = found.label
    if label is None:
        return []
    rule = " and ".join(f"{key} {value!r}" for key, value in label.schema.items() if key != "column")
    which = f"{label.column}{rule and f', {rule}'} ({label.why})"
    return [f"label: {which}; {label.positives.mean():.1%} of {len(label.positives):,} rows have 1"]


def show_importance(parts: Sequence[Mapping[str, Any]]) -> None:
    """Permutation importance, the most important part first."""
    from rich.console import Console

    from rayrec.train.driver.terminal import plain, table

    changes = table("part", "kind", "NE>", "AUC>", title="permuted, it changes")
    for part in parts:
        changes.add_row(plain(part["name"]), part["kind"], f"{part['ne']:+.4f}", f"{-part['auc']:+.4f}")
    show(changes, Console())
