"""What the tutorials show, called as they call it: names, import paths, printed text, fused learning rates."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import rayrec.torchrec
from rayrec.torchrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingComputeKernel,
    ModuleSharder,
    ShardingEnv,
    ShardingType,
)
from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.torchrec.distributed.types import LazyAwaitable
from rayrec.torchrec.optim import in_backward_optimizer_filter
from tests.ranks import on_ranks

CPU = torch.device("cpu")
TWO_TABLES = """module: 

    param     | sharding type | compute kernel | ranks
------------- | ------------- | -------------- | -----
product_table | table_wise    | fused          | [0]  
user_table    | table_wise    | fused          | [0]  

    param     | shard offsets | shard sizes | placement 
------------- | ------------- | ----------- | ----------
product_table | [0, 0]        | [4096, 64]  | rank:0/cpu
user_table    | [0, 0]        | [4096, 64]  | rank:0/cpu
"""  # noqa: W291


def shop(device: str = "cpu") -> rayrec.torchrec.EmbeddingBagCollection:
    """Two tables, as in both introductions."""
    return rayrec.torchrec.EmbeddingBagCollection(
        device=device,
        tables=[
            rayrec.torchrec.EmbeddingBagConfig(
                name=f"{thing}_table",
                embedding_dim=64,
                num_embeddings=4096,
                feature_names=[thing],
                pooling=rayrec.torchrec.PoolingType.SUM,
            )
            for thing in ("product", "user")
        ],
    )


def visits() -> rayrec.torchrec.KeyedJaggedTensor:
    return rayrec.torchrec.KeyedJaggedTensor.from_jt_dict(
        {
            "product": rayrec.torchrec.JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1])),
            "user": rayrec.torchrec.JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2])),
        }
    )


def test_jagged_tensors_read_and_print_as_shown() -> None:
    one = rayrec.torchrec.JaggedTensor(values=torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert one.offsets().tolist() == [0, 1, 3]
    assert [part.tolist() for part in one.to_dense()] == [[5], [7, 1]]
    assert str(one) == "JaggedTensor({\n    [[5], [7, 1]]\n})\n"
    kjt = visits()
    assert kjt.keys() == ["product", "user"]
    assert kjt.lengths().tolist() == [3, 1, 2, 2]
    assert kjt.values().tolist() == [1, 2, 1, 5, 2, 3, 4, 1]
    assert kjt.offsets().tolist() == [0, 3, 4, 6, 8]
    assert str(kjt) == 'KeyedJaggedTensor({\n    "product": [[1, 2, 1], [5]],\n    "user": [[2, 3], [4, 1]]\n})\n'
    assert re.match(r"\{'product': <rayrec.sparse.jagged_tensor.JaggedTensor object at 0x", str(kjt.to_dict()))


def test_a_batch_from_keys_values_and_lengths_prints_as_shown() -> None:
    batch = rayrec.torchrec.KeyedJaggedTensor(
        keys=["product", "user"],
        values=torch.tensor([101, 202, 303, 404, 505, 606]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int64),
    )
    assert batch.stride() == 3
    assert str(batch.to(CPU)) == (
        'KeyedJaggedTensor({\n    "product": [[101, 202], [], [303]],\n    "user": [[404], [505], [606]]\n})\n'
    )


def test_the_plain_collection_prints_and_pools_as_shown() -> None:
    ebc = shop()
    assert str(ebc.embedding_bags) == (
        "ModuleDict(\n  (product_table): EmbeddingBag(4096, 64, mode='sum')\n"
        "  (user_table): EmbeddingBag(4096, 64, mode='sum')\n)"
    )
    assert "features: KeyedJaggedTensor) -> KeyedTensor" in inspect.getsource(ebc.forward)
    result = ebc(visits())
    assert result.keys() == ["product", "user"]
    assert result.values().shape == (2, 128)
    assert {key: block.shape for key, block in result.to_dict().items()} == {"product": (2, 64), "user": (2, 64)}


def introduction(pg: dist.ProcessGroup) -> dict[str, Any]:
    """The distributed half of the introduction on one rank: what it prints, by name."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    shows: dict[str, Any] = {}
    ebc, kjt = shop(), visits()
    sharder = EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    plan = planner.collective_plan(ebc, [sharder], pg)
    shows["plan"] = f"{plan}"
    env = ShardingEnv.from_process_group(pg)
    sharded = sharder.shard(ebc, plan.plan[""], env, CPU)
    output = sharded(kjt)
    shows["output"] = f"{output}"
    kt = output.wait()
    shows["type"] = f"{type(kt)}"
    shows["keys"], shows["shape"] = kt.keys(), list(kt.values().shape)
    shows["shapes"] = {key: list(block.shape) for key, block in kt.to_dict().items()}
    shows["same"] = torch.allclose(kt.values(), ebc(kjt).values())
    shows["stages"] = [len(sharded._input_dists), len(sharded._lookups), len(sharded._output_dists)]
    model = rayrec.torchrec.distributed.DistributedModelParallel(ebc, device=CPU)
    shows["model"] = torch.allclose(model(kjt).wait().values(), kt.values())

    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002}
    fused = EmbeddingBagCollectionSharder(fused_params=params).shard(ebc, plan.plan[""], env, CPU)
    applied = copy.deepcopy(ebc)
    shows["names"] = [name for name, _ in applied.named_parameters()]
    for _, param in applied.named_parameters():
        apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    sharded_applied = sharder.shard(applied, plan.plan[""], env, CPU)
    shows["optimizers"] = [str(module.fused_optimizer) for module in (sharded, fused, sharded_applied)]
    shows["optimizer type"] = str(type(fused.fused_optimizer))
    shows["left over"] = str(dict(in_backward_optimizer_filter(fused.named_parameters())).keys())
    shows["losses"] = []
    for _ in range(2):
        vectors = fused(kjt).wait().values()
        loss = torch.sum(torch.ones_like(vectors) - vectors)
        shows["losses"].append(loss.item())
        loss.backward()
    return shows


