"""A step on pretended GPUs (see `tests/dryrun`): nothing mixes devices, nothing waits, few collectives, one copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

# Sums of the loss, and exchanges of in-batch candidates with their gradients, or of a second collection.
BUILT_IN = {"sasrec": (2, 0), "hstu": (2, 0), "two_tower": (2, 2), "din": (0, 3)}
# Also sums of a softmax over items of all ranks, and exchanges of queries, their weights and their gradients' weights.
SHARDED_SOFTMAX = (5, 3)
CASES: list[dict[str, Any]] = [
    *({"world": 64, "plan": plan, "hosts": 8} for plan in ("row_wise", "table_row_wise")),
    {"world": 64, "plan": "mixed_dp", "hosts": 8, "resumed": True},
    *({"world": 2, "plan": plan} for plan in ("table_wise", "column_wise", "mixed_dp", "data_parallel")),
    *({"plan": "mixed_dp", "kernel": kernel, "model": "sequence", "resumed": True} for kernel in ("fused", "dense")),
    *({"plan": "mixed_dp", "model": model} for model in ("mean", "weighted")),
    {"plan": "mixed", "model": "dedup"},
    {"plan": "mixed_dp", "kernel": "dense"},
    {"plan": "grid_shard", "hosts": 2},
    {"plan": "mixed_dp", "world": 1},
    # Tables that torch's operators update, because fbgemm does not.
    *({"plan": "mixed_dp", "data_type": "BF16", "model": model} for model in ("sum", "sequence")),
    *({"plan": "mixed_dp", "optimizer": name, "decay": 1e-3} for name in ("sgd", "adagrad", "adam")),
    *({"plan": "mixed_dp", "frozen": True, "model": model} for model in ("sum", "sequence")),
    {"plan": "mixed_dp", "pipelined": True, "steps": 6},
    {"plan": "mixed_dp", "pipelined": True, "steps": 6, "model": "sequence"},
    # Histories, and candidates that are drawn on the host and travel with the batch.
    *({"plan": "mixed", "pipelined": True, "steps": 6, "longest": 9, "model": name} for name in BUILT_IN),
    {"plan": "mixed", "pipelined": True, "steps": 6, "longest": 9, "model": "sasrec", "bf16": True},
    {"plan": "mixed", "pipelined": True, "steps": 6, "longest": 9, "model": "sasrec", "loss": "softmax"},
]


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    command = [sys.executable, "-m", "tests.dryrun.measure", json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(map(name_of, CASES), map(json.loads, done.stdout.splitlines()), strict=True))


def name_of(case: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in case.items())


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_steady_step_neither_mixes_devices_nor_waits(case: dict[str, Any], answers: dict[str, Any]) -> None:
    answer = answers[name_of(case)]
    assert "error" not in answer, answer["error"]
    assert not answer["mismatches"] and not answer["syncs"]
    assert all("pinned, async" in copy for copy in answer["copies"])
    assert len(answer["copies"]) <= 1 or case.get("pipelined")
    assert bool(answer["restored"]) == case.get("resumed", False)
    found, world = answer["collectives"], case.get("world", 8)
    inside = sum(times for key, times in found.items() if "inside a host" in key)
    dense = sum(times for key, times in found.items() if key.startswith("allreduce"))  # DDP's
    others = sum(found.values()) - inside - dense
    # ids, vectors, gradients, on every link once; vectors and gradients once more inside a host, where row partials
    # are added up before they leave it; a host's own exchange of ids is part of that of all ranks
    replicated = case["plan"] in ("mixed_dp", "data_parallel")
    tiers = case.get("hosts", 1) > 1 and case["plan"] in ("row_wise", "table_row_wise", "grid_shard", "mixed_dp")
    sums, exchanges = SHARDED_SOFTMAX if "loss" in case else BUILT_IN.get(case.get("model", ""), (0, 0))
    assert others <= (0 if world == 1 else 3 + replicated + exchanges), found
    assert inside <= 2 * tiers, found
    assert dense == (world > 1) + sums
    attention = sum(int(place.split()[0]) for place in answer["places"] if "::_varlen_attn " in place)
    assert attention == (2 if case.get("bf16") else 0)  # in both layers, without padding


def test_a_dlrm_takes_few_operators_however_many_ranks_there_are() -> None:
    """At most 100, where TorchRec takes 121 (table-wise) and 112 (row-wise); see jobs/RESULTS.md. Nothing waits."""
    if shutil.which("g++") is None:
        pytest.skip("pretended GPUs need g++")
    most = {("table_wise", 8): 97, ("row_wise", 64): 100}
    cases = [{"plan": plan, "world": world, "width": 4} for plan, world in most]
    command = [sys.executable, "-m", "tests.dryrun.against", json.dumps(cases), "--alone", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for answer in map(json.loads, done.stdout.splitlines()):
        seen, limit = answer["rayrec.torchrec"], most[answer["plan"], answer["world"]]
        assert seen["operators"] <= limit and seen["syncs"] == 0, answer
        assert seen["collectives"] <= 4 + (answer["world"] > 8), answer  # ids, vectors, gradients; DDP's sum
