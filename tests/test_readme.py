"""README and guides say what is there: links, commands, Python, config. Run as a program, renews the reference."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml

from rayrec.cli import run

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted(
    [README, *(page for folder in ("deploy", "data", "docs", "rayrec") for page in (ROOT / folder).rglob("*.md"))]
)
REFERENCE = ROOT / "rayrec/train/config/REFERENCE.md"


def reference() -> str:
    """The page that lists every field of the config."""
    from rayrec.train.config.reference import config_reference

    return f"""# Config reference

Every field, as `rayrec config` prints it (this page is written by `make reference`). Unknown or wrong fields are
refused with their path and what is allowed.

{config_reference()}
"""


def blocks(language: str, *paths: Path) -> list[str]:
    """The code blocks in a language on pages, by default on all."""
    return [
        dedent(block)
        for path in paths or PAGES
        for block in re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)
    ]


def test_config_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text() == reference(), "the config changed: make reference"


def test_readme_fits_on_a_screen() -> None:
    assert len(README.read_text().splitlines()) <= 60


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link}"


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_code_blocks_are_whole() -> None:
    """Python and YAML can be parsed, and a fence that is opened is closed."""
    for block in blocks("python"):
        ast.parse(block)
    for block in blocks("yaml"):
        yaml.safe_load(block)
    for page in PAGES:
        assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2 == 0, page


def test_options_on_pages_are_offered() -> None:
    """Every `rayrec COMMAND … --option` of the shell blocks and of code in the text."""
    from typer.main import get_command

    from rayrec.cli import app

    top: Any = get_command(app)
    shell = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    lines = [line for line in shell if line.startswith("rayrec ")]
    lines += [code for page in PAGES for code in re.findall(r"`(rayrec [a-z][^`]*)`", page.read_text())]
    assert len(lines) > 40
    for line in lines:
        words, command = line.split("#")[0].split()[1:], top
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        offered = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {re.match(r"[\w-]+", word.lstrip("["))[0] for word in words if word.lstrip("[").startswith("--")}  # type: ignore[index]
        assert given <= offered | {"--help", "--debug"}, f"{line}: {given - offered}"


# Lists to look things up in, and what has been measured or changed.
NOT_READ_THROUGH = {"REFERENCE.md", "NAMES.md", "COMPATIBILITY.md"}


@pytest.mark.parametrize("path", [page for page in PAGES if page.name not in NOT_READ_THROUGH])
def test_a_long_page_has_tables_pictures_or_examples(path: Path) -> None:
    """No stretch of more than a screen of prose."""
    prose = 0
    for line in re.sub(r"^ *```.*?^ *```", "```", path.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines():
        prose = 0 if line.lstrip().startswith(("|", "!", "```", "#")) else prose + 1
        assert prose <= 40, f"{path}: 40 lines of prose before {line!r}; a table or a picture says it shorter"


def test_commands_exist() -> None:
    text, shell = "\n".join(page.read_text() for page in PAGES), "\n".join(blocks("bash"))
    for command in {*re.findall(r"`rayrec (\w+)", text), *re.findall(r"^rayrec (\w+)", shell, re.MULTILINE)}:
        assert run([command, "--help"]) == 0, command
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"^make ([\w-]+)", shell, re.MULTILINE), *re.findall(r"`make ([\w-]+)`", text)} <= targets


def test_example_commands_are_accepted() -> None:
    from rayrec.train import load_config

    for line in "\n".join(blocks("bash")).replace("\\\n", " ").splitlines():
        if "data/movielens/train.yaml" in line:
            settings = [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']+)'|(\S+))", line)]
            load_config(ROOT / "data/movielens/train.yaml", settings)


def test_example_config_is_valid() -> None:
    from rayrec.train import TrainConfig

    (example,) = blocks("yaml", ROOT / "rayrec/data/README.md")
    assert TrainConfig(**yaml.safe_load(example)).tables[1].features == ["history"]


def test_example_model_works() -> None:
    from rayrec import Batch, EmbeddingBagConfig, KeyedJaggedTensor

    scope: dict[str, object] = {}
    (source,) = [block for block in blocks("python", ROOT / "rayrec/models/README.md") if "nn.Module" in block]
    exec(compile(source, "models/README.md", "exec"), scope)
    factory = scope["LogisticRegression"]
    assert callable(factory)
    tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["a", "b"])]
    sparse = KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(4), lengths=torch.tensor([1, 1, 2, 0]))
    loss, logits = factory(tables, 3)(Batch(torch.zeros(2, 3), sparse, torch.tensor([0.0, 1.0])))
    assert loss.dim() == 0 and logits.shape == (2,)


def test_python_examples_import_what_is_there() -> None:
    for block in blocks("python"):
        for node in ast.parse(block).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayrec"):
                exec(compile(ast.Module([node], []), "README.md", "exec"), {})


if __name__ == "__main__":
    REFERENCE.write_text(reference())