def test_the_introduction_shows_what_it_should() -> None:
    (shows,) = on_ranks(1, introduction)
    assert shows["plan"] == TWO_TABLES
    assert (
        "rayrec.distributed.collections.embedding_bag.EmbeddingBagCollectionAwaitable object at 0x" in shows["output"]
    )
    assert shows["type"] == "<class 'rayrec.sparse.jagged_tensor.KeyedTensor'>"
    assert (shows["keys"], shows["shape"]) == (["product", "user"], [2, 128])
    assert shows["shapes"] == {"product": [2, 64], "user": [2, 64]}
    assert shows["same"] and shows["model"]
    assert all(count >= 1 for count in shows["stages"])
    assert shows["names"] == ["embedding_bags.product_table.weight", "embedding_bags.user_table.weight"]
    text = ": EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: {}\n)"
    rates = ["0.009999999776482582", "0.019999999552965164", "0.5"]
    assert shows["optimizers"] == [text.format(rate) for rate in rates]
    assert shows["optimizer type"] == "<class 'rayrec.optim.keyed.CombinedOptimizer'>"
    assert shows["left over"] == "dict_keys([])"
    first, second = shows["losses"]
    assert first == pytest.approx(256, abs=2)
    assert first - second == pytest.approx(255.96 - 245.74, abs=0.02)


def test_a_lazy_awaitable_of_ones_own_waits() -> None:
    class Ones(LazyAwaitable[torch.Tensor]):
        def __init__(self, size: list[int]) -> None:
            super().__init__()
            self._size = size

        def _wait_impl(self) -> torch.Tensor:
            return torch.ones(self._size)

    assert Ones([3, 2]).wait().tolist() == [[1, 1]] * 3
    assert torch.add(Ones([2]), 1).tolist() == [2, 2]


def older_introduction(pg: dist.ProcessGroup) -> tuple[str, str, str, list[int]]:
    model = rayrec.torchrec.distributed.DistributedModelParallel(shop(device="meta"), device=CPU)
    output = model(visits())
    return str(model), str(model.plan), str(output), list(output.wait().values().shape)


def test_the_older_introduction_shards_from_meta_with_a_plan_of_its_own() -> None:
    ((model, plan, output, shape),) = on_ranks(1, older_introduction)
    assert model.startswith("DistributedModelParallel(")
    assert plan == TWO_TABLES
    assert "EmbeddingBagCollectionAwaitable" in output
    assert shape == [2, 128]


