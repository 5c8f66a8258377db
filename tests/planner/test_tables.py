"""Tables that the planner finds in a model, and their constraints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.tables.from_model import dense_bytes, find_tables, for_world, planner_tables
from rayrec.modules import EmbeddingBagCollection
from tests.planner.problems import KINDS, SHARDER, collection, table
from tests.planner.test_by_hand import TABLE, TOPOLOGY


@pytest.mark.parametrize("batch_size", [0, -1, 1.5])
def test_batch_size_is_at_least_1(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
        EmbeddingShardingPlanner(batch_size=batch_size)
    model = nn.ModuleDict({"ebc": collection([table("t", 10, 64)])})
    assert EmbeddingShardingPlanner(Topology(2, "cpu"), 1).plan(model, [SHARDER]).plan.keys() == {"ebc"}


def test_what_is_not_sharded_is_held_five_times() -> None:
    layer = nn.Linear(3, 2)
    model = nn.ModuleDict({"ebc": collection([table("t")]), "a": layer, "b": layer, "c": nn.Linear(1, 1).half()})
    assert dense_bytes(model, [SHARDER]) == 5 * (8 * 4 + 2 * 2)
    assert dense_bytes(model, []) == 5 * (8 * 4 + 2 * 2 + 1000 * 64 * 4)


class Outer(EmbeddingBagCollection):
    """A collection with one inside it."""

    def __init__(self) -> None:
        super().__init__([table("t")], device=torch.device("meta"))
        self.inner = collection([table("u")])


def test_what_is_inside_a_sharded_module_is_no_module_of_its_own() -> None:
    def paths(model: nn.Module) -> list[str]:
        return [found.path for found in find_tables(model, [SHARDER], "cpu")]

    assert paths(Outer()) == [""]
    assert paths(nn.ModuleDict({"a": Outer(), "ab": collection([table("u")]), "c": nn.Linear(1, 1)})) == ["a", "ab"]


def test_traffic_grows_with_the_world() -> None:
    larger = Topology(6, "cpu", local_world_size=3)
    (found,) = for_world([replace(TABLE, ranks=(1, 2))], TOPOLOGY, larger)
    assert (found.ids, found.bags, found.ranks) == (600.0, 300.0, (0, 1, 2, 3, 4, 5))


def facts_of(told: ParameterConstraints, features: int = 2) -> Any:
    names = [f"f{n}" for n in range(features)]
    found = find_tables(collection([table("t", 100, 64, names)]), [SHARDER], "cpu")
    return planner_tables(found, Topology(4, "cpu"), {"t": told}, 10)[0]


@pytest.mark.parametrize(
    ("told", "bags", "ids"),
    [
        ({}, 80, 80),
        ({"pooling_factors": [3.0]}, 80, 240),
        ({"pooling_factors": [3.0, 0.5]}, 80, 140),
        ({"num_poolings": [2.0, 1.0], "pooling_factors": [3.0, 0.5]}, 120, 260),
        ({"batch_sizes": [5, 1], "pooling_factors": [2.0, 3.0]}, 24, 52),
    ],
)
def test_traffic_of_all_ranks(told: dict[str, Any], bags: float, ids: float) -> None:
    """Two features, ten examples a rank, four ranks."""
    found = facts_of(ParameterConstraints(**told))
    assert (found.bags, found.ids, found.num_features) == (bags, ids, 2)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"pooling_factors": [-0.1]}, r"pooling_factors=\[-0.1\] must be finite and not negative"),
        ({"pooling_factors": [float("inf")]}, r"pooling_factors=\[inf\] must be finite"),
        ({"pooling_factors": [float("nan")]}, r"pooling_factors=\[nan\] must be finite"),
        ({"num_poolings": [1.0, 1.0, 1.0]}, "num_poolings has 3 numbers for 2 features"),
        ({"min_partition": 2}, "min_partition=2 must be a multiple of 4"),
        ({"min_partition": 0}, "min_partition=0 must be a multiple of 4"),
        ({"min_partition": 6}, "min_partition=6 must be a multiple of 4"),
        ({"device_group": [-1]}, r"device_group \[-1\] must name ranks of 0 .. 3"),
        ({"device_group": [4]}, r"device_group \[4\] must name ranks of 0 .. 3"),
        ({"sharding_types": ["data_parallel"], "device_group": [0, 1, 2]}, r"on cpu ranks \[0, 1, 2\]; what can run"),
    ],
)
def test_constraints_that_cannot_be_met(told: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"table 't': .*{error}"):
        facts_of(ParameterConstraints(**told))


def test_constraints_that_can_just_be_met() -> None:
    assert facts_of(ParameterConstraints()).min_partition == 16 and not facts_of(ParameterConstraints()).weighted
    assert [facts_of(ParameterConstraints(min_partition=n)).min_partition for n in (4, 64)] == [4, 64]
    assert facts_of(ParameterConstraints(is_weighted=True)).weighted
    assert facts_of(ParameterConstraints(device_group=[3, 0, 3])).ranks == (0, 3)
    for everyone in ("cpu", range(4), None):
        found = facts_of(ParameterConstraints(device_group=everyone))
        assert found.ranks == (0, 1, 2, 3) and "data_parallel" in found.kernels
    assert set(found.kernels) == set(KINDS)


def test_only_pooled_row_blocks_hold_partial_sums() -> None:
    for pooled, kind, rows in [(True, "table_wise", 1000), (False, "row_wise", 250)]:
        facts = replace(TABLE, pooled=pooled)
        vectors = (200 if pooled else 400 * rows / 1000) * 8 * 4
        assert shard_storage(facts, kind, "fused", (rows, 8), TOPOLOGY).vectors == 2 * vectors
