"""On a GPU: the tensor form is the compiled loop bit for bit, and a run is that of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.checkpoint import CheckpointStore
from rayrec.dynamic_ids import EMPTY, DeviceIdMap, DynamicIds, Evict, IdMap, unmix
from tests.train.small import Silent, control_of, fit_in, make_job, raw_config, session_on, write_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda", 0)
RULES: list[dict[str, Any]] = [
    {},
    {"evict": Evict.LRU, "ttl_s": 5},
    {"evict": Evict.LFU_DECAY, "half_life_s": 2, "ttl_s": 9, "min_count": 2},
    {"min_count": 3, "fallback": 0.3},
    {"probability": 0.4, "seed": -7, "evict": Evict.LRU},
]


@pytest.mark.parametrize("rows", [9, 2048, 100_000])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule) or "default")
def test_the_tensor_form_is_the_loop_bit_for_bit(rule: dict[str, Any], rows: int) -> None:
    host, draw = IdMap(DynamicIds(rows=rows, **rule)), np.random.default_rng(rows)
    device, special = DeviceIdMap(host, GPU), np.array([0, -1, EMPTY, -(2**63), 2**63 - 1, unmix(1)])
    for clock in range(1, 16):
        hot = draw.integers(0, 3 * rows, 3 * rows) // draw.integers(1, 9)
        ids = np.concatenate([hot, draw.integers(-(2**63), 2**63 - 1, rows), special])[: (0 if clock == 7 else None)]
        on_device = torch.from_numpy(ids).to(GPU)
        expected, found = host.step(ids, clock), device.step(on_device, clock)
        np.testing.assert_array_equal(found.rows.cpu().numpy(), expected.rows)
        if len(ids):
            assert found.statistics.tolist() == list(expected.statistics.values())
        np.testing.assert_array_equal(device.find(on_device).cpu().numpy(), host.find(ids))
        taken = sorted(row for row in found.changes.row.tolist() if row >= 0)
        assert taken == sorted(expected.changes.row.tolist())
    for (name, of_device), of_host in zip(device.to_host().state().items(), host.state().values(), strict=True):
        np.testing.assert_array_equal(of_device, of_host, name)


def run(data: Path, device: torch.device, name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """What a whole run saves: maps, tables, optimizer states."""
    raw = raw_config(data, name=name, data__shuffle="none", **changes)
    user, item, tags = raw["schema"]["sparse"]
    user = {**user, "mapping": {"kind": "dynamic", "time": "at", "ttl": "12h", "evict": "lru"}}
    item = {**item, "mapping": {"kind": "dynamic", "admit": {"min_count": 2}}}
    raw["schema"]["sparse"] = [user, item, tags]
    raw["tables"][0]["rows"], raw["tables"][1]["rows"] = 24, 30
    raw["optimizers"]["sparse"] = {"kind": "adagrad", "lr": 0.1}
    fit_in(session_on(device, None, control_of(), Silent()), make_job(raw))
    store = CheckpointStore(Path(raw["storage"]["path"]) / raw["name"] / "checkpoints")
    newest = store.latest()
    assert newest is not None
    with store.reader(newest) as reader:
        return {key: reader.tensor(key) for key in reader.index.tensors if key.startswith(("map/", "table"))}


def test_a_run_is_that_of_the_cpu(tmp_path: Path) -> None:
    data = write_all(tmp_path, rows=700)
    # A GPU draws other first weights, so that both go on from the weights of a run on the CPU.
    run(data, torch.device("cpu"), "start", trainer__epochs=1)
    start = {"path": str(tmp_path / "runs" / "start")}
    expected = run(data, torch.device("cpu"), "cpu", init_from=start)
    for name, sharding in (("tw", "table_wise"), ("rw", "row_wise"), ("dp", "data_parallel")):
        constraints = {table: {"sharding_types": [sharding]} for table in ("user", "item")}
        found = run(data, GPU, name, init_from=start, sharding={"constraints": constraints})
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            rtol, atol = (0.0, 0.0) if key.startswith("map/") else (1e-3, 1e-4)
            assert torch.allclose(found[key].double(), tensor.double(), rtol, atol), key
