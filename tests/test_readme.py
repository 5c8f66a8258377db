"""The README says what is there: config reference, links, commands, Python. Run as a program, renews the reference."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, *(page for folder in ("deploy", "data", "rayrec") for page in (ROOT / folder).rglob("*.md"))])
BEGIN, END = "(written by `make readme`) -->\n", "<!-- config reference: end -->"


def with_reference(text: str) -> str:
    """The README with today's config reference in it."""
    from rayrec.train.config.reference import config_reference

    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{config_reference()}\n\n{END}{rest.split(END)[1]}"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def test_config_reference_is_up_to_date() -> None:
    text = README.read_text()
    assert with_reference(text) == text, "the config changed: make readme"


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    for link in links:
        if not link.startswith(("http://", "https://", "#")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_commands_exist() -> None:
    from typer.testing import CliRunner

    from rayrec.cli.app import app

    text, shell = README.read_text(), "\n".join(blocks("bash"))
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

    (example,) = blocks("yaml")
    assert TrainConfig(**yaml.safe_load(example)).tables[1].features == ["history"]


def test_example_model_works() -> None:
    from rayrec import Batch, EmbeddingBagConfig, KeyedJaggedTensor

    scope: dict[str, object] = {}
    (source,) = [block for block in blocks("python") if "nn.Module" in block]
    exec(compile(source, "README.md", "exec"), scope)
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
    README.write_text(with_reference(README.read_text()))
