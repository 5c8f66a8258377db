"""Plans by hand and as text: what each generator cuts, what is refused, and what a plan says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from rayrec.distributed import (
    CacheParams,
    Shard,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Span,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.distributed import EmbeddingBagCollectionSharder, ModuleSharder, ParameterSharding
from rayrec.torchrec.distributed import sharding_plan as by
from rayrec.torchrec.distributed.shard import shard, shard_modules

CPU = torch.device("cpu")
T = ShardingType
Rectangle = tuple[int, int, int, int, int]  # rank, rows, columns


def collection(device: str = "meta", rows: int = 10, dim: int = 12, seed: int = 0) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    return EmbeddingBagCollection([table], device=device, seed=seed)


def planned(make: Any, world: int = 2, local: int = 2, device: str = "cpu", rows: int = 10) -> ParameterSharding:
    plan = by.construct_module_sharding_plan(
        collection(rows=rows), {"t": make}, local_size=local, world_size=world, device_type=device
    )
    return plan["t"]


def rectangles(sharding: ParameterSharding) -> list[Rectangle]:
    assert {one.table for one in sharding.shards} == {"t"}
    return [(s.rank, s.rows.start, s.rows.stop, s.cols.start, s.cols.stop) for s in sharding.shards]


@pytest.mark.parametrize(
    ("make", "kind", "expected"),
    [
        (by.data_parallel(), "data_parallel", [(rank, 0, 10, 0, 12) for rank in range(4)]),
        (by.table_wise(3), "table_wise", [(3, 0, 10, 0, 12)]),
        (by.row_wise(), "row_wise", [(0, 0, 3, 0, 12), (1, 3, 6, 0, 12), (2, 6, 9, 0, 12), (3, 9, 10, 0, 12)]),
        (by.row_wise(([4, 0, 6], "cpu")), "row_wise", [(0, 0, 4, 0, 12), (1, 4, 4, 0, 12), (2, 4, 10, 0, 12)]),
        (by.column_wise([2, 0, 2]), "column_wise", [(2, 0, 10, 0, 4), (0, 0, 10, 4, 8), (2, 0, 10, 8, 12)]),
        (by.column_wise(size_per_rank=[8, 4]), "column_wise", [(0, 0, 10, 0, 8), (1, 0, 10, 8, 12)]),
        (by.table_row_wise(0), "table_row_wise", [(0, 0, 5, 0, 12), (1, 5, 10, 0, 12)]),
        (by.table_row_wise(1), "table_row_wise", [(2, 0, 5, 0, 12), (3, 5, 10, 0, 12)]),
        (
            by.grid_shard([1, 0]),
            "grid_shard",
            [(2, 0, 5, 0, 6), (3, 5, 10, 0, 6), (0, 0, 5, 6, 12), (1, 5, 10, 6, 12)],
        ),
    ],
)
def test_generators_cut_as_they_say(make: Any, kind: str, expected: list[Rectangle]) -> None:
    found = planned(make, world=4)
    assert (found.sharding_type, rectangles(found)) == (kind, expected)


def test_fewer_rows_than_ranks_leave_ranks_out() -> None:
    assert rectangles(planned(by.row_wise(), world=4, rows=2)) == [(0, 0, 1, 0, 12), (1, 1, 2, 0, 12)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (by.table_wise(4), "rank 4 is outside the world of 4 ranks"),
        (by.table_wise(-1), "rank -1 is outside the world of 4 ranks"),
        (by.row_wise(([4, 5], "cpu")), r"sizes \[4, 5\] do not add up to 10 rows"),
        (by.column_wise(size_per_rank=[8, 5]), r"sizes \[8, 5\] do not add up to 12 columns"),
        (by.column_wise([0, 1, 2, 3, 0]), "embedding_dim=12 must be a multiple of 5, the number of column shards"),
        (by.grid_shard([0, 1, 0, 1, 0]), "embedding_dim=12 must be a multiple of 5, the number of column shards"),
        (by.table_row_wise(2), "rank 4 is outside the world of 4 ranks"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"table 't': {words}"):
        planned(make, world=4)


def test_plans_of_other_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="column_wise: pass ranks or size_per_rank"):
        by.column_wise()
    make = by.construct_module_sharding_plan
    sizes: Any = {"local_size": 1, "world_size": 1, "device_type": "cpu"}
    with pytest.raises(ValueError, match="table 't' is only in the module"):
        make(collection(), {}, **sizes)
    with pytest.raises(ValueError, match="table 'u' is only in the sharding"):
        make(collection(), {"t": by.table_wise(0), "u": by.table_wise(0)}, **sizes)
    with pytest.raises(ValueError, match="no default sharder for Linear; pass a sharder"):
        make(nn.Linear(1, 1), {}, **sizes)


def test_the_kernel_is_dense_unless_an_optimizer_or_the_plan_says_otherwise() -> None:
    makers = [by.table_wise, by.table_row_wise]
    assert [planned(make(0)).compute_kernel for make in makers] == ["dense"] * 2
    assert [planned(make(0, compute_kernel="fused_uvm")).compute_kernel for make in makers] == ["fused_uvm"] * 2
    for attribute in ("_in_backward_optimizers", "_optimizer_classes"):
        module = collection()
        setattr(module.embedding_bags["t"].weight, attribute, [])
        kernels = {}
        for name, make in {"tw": by.table_wise(0), "dp": by.data_parallel()}.items():
            plan = by.construct_module_sharding_plan(module, {"t": make}, None, 1, 1, "cpu")
            kernels[name] = plan["t"].compute_kernel
        assert kernels == {"tw": "fused", "dp": "dense"}


def test_devices_are_numbered_on_each_host() -> None:
    def placements(make: Any, device: str) -> list[str]:
        found = planned(make, world=4, local=2, device=device)
        return [found.placement(one) for one in found.shards]

    assert placements(by.row_wise(), "cuda") == [f"rank:{rank}/cuda:{rank % 2}" for rank in range(4)]
    assert placements(by.row_wise(), "cpu") == [f"rank:{rank}/cpu" for rank in range(4)]
    assert placements(by.table_wise(2, "cpu"), "cuda") == ["rank:2/cpu"]
    assert placements(by.table_wise(2, "cuda"), "cpu") == ["rank:2/cuda:0"]
    assert placements(by.row_wise(([4, 6], ["cuda", "cpu"])), "cpu") == ["rank:0/cuda:0", "rank:1/cuda:1"]
    assert placements(by.column_wise([3], device_types=["cuda", "cpu"]), "cpu") == ["rank:3/cuda:1"]
    assert placements(by.column_wise([3]), "cpu") == ["rank:3/cpu"]
    assert planned(by.row_wise(), world=4, local=2, device="cuda").local_ranks == {2: 0, 3: 1}
    assert planned(by.row_wise(), world=4, local=2).local_ranks == {}
    assert [by.placement("cuda", 6, 4), by.placement("cpu", 6, 4)] == ["rank:6/cuda:2", "rank:6/cpu"]


def rows_of(name: str, *held: tuple[int, int, int]) -> tuple[Shard, ...]:
    return tuple(Shard(table=name, rows=Span(a, b), cols=Span(0, 4), rank=rank) for rank, a, b in held)


def a_plan() -> ShardingPlan:
    rows = rows_of("t", (3, 0, 6), (1, 6, 10))
    cached = ParameterSharding(
        "row_wise",
        "fused_uvm_caching",
        shards=rows,
        device="cuda",
        cache_params=CacheParams(load_factor=0.5),
        local_ranks={3: 1},
    )
    copies = ParameterSharding("data_parallel", "dense", shards=rows_of("u", (0, 0, 5), (1, 0, 5)))
    return ShardingPlan({"a.ebc": {"t": cached, "u": copies}})


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = a_plan()
    assert ShardingPlan.from_json(plan.to_json()) == plan == ShardingPlan.from_json(plan.to_json(None))
    assert plan.to_json().startswith('{\n  "version"') and "\n" not in plan.to_json(None)
    assert plan.to_dict() == {
        "version": 1,
        "plan": {
            "a.ebc": {
                "t": {
                    "sharding_type": "row_wise",
                    "compute_kernel": "fused_uvm_caching",
                    "cache_params": {"load_factor": 0.5},
                    "ranks": [1, 3],
                    "shards": [
                        {"shard_offsets": [0, 0], "shard_sizes": [6, 4], "placement": "rank:3/cuda:1"},
                        {"shard_offsets": [6, 0], "shard_sizes": [4, 4], "placement": "rank:1/cuda:1"},
                    ],
                },
                "u": {
                    "sharding_type": "data_parallel",
                    "compute_kernel": "dense",
                    "ranks": [0, 1],
                    "shards": [
                        {"shard_offsets": [0, 0], "shard_sizes": [5, 4], "placement": "rank:0/cpu"},
                        {"shard_offsets": [0, 0], "shard_sizes": [5, 4], "placement": "rank:1/cpu"},
                    ],
                },
            }
        },
    }
    assert plan.min_world_size == 4 and ShardingPlan().min_world_size == 0
    assert [(path, one.rank) for path, _, one in plan.shards()] == [("a.ebc", rank) for rank in (3, 1, 0, 1)]
    assert plan.get_plan_for_module("a.ebc") is plan.plan["a.ebc"] and plan.get_plan_for_module("a") is None


def test_a_plan_prints_its_tables() -> None:
    expected = """
