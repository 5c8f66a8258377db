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


def auc(folder: Path, world_size: int, sharding_type: str | None = None, **sharding: int) -> float:
    """Of the evaluation of a run of so many ranks."""
    raw = config(folder, "run", sharding_type)
    raw["sharding"] = {**raw["sharding"], **sharding}
    raw["trainer"]["num_workers"] = world_size
    outcome = on_ranks(world_size, fit_on_rank, raw, timeout_s=380)[0]
    assert (outcome["train"]["samples"], outcome["eval"]["samples"]) == (80_000, 20_000)
    return float(outcome["eval"]["auc"])


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> float:
    return auc(tmp_path_factory.mktemp("four"), 4)


def test_quality_is_alike_for_ranks_and_plans(four_ranks: float, tmp_path: Path) -> None:
    found = [auc(tmp_path / "one", 1), auc(tmp_path / "two", 2, "row_wise"), four_ranks]
    assert min(found) >= 0.70, found
    assert max(found) - min(found) <= 0.005, found


def test_quality_with_groups_that_train_on_their_own_for_ten_steps(four_ranks: float, tmp_path: Path) -> None:
    """Beside one group of as many ranks, which sees the same rows in the same order."""
    groups = auc(tmp_path, 4, replicas=4, sync_every=10)
    assert abs(groups - four_ranks) <= 0.003, (groups, four_ranks)