def sized_tables() -> list[rayrec.torchrec.EmbeddingBagConfig]:
    return [
        rayrec.torchrec.EmbeddingBagConfig(
            name=f"{size}_table_{i}",
            embedding_dim=64,
            num_embeddings=rows,
            feature_names=[f"{size}_table_feature_{i}"],
            pooling=rayrec.torchrec.PoolingType.SUM,
        )
        for size, rows in (("large", 4096), ("small", 1024))
        for i in range(2)
    ]


def one_rank(pg: dist.ProcessGroup, constraints: dict[str, ParameterConstraints]) -> tuple[str, str]:
    """What each process of the notebook does."""
    module = rayrec.torchrec.EmbeddingBagCollection(device="cpu", tables=sized_tables())
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=pg.size(), compute_device="cpu"), constraints=constraints
    )
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    plan = planner.collective_plan(module, sharders, pg)
    model = DistributedModelParallel(
        module, env=ShardingEnv.from_process_group(pg), plan=plan, sharders=sharders, device=CPU
    )
    return f"{plan}", str(model.plan)


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_the_notebook_shards_four_tables_over_two_ranks(kind: ShardingType) -> None:
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=[kind.value], compute_kernels=[EmbeddingComputeKernel.BATCHED_FUSED.value]
        )
        for table in sized_tables()
    }
    (plan, own), (plan_1, own_1) = on_ranks(2, one_rank, constraints)
    assert plan == own == plan_1 == own_1
    rows = [re.split(r"\s*\|\s*", line.strip()) for line in plan.splitlines() if " | " in line]
    ranks = {row[0]: row[3] for row in rows if row[1] == kind.value and row[2] == "fused"}
    assert set(ranks) == {table.name for table in sized_tables()}
    if kind is ShardingType.ROW_WISE:
        assert set(ranks.values()) == {"[0, 1]"}
        assert ["large_table_1", "[2048, 0]", "[2048, 64]", "rank:1/cpu"] in rows
        assert ["small_table_0", "[512, 0]", "[512, 64]", "rank:1/cpu"] in rows
    else:  # each rank has one table of each size
        assert {ranks["large_table_0"], ranks["large_table_1"]} == {"[0]", "[1]"}
        assert {ranks["small_table_0"], ranks["small_table_1"]} == {"[0]", "[1]"}


def test_older_names_of_kernels_mean_the_same() -> None:
    Kernel = EmbeddingComputeKernel
    assert Kernel.BATCHED_FUSED is Kernel.FUSED and Kernel("batched_fused") is Kernel.FUSED
    assert Kernel("batched_fused_uvm_caching") is Kernel.FUSED_UVM_CACHING


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("sparse.jagged_tensor", ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]),
        ("modules.embedding_configs", ["EmbeddingBagConfig", "EmbeddingConfig", "PoolingType", "DataType"]),
        ("modules.embedding_modules", ["EmbeddingBagCollection", "EmbeddingCollection"]),
        ("modules.crossnet", ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"]),
        ("modules.mlp", ["MLP"]),
        ("optim.keyed", ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper"]),
        ("optim.optimizers", ["in_backward_optimizer_filter"]),
        ("optim.apply_optimizer_in_backward", ["apply_optimizer_in_backward"]),
        ("optim.warmup", ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]),
        ("optim.clipping", ["GradientClipping", "GradientClippingOptimizer"]),
        ("distributed.types", ["ShardingEnv", "ShardingPlan", "ShardingType", "ParameterSharding", "ModuleSharder"]),
        ("distributed.embedding_types", ["EmbeddingComputeKernel"]),
        ("distributed.embeddingbag", ["EmbeddingBagCollectionSharder"]),
        ("distributed.planner", ["EmbeddingShardingPlanner", "Topology"]),
        ("distributed.planner.types", ["ParameterConstraints"]),
        ("distributed.model_parallel", ["DistributedModelParallel"]),
    ],
)
def test_names_are_found_where_the_tutorials_library_has_them(path: str, names: list[str]) -> None:
    module = importlib.import_module(f"rayrec.torchrec.{path}")
    assert all(hasattr(module, name) for name in names)


@pytest.mark.parametrize("package", [rayrec, rayrec.torchrec])
def test_every_public_name_can_be_loaded(package: Any) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        package.nothing_of_the_kind  # noqa: B018
