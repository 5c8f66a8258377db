"""Permutation importance as the report's table."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rayrec.train.report.run import Line, number
from rayrec.train.report.templates import Column, table

COLUMNS = (Column("part"), Column("", "soft"), Column("normalized entropy", "num"), Column("AUC", "num"), Column(""))
NOTE = Markup("<p class='note'>How the evaluation changes when a part's values are permuted over the rows.</p>")
BAR = Markup("<progress max='1' value='{:.3f}'></progress>")


def importance_table(parts: Sequence[Line]) -> Markup:
    """A row for each table and number, with a bar; nothing where it was not measured."""
    figures = [(part, number(part, "ne"), number(part, "auc")) for part in parts]
    shown = [(part, ne, auc) for part, ne, auc in figures if ne is not None and auc is not None]
    most = max((ne for _, ne, _ in shown), default=0.0)
    rows = [
        [
            part.get("name"),
            part.get("kind"),
            f"{ne:+.4f}",
            f"{-auc:+.4f}",
            BAR.format(max(0.0, ne) / most if most > 0 else 0),
        ]
        for part, ne, auc in shown
    ]
    return NOTE + table(COLUMNS, rows, "even") if rows else Markup("")
