"""Permutation importance as the report's table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rayrec.train.report.run import Line, number


def importance_table(parts: Sequence[Line]) -> str:
    """A row for each table and number, with a bar; nothing where it was not measured."""
    figures = [(part, number(part, "ne"), number(part, "auc")) for part in parts]
    shown = [(part, ne, auc) for part, ne, auc in figures if ne is not None and auc is not None]
    most = max((ne for _, ne, _ in shown), default=0.0)
    rows = "".join(
        f"<tr><td>{escape(str(part.get('name')))}</td><td class='soft'>{escape(str(part.get('kind')))}</td>"
        f"<td class='num'>{ne:+.4f}</td><td class='num'>{-auc:+.4f}</td>"
        f"<td><progress max='1' value='{max(0.0, ne) / most if most > 0 else 0:.3f}'></progress></td></tr>"
        for part, ne, auc in shown
    )
    if not rows:
        return ""
    note = "<p class='note'>How the evaluation changes when a part's values are permuted over the rows.</p>"
    head = "<th>part</th><th></th><th class='num'>normalized entropy</th><th class='num'>AUC</th><th></th>"
    return (
        f"{note}<div class='wide'><table class='even'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
