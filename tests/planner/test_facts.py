"""What is a fact cannot be changed, and what has many fields is made by their names; figures that scripts read."""

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
CHANGING = {
    "gradient_accumulation.GradientAccumulationConfig",
    "parts.DeviceHardware",
    "parts.Shard",
    "pipeline_stage._Item",
}
BY_PLACE = CHANGING | {
    "by_hand.Found",
    "env.ShardingEnv2D",
    "factory.HardwareConfig",
    "factory.KernelConfig",
    "factory.TrainerConfig",
    "hosts.BasicCommsBandwidths",
    "hosts.Host",
    "html._Run",
    "layout.GroupLayout",
    "matrix.RowGroups",
    "optimizer_rules.Step",
    "parts.Perf",
    "parts.Storage",
    "pipeline._Started",
    "pipeline_stage.PipelineStage",
    "tables.Lookups",
    "topology.Topology",
    "train_pipelines.TorchCompileConfig",
    "types.ParameterConstraints",
}


def loaded_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_anew", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_anew", module)  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["kernel", "planner", "replicas", "train_pipeline"])
def test_facts_are_frozen_and_made_by_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    for file in sorted((HOME / folder).glob("[!_]*.py")):
        module = loaded_anew(file, monkeypatch)
        own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == "loaded_anew"]
        found |= {f"{file.stem}.{each.__name__}": each for each in own if is_dataclass(each)}
    assert found
    assert {name for name, each in found.items() if not each.__dataclass_params__.frozen} <= CHANGING | {
        "packing.Packing"
    }
    first = {name: next(iter(inspect.signature(each).parameters.values())) for name, each in found.items()}
    assert {name for name, one in first.items() if one.kind is not one.KEYWORD_ONLY} <= BY_PLACE


def test_constants_are_torchrecs(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = loaded_anew(HOME / "planner" / "constants.py", monkeypatch)
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == {
        "GIB": 2**30,
        "BATCH_SIZE": 512,
        "HBM_CAP": 32 * 2**30,
        "DDR_CAP": 128 * 2**30,
        "SSD_CAP": 2 * 2**40,
        "HBM_MEM_BW": pytest.approx(897 * 2**30 / 1000),
        "DDR_MEM_BW": pytest.approx(51 * 2**30 / 1000),
        "SSD_MEM_BW": pytest.approx(0.1 * 2**20),
        "HBM_TO_DDR_MEM_BW": pytest.approx(32 * 2**30 / 1000),
        "INTRA_NODE_BANDWIDTH": pytest.approx(600 * 2**30 / 1000),
        "CROSS_NODE_BANDWIDTH": pytest.approx(12.5 * 2**30 / 1000),
        "MIN_CW_DIM": 128,
        "POOLING_FACTOR": 1.0,
        "NUM_POOLINGS": 1.0,
        "BIGINT_DTYPE": 8,
        "UVM_CACHING_RATIO": 0.2,
        "KV_CACHING_RATIO": 0.2,
        "BWD_COMPUTE_MULTIPLIER": 2,
        "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER": 1,
        "MAX_SIZE": 2**63 - 1,
        "DEFAULT_LOAD_FACTOR": 0.2,
    }
