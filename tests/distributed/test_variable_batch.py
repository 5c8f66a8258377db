"""A batch size that varies by key: each example's list is found by the inverse indices, sharded or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import (
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ShardingEnv,
    ShardingType,
    comm,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import by_message, cut
from tests.ranks import on_ranks

TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=8, feature_names=["f1"]),
    EmbeddingBagConfig(name="b", num_embeddings=20, embedding_dim=8, feature_names=["f2"], pooling=PoolingType.MEAN),
]


def batch(inverse: bool = True) -> KeyedJaggedTensor:
    """Two lists of f1 and three of f2 stand for four examples."""
    return KeyedJaggedTensor(
        ["f1", "f2"],
        torch.tensor([1, 2, 3, 4, 5, 6, 19]),
        lengths=torch.tensor([2, 1, 0, 3, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f1", "f2"], torch.tensor([[0, 1, 1, 0], [2, 0, 1, 1]])) if inverse else None,
    )


def look_up(group: dist.ProcessGroup, plan: ModuleSharding, inverse: bool) -> Any:
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)
    try:
        return sharded(batch(inverse)).wait().values().detach()
    except ValueError as error:
        return str(error)


def test_sharded_equals_unsharded() -> None:
    expected = EmbeddingBagCollection(TABLES, seed=1)(batch()).values()
    assert expected.shape == (4, 16)
    for kind, ranks in [(ShardingType.ROW_WISE, [0, 1]), (ShardingType.DATA_PARALLEL, [0, 1])]:
        plan = {table.name: cut(table, kind, ranks) for table in TABLES}
        for output in on_ranks(2, look_up, plan, True):
            torch.testing.assert_close(output, expected)


def test_without_inverse_indices_every_rank_gets_the_error() -> None:
    plan = {table.name: cut(table, ShardingType.ROW_WISE, [0, 1]) for table in TABLES}
    errors = on_ranks(2, look_up, plan, False)
    assert all("give inverse_indices" in error for error in errors)


def train(group: dist.ProcessGroup, plan: ModuleSharding) -> Any:
    """A step on batches that differ by rank; this rank's shards afterwards."""
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0})
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)
    sharded(batch() if group.rank() else batch().expanded()).wait().values().square().sum().backward()
    return [(item.shard, item.weight.clone()) for table in sharded.tables().values() for item in table.local]


@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL])
def test_training_equals_that_on_the_expanded_batch(kind: ShardingType) -> None:
    """One rank brings distinct lists, the other one every example."""
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    ebc(batch()).values().square().sum().backward()
    for shards in on_ranks(2, train, {table.name: cut(table, kind, [0, 1]) for table in TABLES}):
        for shard, weight in shards:
            table = ebc.embedding_bags[shard.table].weight
            expected = (table - table.grad)[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
            torch.testing.assert_close(weight, expected.detach())


def bytes_received(group: dist.ProcessGroup, expanded: bool) -> int:
    """Of a lookup of 200 examples, for which three lists stand."""
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    plan = {table.name: cut(table, ShardingType.ROW_WISE, [0, 1]) for table in TABLES}
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)
    kjt = KeyedJaggedTensor(
        ["f1", "f2"],
        torch.arange(9),
        lengths=torch.tensor([2, 1, 0, 3, 3]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f1", "f2"], torch.stack([torch.arange(200) % 2, torch.arange(200) % 3])),
    )
    received, exchange = [], comm.all_to_all

    def counted(output: torch.Tensor, *args: Any) -> Any:
        received.append(output.nbytes)
        return exchange(output, *args)

    with by_message(), mock.patch.object(comm, "all_to_all", counted):
        sharded(kjt.expanded() if expanded else kjt).wait()
    return sum(received)


def test_only_distinct_lists_travel() -> None:
    whole, distinct = (on_ranks(2, bytes_received, expanded)[0] for expanded in (True, False))
    assert distinct * 20 < whole
