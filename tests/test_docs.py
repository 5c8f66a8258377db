"""The documentation site: it builds without a warning, holds every page and public name, and needs no other server."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import BaseModel

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


def test_parameters_of_configs_are_those_of_their_classes(site: Path) -> None:
    """Signatures of pydantic classes: every field with its type, and a default exactly if it may be left out."""
    wrong, compared = [], 0
    for page in sorted((site / "reference/python").glob("*/index.html")):
        package = "rayrec" if page.parent.name == "rayrec" else f"rayrec.{page.parent.name}"
        module, text = importlib.import_module(package), page.read_text()
        for name in module.__all__:
            cls = getattr(module, name)
            if not (inspect.isclass(cls) and issubclass(cls, BaseModel)) or f'id="{package}.{name}"' not in text:
                continue  # a name from elsewhere
            required = {field.alias or key: field.is_required() for key, field in cls.model_fields.items()}
            shown = _parameters(text.partition(f'id="{package}.{name}"')[2])
            compared += len(required)
            if shown != required:
                wrong.append((f"{package}.{name}", shown.items() ^ required.items()))
    assert compared > 50 and not wrong


def _parameters(text: str) -> dict[str, bool]:
    """Whether each parameter of the first signature is required. Fails for a parameter without a type."""
    code = re.sub(r"<[^>]+>", "", text.partition("doc-signature")[2].partition("<code>")[2].partition("</code>")[0])
    (function,) = ast.parse(f"def {html.unescape(code).strip()}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    assert not arguments.args and all(argument.annotation for argument in arguments.kwonlyargs), code
    return {
        argument.arg: default is None
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }


class _Measured(SimpleHTTPRequestHandler):
    """Serves the site, and keeps what `widths.html` posts."""

    wide: ClassVar[list[str]] = []
    done: ClassVar[threading.Event] = threading.Event()

    def do_POST(self) -> None:
        self.wide.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_no_block_is_wider_than_its_page(site: Path, tmp_path: Path) -> None:
    """Code, tables and pictures, 1280 and 500 px wide. Drawings in text may scroll at 500."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("index.html"))
    script = (ROOT / "tests/widths.html").read_text().replace("PAGES = []", f"PAGES = {json.dumps(pages)}")
    (site / "widths.html").write_text(script)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Measured, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    url = f"http://127.0.0.1:{server.server_port}/widths.html"
    browser = subprocess.Popen(
        ["chromium", *options, f"--user-data-dir={tmp_path}", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert _Measured.done.wait(240)
    finally:
        browser.terminate()
        browser.wait(30)
        server.shutdown()
        server.server_close()
        (site / "widths.html").unlink()
    assert not _Measured.wide


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

    from rayrec.cli import app

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


FILES_AND_NAMES = "| step | file | function or class |"


@pytest.mark.parametrize(
    "path", [page for page in PAGES if FILES_AND_NAMES in page.read_text()], ids=lambda path: path.parent.name
)
def test_a_table_of_files_names_what_they_define(path: Path) -> None:
    (table,) = re.findall(re.escape(FILES_AND_NAMES) + r"\n(.*?)(?:\n\n|\Z)", path.read_text(), re.DOTALL)
    for row in table.splitlines()[1:]:
        _, files, names = (cell.strip() for cell in row.strip("|").split("|"))
        sources = [path.parent / name for name in re.findall(r"`([^`]+)`", files)]
        modules = [file for source in sources for file in ([source] if source.is_file() else source.rglob("*.py"))]
        assert sources and all(source.exists() for source in sources), row
        text = "\n".join(module.read_text() for module in modules)
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(class|def) {name}\b", text, re.MULTILINE), f"{row}: {name}"
