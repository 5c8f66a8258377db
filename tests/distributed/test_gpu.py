"""The same equality on a GPU: NCCL, a world of one, every sharding type, weights in device memory and in UVM.

The CPU stands in where there is no GPU, with gloo and the one kernel it has, so that the test itself is always run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import CacheParams, EmbeddingBagCollectionSharder, ShardingEnv, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from tests.device import PRETENDED, alone_on_gpu
from tests.distributed.oracle import ADAGRAD, cut, draw_kjt, make_dense_optimizer, make_optimizer, targets, train_plain
from tests.ranks import on_ranks
from tests.torchrec import test_feature_processor as position_weights

TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=50, embedding_dim=16, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="b", num_embeddings=30, embedding_dim=32, feature_names=["f3"], pooling=PoolingType.MEAN),
]
KERNELS = ["fused", "fused_uvm", "fused_uvm_caching", "dense"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def nccl() -> Iterator[dist.ProcessGroup]:
    with alone_on_gpu("nccl") as group:
        yield group


def check(group: dist.ProcessGroup, kind: ShardingType, kernel: str, device: str) -> None:
    """Three steps on the device equal three plain steps on the CPU."""
    place = torch.device(device)
    ranks: Any = [[0]] if kind is ShardingType.GRID_SHARD else [0]
    plan = {
        t.name: replace(
            cut(t, kind, ranks, kernel),
            device=place.type,
            cache_params=CacheParams(load_factor=0.5) if kernel == "fused_uvm_caching" else None,
        )
        for t in TABLES
    }
    generator = torch.Generator().manual_seed(1)
    steps = [[draw_kjt(generator, TABLES, 7, 4)] for _ in range(3)]
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    outputs, weights = train_plain(ebc, steps, ADAGRAD)
    sharded = EmbeddingBagCollectionSharder(ADAGRAD).shard(ebc, plan, ShardingEnv.from_process_group(group), place)
    dense = make_dense_optimizer(sharded, partial(make_optimizer, fused_params=ADAGRAD))
    for (batch,), expected in zip(steps, outputs, strict=True):
        dense.zero_grad()
        kt = sharded(batch.to(place)).wait()
        torch.testing.assert_close(kt.values().detach().cpu(), expected, atol=1e-5, rtol=1e-5)
        factors = kt.to("cpu")
        targets(factors).mean().backward()
        dense.step()
    for held in sharded.kernels():
        held.weights()  # a cache is written back
    for name, table in sharded.tables().items():
        (item,) = table.local
        expected = weights[f"embedding_bags.{name}.weight"]
        torch.testing.assert_close(item.weight.cpu(), expected, atol=1e-5, rtol=1e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_a_gpu_equals_one_plain_process(nccl: dist.ProcessGroup, kind: ShardingType, kernel: str) -> None:
    if kind is ShardingType.DATA_PARALLEL and kernel.startswith("fused_uvm"):
        pytest.skip("replicated tables lie in device memory")
    check(nccl, kind, kernel, "cuda:0")


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_a_rank_alone_equals_one_plain_process(kind: ShardingType, kernel: str) -> None:
    on_ranks(1, check, kind, kernel, "cuda:0" if PRETENDED else "cpu")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["table_wise", "row_wise", "data_parallel", "mixed"])
def test_position_weights_train_without_nodes_of_the_host(nccl: dist.ProcessGroup, name: str) -> None:
    expected, outputs = position_weights.train_alone(1)
    weights, seen = position_weights.train_on_rank(nccl, position_weights.plans(1)[name], torch.device("cuda", 0))
    for found, whole in zip(seen, outputs, strict=True):
        torch.testing.assert_close(found.cpu(), whole, atol=1e-5, rtol=1e-4)
    for feature, weight in weights.items():
        torch.testing.assert_close(weight.cpu(), expected[feature], atol=1e-5, rtol=1e-4)


@needs_gpu
@pytest.mark.gpu
def test_ids_copied_into_a_tensor_on_a_gpu_are_those_looked_up(nccl: dist.ProcessGroup) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    plan = {"t": cut(table, ShardingType.TABLE_WISE, [0])}
    ebc = EmbeddingBagCollection([table], seed=1)
    weight = ebc.embedding_bags["t"].weight.detach().clone()
    device = torch.device("cuda:0")
    sharded = EmbeddingBagCollectionSharder(ADAGRAD).shard(ebc, plan, ShardingEnv.from_process_group(nccl), device)

    def ids(*values: int) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f"], torch.tensor(values), lengths=torch.ones(3, dtype=torch.int64))

    static = ids(1, 2, 3).to(device)
    static.copy_(ids(4, 5, 6))
    torch.testing.assert_close(sharded(static).wait().values().detach().cpu(), weight[[4, 5, 6]])
    static.values().add_(1)
    torch.testing.assert_close(sharded(static).wait().values().detach().cpu(), weight[[5, 6, 7]])
