"""MkDocs hook: takes pages from where they lie in the repository, and writes those of the reference.

A page keeps its path, so a relative link means the same in the repository and on the site. Files that pages link to
(pictures, configs) come along.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds every page of the navigation, and the files that pages link to."""
    pages = list(_paths(config.nav))
    linked = {name: None for page in pages if (ROOT / page).exists() for name in _linked(page)}
    for path in [*pages, *(name for name in linked if not name.endswith(".md"))]:
        if path.startswith("reference/"):
            files.append(File.generated(config, path, content=_written(Path(path))))
        else:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*></th>\s*)+</tr>\s*</thead>")
CELL_NAME = re.compile(r"(?<=<code>)[^<>]{14,}(?=</code>)")
LONG_WORD = re.compile(r"(?<=<td>)[^<>]*[\w./]{24,}[^<>]*(?=</td>)")
DRAWING = re.compile(r'<div class="language-text highlight">(.*?)</div>', re.DOTALL)
TAG = re.compile(r"<[^>]+>")


def on_page_content(html: str, **_: Any) -> str:
    """Prepares a page for narrow screens.

    Removes empty table heads, tells site.css the width of drawings in text, and lets long names break between
    their words only.
    """
    html = EMPTY_HEAD.sub("", html)
    html = DRAWING.sub(_sized, html)
    return LONG_WORD.sub(_breakable, CELL_NAME.sub(_breakable, html))


def _breakable(text: re.Match[str]) -> str:
    """A text that may break between the words of its names."""
    return re.sub(r"(?<=[._/=(\[,])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", text[0])


def _sized(drawing: re.Match[str]) -> str:
    """A drawing with the length of its longest line."""
    columns = max(len(line) for line in unescape(TAG.sub("", drawing[1])).splitlines())
    return f'<div class="language-text highlight" style="--columns: {columns}">{drawing[1]}</div>'


def _paths(nav: Any) -> Iterator[str]:
    """The paths in a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(item)


def _linked(page: str) -> Iterator[str]:
    """Files of the repository that a page links to."""
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / link
        if "://" not in link and target.is_file():
            yield target.resolve().relative_to(ROOT).as_posix()


def _written(path: Path) -> str:
    """A page of the reference: the options of all commands, or a package's public names."""
    if path.name == "commands.md":
        return _commands()
    package = "rayrec" if path.stem == "rayrec" else f"rayrec.{path.stem}"
    example = ROOT / "docs" / "examples" / f"{'top' if package == 'rayrec' else path.stem}.py"
    code = example.read_text(encoding="utf-8")
    text = f"# {package}\n\n## Example\n\n```python\n{code}```\n\n## Names\n\n::: {package}\n"
    for hidden in _hidden(ROOT / package.replace(".", "/")):  # mkdocstrings takes the name for the module's
        text += (
            f"\n::: {package}.{hidden}.{hidden}\n    options: {{show_root_heading: true, show_root_toc_entry: true}}\n"
        )
    return text


def _hidden(folder: Path) -> list[str]:
    """Public names of a package that one of its modules has too, as `export` of `rayrec.inference`."""
    text = (folder / "__init__.py").read_text(encoding="utf-8").partition("__all__ = [")[2].partition("]")[0]
    return [name for name in re.findall(r'"(\w+)"', text) if (folder / f"{name}.py").exists()]


def _whole_help(group: Any) -> None:
    """Keeps lists of commands from cutting the first sentence of each help text."""
    for command in getattr(group, "commands", {}).values():
        command.short_help = (command.help or "").strip().partition("\n")[0]
        _whole_help(command)


def _commands() -> str:
    """The options of every command, by typer."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from rayrec.cli import app

    command = get_command(app)
    _whole_help(command)
    context = command.make_context("rayrec", [], resilient_parsing=True)
    text: str = get_docs_for_click(obj=command, ctx=context, name="rayrec", title="Options of every command")
    return text
