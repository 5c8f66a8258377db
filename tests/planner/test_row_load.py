"""Counts of ids by row: the planner expects the load that ranks then have, and plans around a block that is hot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import count_column
from rayrec.distributed.planner import ParameterConstraints, Topology, explain, plan_tables
from rayrec.distributed.planner.tables.row_load import BUCKETS, RowLoad
from rayrec.modules import EmbeddingBagConfig
from rayrec.train.planning.plan_only import make_groups
from rayrec.train.setup.build import constraints
from rayrec.train.setup.init_from import with_row_laws
from tests.train import small

ROWS, RANKS = 100_000, 8
TOPOLOGY = Topology.from_world(str(RANKS), "h100")
TABLE = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=64, feature_names=["f"])


def zipf(exponent: float) -> Any:
    return np.arange(1, ROWS + 1.0) ** -exponent


def plan(load: RowLoad | None, **limits: Any) -> Any:
    limit = ParameterConstraints(row_load=load, pooling_factors=[20], **limits)
    return plan_tables([TABLE], TOPOLOGY, {"t": limit}, batch_size=4096)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.data())
def test_shares_of_rows_are_sums_of_their_counts(counts: list[int], data: Any) -> None:
    load = RowLoad.of([np.array(counts, float)])
    if not sum(counts):
        assert load is None
        return
    assert load is not None
    rows = len(counts)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert load.share(start, stop, rows) == pytest.approx(sum(counts[start:stop]) / sum(counts), abs=1e-9)
    block = data.draw(st.integers(1, rows))
    blocks = [sum(counts[first : first + block]) / sum(counts) for first in range(0, rows, block)]
    assert load.worst(block, rows) == pytest.approx(max(blocks), abs=1e-9)


def test_the_estimate_has_the_load_of_the_counts() -> None:
    counts = zipf(0.75)
    load = RowLoad.of([np.add.reduceat(counts, np.arange(BUCKETS) * ROWS // BUCKETS)])
    even, uneven = (plan(each, sharding_types=["row_wise"]) for each in (None, load))
    blocks = counts.reshape(RANKS, -1).sum(1)
    assert even.estimate.lookup_ratio == pytest.approx(1)
    wanted = blocks.max() / blocks.mean()
    assert 0.6 * wanted < uneven.estimate.lookup_ratio < wanted, "reading ids is uneven, writing vectors is not"
    assert f"lookup load: worst / mean {uneven.estimate.lookup_ratio:.2f}" in explain(uneven)
    assert uneven.gap >= -1e-9, "the bound holds with counts too"


def test_a_hot_block_is_worth_another_plan() -> None:
    """All ids are in one block of rows: cut by rows, one rank does all the work."""
    hot = np.zeros(BUCKETS)
    hot[:100] = 1
    blind, told = plan(None), plan(RowLoad.of([hot]))
    assert told.plan.plan[""]["t"].sharding_type == "column_wise"
    row_wise = plan(RowLoad.of([hot]), sharding_types=["row_wise"])
    assert told.estimate.worst_s < row_wise.estimate.worst_s
    assert blind.estimate.worst_s <= told.estimate.worst_s


def test_a_load_of_a_table_that_the_model_leaves_out_is_no_error() -> None:
    load = RowLoad((0.0, 1.0))
    limits = {"other": ParameterConstraints(row_load=load)}
    assert plan_tables([TABLE], TOPOLOGY, limits, batch_size=64).plan.plan[""].keys() == {"t"}
    with pytest.raises(ValueError, match="constraints name table 'other'"):
        limits["other"] = ParameterConstraints(row_load=load, num_poolings=[1])
        plan_tables([TABLE], TOPOLOGY, limits, batch_size=64)


def test_a_config_takes_the_counts_of_its_vocabularies(tmp_path: Path) -> None:
    ids = np.repeat(np.arange(30), np.arange(30, 0, -1))
    pq.write_table(pa.table({"user": ids}), tmp_path / "ids.parquet")
    count_column(str(tmp_path / "ids.parquet"), "user", tmp_path / "users.parquet")
    mapping = {"kind": "vocabulary", "path": str(tmp_path / "users.parquet")}
    sparse = [{"name": "user", "mapping": mapping}, *small.RAW["schema"]["sparse"][1:]]
    only = {"user": {"sharding_types": ["row_wise"]}}
    config = small.config_of(schema__sparse=sparse, sharding={"constraints": only})

    def shares(spread_over: int | None) -> list[float]:
        raw = config.to_dict()
        raw["schema"]["sparse"][0]["mapping"]["spread_over"] = spread_over
        found = constraints(with_row_laws(type(config)(**raw)))
        assert set(found) == {"user"} and list(found["user"].sharding_types or []) == ["row_wise"]
        load = found["user"].row_load
        assert load is not None
        return [load.share(rank * 10, rank * 10 + 10, 40) for rank in range(4)]

    in_order = [sum(30 - p for p in range(max(0, 10 * r - 1), min(30, 10 * r + 9))) / ids.size for r in range(4)]
    assert shares(0) == pytest.approx(in_order, abs=0.01)
    assert max(shares(None)) < 0.3 < 0.5 < max(in_order)
    kept = config.to_dict()
    kept["schema"]["sparse"][0]["mapping"]["spread_over"] = 0
    results = [make_groups(each, Topology.from_world("4", "h100")).result for each in (config, type(config)(**kept))]
    spread, in_order_R = (result.estimate.lookup_R for result in results)
    assert spread.max() < in_order_R.max(), "planned as a new run maps the ids"
    count_column(
        str(tmp_path / "ids.parquet"), "user", tmp_path / "more.parquet", extend=str(tmp_path / "users.parquet")
    )
    raw = config.to_dict()
    raw["schema"]["sparse"][0]["mapping"]["path"] = str(tmp_path / "more.parquet")
    extended = constraints(type(config)(**raw))
    assert extended["user"].row_load is None, "it has counts of new ids only"
