"""Renders the HTML templates in `templates/`. Text is escaped; results of `render` are not escaped again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

HERE = Path(__file__).parent


class Column(NamedTuple):
    """A table column: its title and the CSS class of its cells (`num` for numbers)."""

    title: str
    look: str = ""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("report.css", "report.js"):
        environment.globals[name.rpartition(".")[2]] = Markup((HERE / name).read_text("utf-8"))
    return environment


def render(name: str, **values: Any) -> Markup:
    """Render `templates/<name>.html`."""
    return Markup(_environment().get_template(f"{name}.html").render(values))


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], look: str = "", marked: Collection[int] = ()
) -> Markup:
    """A horizontally scrolling table; empty without rows.

    Args:
        rows: cells, as text or results of `render`.
        look: CSS class of the table.
        marked: indices of highlighted rows.
    """
    listed = list(rows)
    return render("table", columns=columns, rows=listed, look=look, marked=marked) if listed else Markup("")
