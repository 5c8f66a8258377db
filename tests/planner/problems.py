"""Planning problems for the tests: tables from hypothesis, plain ones, their sharder, and plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rayrec.distributed import (
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.planner import ParameterConstraints, Topology
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig

SHARDER = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
KINDS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard", "data_parallel")


def table(name: str, rows: int = 1000, dim: int = 64, features: Sequence[str] | None = None) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features or [f"{name}_id"])
    )


def cut(
    kind: str, ranks: Sequence[int], rows: int = 1000, dim: int = 16, name: str = "t", **more: Any
) -> ParameterSharding:
    """The sharding of a table of one type over the given ranks."""
    shards = CUTS[ShardingType(kind)](name, rows, dim, ranks)
    return ParameterSharding(sharding_type=kind, shards=shards, **{"compute_kernel": "fused", **more})


def plan_of(kind: str, ranks: Sequence[int], **table: Any) -> ShardingPlan:
    """A plan of one table, of one type."""
    sharding = cut(kind, ranks, **table)
    return ShardingPlan({"": {sharding.shards[0].table: sharding}})


def collection(tables: Sequence[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=list(tables), device="meta")


@st.composite
def tables(draw: st.DrawFn) -> list[EmbeddingBagConfig]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 3_000_000), st.integers(1, 32)), min_size=1, max_size=14))
    return [table(f"t{n}", rows, 4 * units) for n, (rows, units) in enumerate(shapes)]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    hosts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    cap = [draw(st.sampled_from([1 << 29, 1 << 30, 1 << 33])) for _ in hosts]
    memory = {"hbm_cap": cap, "ddr_cap": 1 << 33} if kind == "cuda" else {"ddr_cap": cap}
    return Topology(sum(hosts), kind, hosts=hosts, **memory)


@st.composite
def constraints(draw: st.DrawFn, names: Sequence[str]) -> dict[str, ParameterConstraints]:
    told = {}
    for name in names:
        if draw(st.booleans()):
            kinds = draw(st.none() | st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
            bag = draw(st.none() | st.floats(0, 40))
            told[name] = ParameterConstraints(sharding_types=kinds, pooling_factors=None if bag is None else [bag])
    return told


def drawn(seed: int) -> tuple[list[EmbeddingBagConfig], Topology, dict[str, ParameterConstraints]]:
    """A problem on hosts of unlike size with little memory to spare; every third one on GPUs."""
    random = np.random.default_rng(seed)
    hosts = [int(count) for count in random.integers(1, 5, random.integers(1, 4))]
    listed = [
        table(
            f"t{n}",
            int(10 ** random.uniform(2, 6.3)),
            4 * int(random.integers(1, 33)),
            [f"t{n}_{k}" for k in range(random.integers(1, 3))],
        )
        for n in range(random.integers(4, 12))
    ]
    told = {}
    for one in listed:
        if random.random() < 0.5:
            kinds = [KINDS[kind] for kind in sorted(random.choice(len(KINDS), 2, replace=False))]
            bag = float(30 ** random.uniform())
            told[one.name] = ParameterConstraints(sharding_types=kinds, pooling_factors=[bag] * len(one.feature_names))
    needed = sum(one.num_embeddings * (one.embedding_dim * 4 + 4) for one in listed)
    each = needed / sum(hosts) * random.choice([1.2, 1.5, 3.0]) + 40e6
    memory = [int(each * (1.5 if n else 1.0)) for n in range(len(hosts))]
    if seed % 3 == 2:
        halved = [held // 2 for held in memory]
        return listed, Topology(sum(hosts), "cuda", hosts=hosts, hbm_cap=halved, ddr_cap=1 << 33), told
    return listed, Topology(sum(hosts), "cpu", hosts=hosts, ddr_cap=memory), told
