"""Fills in the HTML of the report, which lies in `templates/`: texts are escaped, what `render` gave is not again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

HERE = Path(__file__).parent


class Column(NamedTuple):
    """Of a table: its title, and the CSS class of its cells (`num`: numbers)."""

    title: str
    look: str = ""


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("report.css", "report.js"):
        found.globals[name.rpartition(".")[2]] = Markup((HERE / name).read_text("utf-8"))
    return found


def render(name: str, **values: Any) -> Markup:
    """The template `templates/<name>.html` with these values."""
    return Markup(_environment().get_template(f"{name}.html").render(values))


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], look: str = "", marked: Collection[int] = ()
) -> Markup:
    """A table that scrolls where it is wide; nothing without rows.

    Args:
        rows: cells, texts or HTML of `render`.
        look: CSS class of the table; `marked`: rows that stand out.
    """
    listed = list(rows)
    return render("table", columns=columns, rows=listed, look=look, marked=marked) if listed else Markup("")
