"""Sharded tables obey the optimizer they were given, either way it is given, and train as the plain optimizers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, EmbOptimType, ModuleSharding, ShardingEnv, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.optim import apply_optimizer_in_backward
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad
from tests.distributed.oracle import cut, draw_kjt, join, targets
from tests.ranks import on_ranks

# a plain optimizer, its settings, and the same as fused_params
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "eps": 1e-6},
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6},
    ),
    "rowwise_adagrad": (
        RowWiseAdagrad,
        {"lr": 0.1, "eps": 1e-6},
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6},
    ),
    "partial_rowwise_adam": (
        PartialRowWiseAdam,
        {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1},
        {
            "optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM,
            "learning_rate": 0.05,
            "beta1": 0.8,
            "beta2": 0.95,
            "weight_decay": 0.1,
        },
    ),
    "lamb": (LAMB, {"lr": 0.05}, {"optimizer": EmbOptimType.LAMB, "learning_rate": 0.05}),
    "partial_rowwise_lamb": (
        PartialRowWiseLAMB,
        {"lr": 0.05, "weight_decay": 0.1},
        {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB, "learning_rate": 0.05, "weight_decay": 0.1},
    ),
    "lars": (
        LarsSGD,
        {"lr": 5.0, "eta": 0.01, "momentum": 0.5},
        {"optimizer": EmbOptimType.LARS_SGD, "learning_rate": 5.0, "eta": 0.01, "momentum": 0.5},
    ),
}


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="u", num_embeddings=7, embedding_dim=4, feature_names=["c"]),
    ]


def steps(world: int) -> list[list[KeyedJaggedTensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[draw_kjt(generator, tables(), 4, 3) for _ in range(world)] for _ in range(4)]


def plain(name: str, world: int) -> dict[str, torch.Tensor]:
    kind, settings, _ = CASES[name]
    ebc = EmbeddingBagCollection(tables(), seed=6)
    optimizer = kind(ebc.parameters(), **settings)
    for parts in steps(world):
        optimizer.zero_grad()
        targets(ebc(join(parts))).mean().backward()
        optimizer.step()
    return {config.name: ebc.embedding_bags[config.name].weight.detach() for config in tables()}


def sharded(group: dist.ProcessGroup, name: str, plan: ModuleSharding, applied: bool) -> list[Any]:
    kind, settings, fused_params = CASES[name]
    ebc = EmbeddingBagCollection(tables(), seed=6)
    if applied:
        apply_optimizer_in_backward(kind, ebc.parameters(), settings)
    sharder = EmbeddingBagCollectionSharder(None if applied else fused_params)
    model = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    for parts in steps(group.size()):
        targets(model(parts[group.rank()]).wait()).mean().backward()
    return [(item.shard, item.weight.clone()) for table in model.tables().values() for item in table.local]


@pytest.mark.parametrize("applied", [False, True], ids=["fused_params", "applied"])
@pytest.mark.parametrize("name", list(CASES))
def test_sharded_tables_train_as_the_plain_optimizer(name: str, applied: bool) -> None:
    """Row-wise and replicated, whose rows get gradients from both ranks."""
    kinds = [ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL]
    plan = {table.name: cut(table, kind, [0, 1]) for table, kind in zip(tables(), kinds, strict=True)}
    expected = plain(name, 2)
    for pieces in on_ranks(2, sharded, name, plan, applied):
        for shard, piece in pieces:
            rows, cols = shard.rows, shard.cols
            part = expected[shard.table][rows.start : rows.stop, cols.start : cols.stop]
            torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-4)
