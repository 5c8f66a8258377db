"""MovieLens, real rows: the quality that was promised, alike for any number of ranks and any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrec.train import load_config
from tests.ranks import on_ranks
from tests.train.small import fit_on_rank

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data" / "movielens"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (DATA / "parquet" / "eval").is_dir(), reason="`make data` has not been run"),
]


def config(folder: Path, name: str, sharding_type: str | None) -> dict[str, Any]:
    """One epoch of the example config; None keeps its own mix of sharding types."""
    raw = load_config(DATA / "train.yaml", ["trainer.epochs=1", "trainer.checkpoint_every=1000"]).to_dict()
    raw["name"], raw["storage"] = name, {"path": str(folder)}
    raw["data"] = {part: str(DATA / "parquet" / part) for part in ("train", "eval")} | {"read": {"reader": "local"}}
    if sharding_type is not None:
        constraint = {"sharding_types": [sharding_type], "min_partition": 8}
        raw["sharding"] = {"constraints": {table["name"]: constraint for table in raw["tables"]}}
    return raw


def test_quality_is_alike_for_ranks_and_plans(tmp_path: Path) -> None:
    cases = [(1, None), (2, "row_wise"), (4, None)]
    found: dict[tuple[int, str | None], float] = {}
    for world_size, kind in cases:
        raw = config(tmp_path, f"{kind}-{world_size}", kind)
        outcome = on_ranks(world_size, fit_on_rank, raw, timeout_s=380)[0]
        assert outcome["train"]["samples"] == 80_000
        assert outcome["eval"]["samples"] == 20_000
        found[world_size, kind] = outcome["eval"]["auc"]
    assert min(found.values()) >= 0.70, found
    assert max(found.values()) - min(found.values()) <= 0.005, found


def test_quality_with_groups_that_train_on_their_own_for_ten_steps(tmp_path: Path) -> None:
    """Beside one group of as many ranks, which sees the same rows in the same order."""
    found = {}
    for replicas, sync_every in ((1, 1), (4, 10)):
        raw = config(tmp_path, f"{replicas}-groups", None)
        raw["sharding"] = {"replicas": replicas, "sync_every": sync_every}
        raw["trainer"]["num_workers"] = 4
        found[replicas] = on_ranks(4, fit_on_rank, raw, timeout_s=380)[0]["eval"]["auc"]
    print({replicas: round(auc, 5) for replicas, auc in found.items()})
    assert max(found.values()) - min(found.values()) <= 0.003, found
