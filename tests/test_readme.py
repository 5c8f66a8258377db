"""README and guides say what is there: links, commands, Python, config. Run as a program, renews the reference."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, *(page for folder in ("deploy", "data", "rayrec") for page in (ROOT / folder).rglob("*.md"))])
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
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    for link in links:
        if not link.startswith(("http://", "https://", "#")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_commands_exist() -> None:
    from typer.testing import CliRunner

    from rayrec.cli.app import app

    text, shell = "\n".join(page.read_text() for page in PAGES), "\n".join(blocks("bash"))
    for command in {*re.findall(r"`rayrec (\w+)", text), *re.findall(r"^rayrec (\w+)", shell, re.MULTILINE)}:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"^make (\w+)", shell, re.MULTILINE), *re.findall(r"`make (\w+)`", text)} <= targets


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
