"""TorchRec's side of `bench_embedding.py`: the same tables under the same plan. Nothing of rayrec is imported here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv


def sharded_collection(
    tables: Sequence[tuple[str, str, str]], rows: int, dim: int, pooled: bool, fused: Mapping[str, Any]
) -> Any:
    """A sharded collection of equal tables.

    Args:
        tables: (table, feature, sharding type) of each.
        pooled: bags; else a vector an id.
    """
    world = dist.get_world_size()
    config = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    configs = [
        config(name=table, num_embeddings=rows, embedding_dim=dim, feature_names=[feature])
        for table, feature, _ in tables
    ]
    kind = torchrec.EmbeddingBagCollection if pooled else torchrec.EmbeddingCollection
    collection = kind(device=torch.device("meta"), tables=configs)
    make = {
        "table_wise": lambda n: plans.table_wise(rank=n % world, compute_kernel="fused"),
        "column_wise": lambda n: plans.column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "row_wise": lambda n: plans.row_wise(compute_kernel="fused"),
        "data_parallel": lambda n: plans.data_parallel(),
    }
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(fused_params=dict(fused))
    plan = plans.construct_module_sharding_plan(
        collection,
        {table: make[how](n) for n, (table, _, how) in enumerate(tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    return sharder.shard(collection, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))


def keyed_jagged(keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor) -> Any:
    return torchrec.KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths)
