"""Sharded bags and a whole DLRM by a package's name, "rayrec.torchrec" or "torchrec": both run the same lines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # dense, ids, lengths, labels
FUSED = {"learning_rate": 0.01}


@dataclass(frozen=True)
class Tables:
    """Equal tables, each with a feature of its own, all sharded alike; table-wise they are dealt out in turn."""

    count: int
    rows: int
    dim: int
    kind: str = "table_wise"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def keys(self) -> list[str]:
        return [f"f{n}" for n in range(self.count)]


def bags(package: str, tables: Tables) -> Any:
    """A sharded EmbeddingBagCollection."""
    types = importlib.import_module(f"{package}.distributed.types")
    collection, plan, sharder = _planned(package, tables)
    return sharder.shard(collection, plan, types.ShardingEnv.from_process_group(dist.group.WORLD), tables.device)


def dlrm(package: str, tables: Tables, dense: int, bottom: Sequence[int], top: Sequence[int]) -> tuple[nn.Module, Any]:
    """A sharded DLRMTrain, and Adagrad for its dense part; weights are the same for both packages."""
    distributed = importlib.import_module(f"{package}.distributed")
    models = importlib.import_module(f"{package}.models.dlrm")
    types = importlib.import_module(f"{package}.distributed.types")
    torch.manual_seed(0)
    collection, plan, sharder = _planned(package, tables)
    model = models.DLRMTrain(models.DLRM(collection, dense, list(bottom), list(top), dense_device=tables.device))
    whole = types.ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan})
    sharded = distributed.DistributedModelParallel(model, device=tables.device, plan=whole, sharders=[sharder])
    params = [param for name, param in sharded.named_parameters() if "embedding_bags" not in name]
    return sharded, torch.optim.Adagrad(params, lr=0.01)


def dlrm_step(package: str, model: nn.Module, optimizer: Any, tables: Tables) -> Callable[[Given], None]:
    """A training step: forward, loss, backward with the tables' update, the dense optimizer."""
    batch = batches(package, tables)

    def step(given: Given) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = model(batch(given).to(tables.device))
        loss.backward()
        optimizer.step()

    return step


def batches(package: str, tables: Tables) -> Callable[[Given], Any]:
    """Makes the package's own batch, on the host."""
    top, keys = importlib.import_module(package), tables.keys
    of = importlib.import_module(f"{package}.datasets.utils").Batch

    def batch(given: Given) -> Any:
        dense, ids, lengths, label = given
        return of(dense, top.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths), label)

    return batch


def _planned(package: str, tables: Tables) -> tuple[Any, Any, Any]:
    """A collection on no device, its plan, and its sharder."""
    top = importlib.import_module(package)
    plans = importlib.import_module(f"{package}.distributed.sharding_plan")
    sharders = importlib.import_module(f"{package}.distributed.embeddingbag")
    optimizer = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    configs = [
        top.EmbeddingBagConfig(name=f"t{n}", num_embeddings=tables.rows, embedding_dim=tables.dim, feature_names=[key])
        for n, key in enumerate(tables.keys)
    ]
    collection = top.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    sharder = sharders.EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, **FUSED})
    world = dist.get_world_size()
    make: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda n: plans.table_wise(rank=n % world, compute_kernel="fused"),
        "row_wise": lambda n: plans.row_wise(compute_kernel="fused"),
        "column_wise": lambda n: plans.column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "data_parallel": lambda n: plans.data_parallel(),
    }
    plan = plans.construct_module_sharding_plan(
        collection,
        {f"t{n}": make[tables.kind](n) for n in range(tables.count)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=tables.device.type,
    )
    return collection, plan, sharder