module: a.ebc

param | sharding type |   compute kernel  | ranks
----- | ------------- | ----------------- | ------
t     | row_wise      | fused_uvm_caching | [3, 1]
u     | data_parallel | dense             | [0, 1]

param | shard offsets | shard sizes |   placement
----- | ------------- | ----------- | -------------
t     | [0, 0]        | [6, 4]      | rank:3/cuda:1
t     | [6, 0]        | [4, 4]      | rank:1/cuda:1
"""
    plan = a_plan()
    assert [line.rstrip() for line in str(plan).splitlines()] == expected.strip().splitlines()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": "rank:1/cpu"}, "too many values to unpack"),
        ({"placement": "first"}, "not enough values"),
        ({"placement": 3}, "removeprefix"),
        ({"shard_offsets": [0]}, "not enough values"),
        ({"shard_sizes": None}, "NoneType"),
    ],
)
def test_a_malformed_shard_is_told_with_its_table(change: dict[str, Any], words: str) -> None:
    data = a_plan().to_dict()
    data["plan"]["a.ebc"]["t"]["shards"][0] |= change
    with pytest.raises(ValueError, match=f"plan of module 'a.ebc', table 't': .*{words}"):
        ShardingPlan.from_dict(data)


def test_what_is_no_plan_is_refused() -> None:
    data = a_plan().to_dict()
    for version in (0, 2, None):
        with pytest.raises(ValueError, match=f"plan version {version}: this rayrec reads version 1"):
            ShardingPlan.from_dict({**data, "version": version})
    del data["plan"]["a.ebc"]["u"]["compute_kernel"]
    with pytest.raises(ValueError, match="table 'u': field 'compute_kernel' is missing"):
        ShardingPlan.from_dict(data)
    with pytest.raises(ValueError, match="plan is not JSON"):
        ShardingPlan.from_json("{")
    data["plan"]["a.ebc"]["t"]["sharding_type"] = "by_moon"
    with pytest.raises(ValueError, match="'by_moon' is not a valid ShardingType"):
        ShardingPlan.from_json(json.dumps(data))


def test_a_sharding_says_where_its_rectangles_lie() -> None:
    pieces = [ShardMetadata([0, 0], [6, 4], "rank:3/cuda:1"), ShardMetadata([6, 0], [4, 4], "rank:1/cuda:1")]
    given = ParameterSharding("row_wise", "fused", sharding_spec=EnumerableShardingSpec(pieces))
    assert (given.device, given.local_ranks, given.ranks, given.shape) == ("cuda", {3: 1}, [3, 1], (10, 4))
    assert given.sharding_spec is not None and given.sharding_spec.shards == pieces
    named = given.of_table("t", 10, 4)
    assert named == ParameterSharding(
        "row_wise", "fused", shards=rows_of("t", (3, 0, 6), (1, 6, 10)), device="cuda", local_ranks={3: 1}
    )
    assert named.of_table("other", 1, 1) is named
    copies = ParameterSharding("data_parallel", "dense", [1, 0])
    assert copies.sharding_spec is None and copies.replicated and not given.replicated
    assert copies.of_table("u", 5, 4).shards == rows_of("u", (1, 0, 5), (0, 0, 5))
    assert (copies.device, ParameterSharding("table_wise", "fused").ranks) == ("cpu", [])
    assert ParameterSharding(T.TABLE_WISE, "fused").sharding_type == "table_wise"
    assert copies.load_factor == 0.2
    assert ParameterSharding("row_wise", "fused", cache_params=CacheParams(load_factor=0.1)).load_factor == 0.1
    for name in ("output_dtype", "key_value_params"):
        with pytest.raises(ValueError, match=f"ParameterSharding: {name}=False is not supported: "):
            ParameterSharding("row_wise", "fused", **{name: False})
    assert ParameterSharding("row_wise", "fused", stochastic_rounding=True).stochastic_rounding


class Sharder(ModuleSharder[nn.Linear]):
    """As users write them."""

    module_type = nn.Linear

    def shard(self, module: nn.Linear, params: Any, env: Any, device: Any = None) -> nn.Module:
        return module


def test_a_sharder_of_ones_own_has_defaults() -> None:
    own, table = Sharder(), torch.zeros(3, 2)
    assert (own.sharding_types("cpu"), own.compute_kernels("data_parallel", "cpu")) == (["data_parallel"], ["default"])
    assert list(own.shardable_parameters(nn.Linear(2, 2))) == ["weight", "bias"]
    assert own.qcomm_codecs_registry is None and Sharder({"a": 1}).qcomm_codecs_registry == {"a": 1}
    found = {
        (device, kernel): own.storage_usage(table, device, kernel)
        for device in ("cuda", "cpu")
        for kernel in ("fused", "fused_uvm", "fused_uvm_caching")
    }
    assert [pair for pair, usage in found.items() if usage == {"hbm": 24}] == [("cuda", "fused")]
    assert sum(usage == {"ddr": 24} for usage in found.values()) == 5
    with pytest.raises(ValueError, match="compute_device_type='tpu' must be 'cuda' or 'cpu'"):
        own.storage_usage(table, "tpu", "fused")


KJT = KeyedJaggedTensor(["f"], torch.tensor([1, 9, 9]), lengths=torch.tensor([1, 2]))
ALONE = ShardingEnv.from_local(1, 0)


@pytest.mark.parametrize(
    "plan",
    [
        by.table_wise(0),
        {"t": by.row_wise()},
        {"t": ParameterSharding("data_parallel", "dense", [0])},
    ],
    ids=["generator", "generators", "sharding"],
)
def test_one_collection_is_sharded_under_any_kind_of_plan(plan: Any) -> None:
    twin = shard(collection("cpu", seed=3), plan, ALONE, CPU)
    assert isinstance(twin, ShardedEmbeddingBagCollection)
    assert torch.equal(twin(KJT).wait().values(), collection("cpu", seed=3)(KJT).values())
    assert torch.equal(shard(collection("cpu", seed=3), plan)(KJT).wait().values(), twin(KJT).wait().values())


def test_what_has_no_sharder_is_refused() -> None:
    with pytest.raises(ValueError, match="no default sharder for Linear; pass a sharder"):
        shard(nn.Linear(1, 1), by.table_wise(0), ALONE, CPU)
    layer = nn.Linear(1, 1)
    assert shard(layer, {"weight": ParameterSharding("data_parallel", "dense", [0])}, ALONE, CPU, Sharder()) is layer


def test_a_models_collections_are_sharded_in_place() -> None:
    def model(device: str) -> nn.Module:
        return nn.ModuleDict(
            {"a": nn.ModuleDict({"ebc": collection("cpu")}), "over": nn.Linear(2, 2, device=device), "b": collection()}
        )

    one = model("meta")
    assert shard_modules(one, ALONE, CPU) is one
    assert isinstance(one.a.ebc, ShardedEmbeddingBagCollection) and isinstance(one.b, ShardedEmbeddingBagCollection)
    assert one.over.weight.is_meta
    filled = shard_modules(model("meta"), ALONE, CPU, init_params=True)
    assert not filled.over.weight.is_meta
    sharding = ParameterSharding("table_wise", "dense", shards=rows_of("t", (0, 0, 10)))
    plan = ShardingPlan({"": {"t": sharding}})
    alone = shard_modules(collection("cpu", dim=4), ALONE, CPU, plan, [EmbeddingBagCollectionSharder()])
    assert isinstance(alone, ShardedEmbeddingBagCollection)
    assert [type(kernel).__name__ for kernel in alone.kernels()] != []
    assert all(parameter.requires_grad for parameter in alone.parameters())
