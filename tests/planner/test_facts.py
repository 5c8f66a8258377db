"""Dataclasses of the engine are frozen, and those with many fields take keywords only."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rayrec.distributed as package

HOME = Path(package.__file__).parent
POSITIONAL = {
    "constraints.ParameterConstraints",
    "env.ShardingEnv2D",
    "hosts.Host",
    "picture._Box",
    "layout.GroupLayout",
    "rows.DistinctRows",
    "row_load.RowLoad",
    "optimizer_formulas.Step",
    "local_table.Lookups",
    "topology.Topology",
}


def loaded_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_anew", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_anew", module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["kernel", "planner", "replicas"])
def test_facts_are_frozen_and_made_by_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    for file in sorted((HOME / folder).rglob("[!_]*.py")):
        module = loaded_anew(file, monkeypatch)
        own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == "loaded_anew"]
        found |= {f"{file.stem}.{each.__name__}": each for each in own if is_dataclass(each)}
    assert found
    assert {name for name, each in found.items() if not each.__dataclass_params__.frozen} <= {"pack.Packing"}
    first = {name: next(iter(inspect.signature(each).parameters.values())) for name, each in found.items()}
    assert {name for name, one in first.items() if one.kind is not one.KEYWORD_ONLY} <= POSITIONAL
