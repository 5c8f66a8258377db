"""A check's result as one self-contained HTML page, lengths of lists as pictures."""

from __future__ import annotations

from html import escape

from rayrec.data.tools.check import LONGEST_SHOWN, CheckReport, FeatureReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .3em .8em; border-bottom: 1px solid #ddd }
td.n { text-align: right; font-variant-numeric: tabular-nums } th { text-align: left } svg { display: block }
.bad { color: #b00020 } figure { display: inline-block; margin: 0 2em 1em 0 } figcaption { font-size: 13px }
"""
_WIDTH, _HEIGHT = 300, 90


def check_page(report: CheckReport, title: str) -> str:
    """The page, without any reference to other files."""
    share = report.positives / max(1, report.rows - report.bad_rows)
    bad = f'<b class="bad">{report.bad_rows:,} bad rows</b>' if report.bad_rows else "no bad rows"
    lists = [f for f in report.features if f.lengths[0] or f.lengths[2:].any()]
    parts = [
        f"<h1>{escape(title)}</h1><p>{report.rows:,} rows, {bad}; label 1 in {share:.2%} of the good ones.</p>",
        _reasons(report),
        "<h2>Features</h2><table><tr><th>feature<th>ids<th>nulls<th>different ids<th>table rows<th>rows used"
        "<th>collisions</tr>" + "".join(map(_row, report.features)) + "</table>",
        "<h2>Ids per row</h2>" + "".join(map(_picture, lists)) if lists else "",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>"


def _reasons(report: CheckReport) -> str:
    if not report.bad_rows:
        return ""
    rows = "".join(f"<tr><td>{escape(r)}<td class=n>{n:,}</tr>" for r, n in report.reasons.most_common())
    samples = "".join(f"<li>{escape(str(s))}</li>" for s in report.samples)
    return f"<h2>Bad rows</h2><table>{rows}</table><ul>{samples}</ul>"


def _row(feature: FeatureReport) -> str:
    different = "many" if feature.distinct_ids is None else f"{feature.distinct_ids:,}"
    collisions = "?" if feature.collisions is None else f"{feature.collisions:,}"
    numbers = [f"{feature.ids:,}", f"{feature.nulls:,}", different, f"{feature.table_rows:,}"]
    numbers += [f"{feature.used_rows:,} ({feature.used_rows / feature.table_rows:.1%})", collisions]
    return f"<tr><td>{escape(feature.name)}" + "".join(f"<td class=n>{n}" for n in numbers) + "</tr>"


def _picture(feature: FeatureReport) -> str:
    longest = int(feature.lengths.nonzero()[0].max())
    counts = feature.lengths[: longest + 1]
    width, top = _WIDTH / len(counts), counts.max()
    bars = "".join(
        f'<rect x="{i * width:.1f}" y="{_HEIGHT * (1 - n / top):.1f}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{_HEIGHT * n / top:.1f}"><title>{i} ids: {n:,} rows</title></rect>'
        for i, n in enumerate(counts.tolist())
    )
    end = f"{longest} and more" if longest == LONGEST_SHOWN else str(longest)
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" fill="#4c78a8">{bars}</svg>'
    return f"<figure>{svg}<figcaption>{escape(feature.name)}: 0 to {end} ids</figcaption></figure>"
