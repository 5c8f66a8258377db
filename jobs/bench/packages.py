"""Sharded collections and a DLRM from "rayrec.torchrec" or "torchrec": the same code runs on both packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # dense, ids, lengths, labels
FUSED = {"learning_rate": 0.01}


@dataclass(frozen=True)
class Tables:
    """Equal tables with one feature each.

    Args:
        kinds: sharding type of each table; table-wise tables go to the ranks in turn.
        pooled: an `EmbeddingBagCollection`; otherwise an `EmbeddingCollection`.
    """

    kinds: tuple[str, ...]
    rows: int
    dim: int
    pooled: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def keys(self) -> list[str]:
        return [f"f{n}" for n in range(len(self.kinds))]


def sharded(package: str, tables: Tables) -> Any:
    """A sharded collection."""
    types = importlib.import_module(f"{package}.distributed.types")
    collection, plan, sharder = _planned(package, tables)
    return sharder.shard(collection, plan, types.ShardingEnv.from_process_group(dist.group.WORLD), tables.device)


def dlrm(package: str, tables: Tables, dense: int, bottom: Sequence[int], top: Sequence[int]) -> tuple[nn.Module, Any]:
    """A sharded DLRMTrain with Adagrad for its dense part. Both packages start from the same weights."""
    distributed = importlib.import_module(f"{package}.distributed")
    models = importlib.import_module(f"{package}.models.dlrm")
    types = importlib.import_module(f"{package}.distributed.types")
    torch.manual_seed(0)
    collection, plan, sharder = _planned(package, tables)
    model = models.DLRMTrain(models.DLRM(collection, dense, list(bottom), list(top), dense_device=tables.device))
    model_plan = types.ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan})
    parallel = distributed.DistributedModelParallel(model, device=tables.device, plan=model_plan, sharders=[sharder])
    params = [param for name, param in parallel.named_parameters() if "embedding_bags" not in name]
    return parallel, torch.optim.Adagrad(params, lr=0.01)


def dlrm_step(package: str, model: nn.Module, optimizer: Any, tables: Tables) -> Callable[[Arrays], None]:
    """A training step: forward, loss, backward with the tables' update, the dense optimizer."""
    batch = batches(package, tables)

    def step(arrays: Arrays) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss, _ = model(batch(arrays).to(tables.device))
        loss.backward()
        optimizer.step()

    return step


def batches(package: str, tables: Tables) -> Callable[[Arrays], Any]:
    """A function that makes a batch of the package's own class, on the host."""
    top, keys = importlib.import_module(package), tables.keys
    batch_class = importlib.import_module(f"{package}.datasets.utils").Batch

    def batch(arrays: Arrays) -> Any:
        dense, ids, lengths, label = arrays
        return batch_class(dense, top.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths), label)

    return batch


def _planned(package: str, tables: Tables) -> tuple[Any, Any, Any]:
    """A collection on the meta device, its plan, and its sharder."""
    top = importlib.import_module(package)
    plans = importlib.import_module(f"{package}.distributed.sharding_plan")
    kind = "EmbeddingBagCollection" if tables.pooled else "EmbeddingCollection"
    module = importlib.import_module(f"{package}.distributed.{'embeddingbag' if tables.pooled else 'embedding'}")
    table_config = top.EmbeddingBagConfig if tables.pooled else top.EmbeddingConfig
    optimizer = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    configs = [
        table_config(name=f"t{n}", num_embeddings=tables.rows, embedding_dim=tables.dim, feature_names=[key])
        for n, key in enumerate(tables.keys)
    ]
    collection = getattr(top, kind)(device=torch.device("meta"), tables=configs)
    sharder = getattr(module, f"{kind}Sharder")(fused_params={"optimizer": optimizer, **FUSED})
    world = dist.get_world_size()
    make: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda n: plans.table_wise(rank=n % world, compute_kernel="fused"),
        "row_wise": lambda n: plans.row_wise(compute_kernel="fused"),
        "column_wise": lambda n: plans.column_wise(ranks=list(range(world)), compute_kernel="fused"),
        "data_parallel": lambda n: plans.data_parallel(),
    }
    plan = plans.construct_module_sharding_plan(
        collection,
        {f"t{n}": make[sharding_type](n) for n, sharding_type in enumerate(tables.kinds)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type=tables.device.type,
    )
    return collection, plan, sharder
