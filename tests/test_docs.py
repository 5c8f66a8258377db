"""The documentation site: it builds without a warning, holds every page and public name, and needs no other server."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.test_readme import PAGES, ROOT

CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", "docs/mkdocs.yml", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not re.search(r"WARNING|ERROR", done.stderr), done.stderr[-3000:]
    return folder


class _Loaded(HTMLParser):
    """URLs that a browser fetches to show a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "link" or given.get("rel") != "canonical":
            self.urls.append(given.get(LOADED.get(tag, "")) or "")


def test_every_page_of_the_repository_is_on_the_site(site: Path) -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "jobs/RESULTS.md"]:
        path = page.relative_to(ROOT).with_suffix("")
        assert (site / (path.parent if path.name == "README" else path) / "index.html").exists(), page


def test_nothing_is_fetched_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    foreign = {url for page in pages for url in _Loaded(page.read_text()).urls if re.match(r"(https?:)?//", url)}
    assert not foreign
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", styles)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    missing = []
    for page in sorted((site / "reference/python").glob("*/index.html")):
        name = page.parent.name
        package = "rayrec" if name == "rayrec" else f"rayrec.{name}"
        found = set(re.findall(r'id="([\w.]+)"', page.read_text()))
        module = importlib.import_module(package)
        own = [
            public for public in module.__all__ if getattr(getattr(module, public), "__module__", "")[:6] == "rayrec"
        ]
        missing += [f"{package}.{public}" for public in own if not _is_among(package, public, found)]
    assert not missing


def _is_among(package: str, public: str, found: set[str]) -> bool:
    return f"{package}.{public}" in found or f"{package}.{public}.{public}" in found


def test_every_option_of_every_command_is_in_the_reference(site: Path) -> None:
    from typer.main import get_command

    from rayrec.cli.app import app

    text = (site / "reference/commands/index.html").read_text()
    top = get_command(app)
    assert all(f"rayrec {name}" in text for name in top.commands)  # type: ignore[attr-defined]
    assert "--checkpoint" in text and "Score a checkpoint of a run; writes evaluation.json there." in text


@pytest.mark.parametrize("path", CONCEPTS, ids=lambda path: path.stem)
def test_a_concept_has_one_picture_and_says_what_is_next(path: Path) -> None:
    text = path.read_text()
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", text)
    drawing = (path.parent / picture).read_text()
    assert "<title>" in drawing and "http" not in drawing.replace("http://www.w3.org/2000/svg", "")
    assert "\nNext: [" in text and len(text.splitlines()) < 45


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_has_three_screens_without_a_picture_or_a_table(path: Path) -> None:
    """A screen has about 250 words; code is not counted."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    stretches = re.split(r"^\|.*$|!\[[^\]]*\]\([^)]*\)", text, flags=re.MULTILINE)
    assert max(len(stretch.split()) for stretch in stretches) < 750


def test_screenshots_are_small() -> None:
    pictures = list((ROOT / "docs").rglob("*.png"))
    assert pictures and all(path.stat().st_size < 120_000 for path in pictures)
