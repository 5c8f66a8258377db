"""Every page of the Python reference begins with an example that runs and uses the page's names."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from tests.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
# No example shows these: values that functions return or take, bases to derive from, and what the commands call.
WITHOUT = {
    "checkpoint": {"Outcome", "Started"},
    "data": {
        "Dynamic",
        "FileJoin",
        "Follower",
        "FooterIndex",
        "FooterReading",
        "JoinSpec",
        "KafkaTopic",
        "LabelJoin",
        "Mapping",
        "Mix",
        "MixedStream",
        "Shuffle",
        "StoreSpec",
        "Task",
        "Vocabulary",
        "WindowsConfig",
        "build_store",
        "in_time_order",
    },
    "distributed": {
        "Awaitable",
        "BF16",
        "CacheParams",
        "Codec",
        "FP16",
        "FP32",
        "FP8",
        "FP8_WIDE",
        "ModuleSharder",
        "ModuleSharding",
        "NoWait",
        "NumberFormat",
        "ParameterSharding",
        "ShardedEmbeddingCollection",
        "fp8_rows",
        "int8_rows",
    },
    "inference": {
        "ExportStore",
        "Inputs",
        "ItemIndex",
        "Parity",
        "RetrieveOptions",
        "Scorer",
        "Search",
        "Trained",
        "TuningQueries",
        "apply_deltas",
        "read_delta",
        "with_ranker",
        "write_delta",
        "write_index",
    },
    "models": {"ItemFeatures", "Ranker", "Retriever", "Sequence"},
    "modules": {"BaseEmbeddingConfig"},
    "optim": {"KeyedOptimizer", "OptimizerWrapper"},
    "quant": {"EmbeddingCollection", "TablePlace"},
    "serve": {
        "Answer",
        "App",
        "ClientConfig",
        "Clients",
        "Limits",
        "LogConfig",
        "Retrieval",
        "TlsConfig",
        "parse_config",
        "serving",
    },
    "train": {"Display", "evaluate_run", "index_run", "parse_config", "write_report"},
}


def package_of(example: Path) -> str:
    return "rayrec" if example.stem == "top" else f"rayrec.{example.stem}"


def own_names(package: str) -> set[str]:
    """Public classes and functions, errors left out."""
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__}
    own = {name: what for name, what in found.items() if getattr(what, "__module__", "").startswith("rayrec")}
    return {name for name, what in own.items() if not (inspect.isclass(what) and issubclass(what, Exception))}


def names_used(package: str) -> set[str]:
    """Names of a package that any example imports and uses."""
    used = set()
    for example in EXAMPLES:
        tree = ast.parse(example.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == package
            for alias in node.names
        }
        used |= {imported[node.id] for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in imported}
    return used


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = run_forked(example, tmp_path, environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")], "an example leaves files"


def test_every_page_of_the_reference_has_an_example() -> None:
    pages = [line for line in (ROOT / "docs/mkdocs.yml").read_text().splitlines() if "reference/python/" in line]
    assert len(pages) == len(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_use_the_public_names_of_their_package(example: Path) -> None:
    package = package_of(example)
    used = names_used(package)
    if package == "rayrec":  # its names are those of other packages
        used = used.union(*(names_used(package_of(other)) for other in EXAMPLES))
    missing = own_names(package) - used
    assert not missing - WITHOUT.get(example.stem, set())
