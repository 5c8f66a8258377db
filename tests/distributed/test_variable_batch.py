"""A batch size that varies by key: each example's list is found by the inverse indices, sharded or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, ShardingEnv
from rayrec.distributed.types import ModuleSharding, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut
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
    sharded = EmbeddingBagCollectionSharder().shard(
        ebc, plan, ShardingEnv.from_process_group(group), torch.device("cpu")
    )
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
