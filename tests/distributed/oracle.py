"""The unsharded module as the oracle: the same tables, batches and optimizer, in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    Codec,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.vectors import pooled_in_place
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.optim import in_backward_optimizer_filter
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor
from tests.device import DEVICE

SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
# Without an eps far above rounding, a gradient of 1e-7, whose sign is chance, moves its weight by the learning rate.
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 0.01}
ROWWISE = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 0.01}


def cut(table: BaseEmbeddingConfig, kind: ShardingType, ranks: Any, kernel: str = "fused") -> ParameterSharding:
    """The table cut in the given way over the given ranks (lists of ranks for a grid)."""
    shards = CUTS[kind](table.name, table.num_embeddings, table.embedding_dim, ranks)
    return ParameterSharding(sharding_type=kind.value, compute_kernel=kernel, shards=shards)


def by_message() -> AbstractContextManager[Any]:
    """Pooled vectors travel as messages, as between GPUs or hosts, in collections that are first called in here."""
    return mock.patch.object(pooled_in_place.InPlaceColumns, "link", None)


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def draw_kjt(
    generator: torch.Generator,
    tables: Sequence[EmbeddingBagConfig],
    batch: int,
    longest: int,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """A batch with bags of 0 to `longest` ids."""
    rows = {f: min(t.num_embeddings for t in tables if f in t.feature_names) for t in tables for f in t.feature_names}
    lengths = [torch.randint(0, longest + 1, (batch,), generator=generator) for _ in rows]
    values = [
        torch.randint(0, count, (int(length.sum()),), generator=generator)
        for count, length in zip(rows.values(), lengths, strict=True)
    ]
    flat = torch.cat(values)
    return KeyedJaggedTensor(
        keys=list(rows),
        values=flat,
        lengths=torch.cat(lengths),
        weights=torch.rand(flat.numel(), generator=generator) + 0.5 if weighted else None,
        stride=batch,
    )


def join(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The global batch: the ranks' examples one after the other."""
    keys = batches[0].keys()
    parts = [[kjt[key] for kjt in batches] for key in keys]
    weighted = batches[0].weights_or_none() is not None
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([jt.values() for jts in parts for jt in jts]),
        lengths=torch.cat([jt.lengths() for jts in parts for jt in jts]),
        weights=torch.cat([jt.weights() for jts in parts for jt in jts]) if weighted else None,
        stride=sum(kjt.stride() for kjt in batches),
    )


def targets(kt: KeyedTensor) -> torch.Tensor:
    """A loss for each example that gives every column another gradient."""
    values = kt.values()
    factors = torch.linspace(-1, 1, values.shape[1], device=values.device)
    return ((values * factors).sum(1) - 0.3).square() + values.sum(1)


class NoOptimizer:
    """Of no parameters."""

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


def make_dense_optimizer(module: nn.Module, make: MakeOptimizer) -> Any:
    """What trains the tables that backward does not."""
    left = [param for _, param in in_backward_optimizer_filter(module.named_parameters())]
    return make(left) if left else NoOptimizer()


def make_optimizer(params: list[torch.nn.Parameter], fused_params: dict[str, Any]) -> torch.optim.Optimizer:
    """The plain twin of a fused optimizer (elementwise ones)."""
    lr, eps = fused_params.get("learning_rate", 0.01), fused_params.get("eps", 1e-8)
    match fused_params.get("optimizer", EmbOptimType.EXACT_SGD):
        case EmbOptimType.EXACT_SGD:
            return torch.optim.SGD(params, lr=lr)
        case EmbOptimType.EXACT_ADAGRAD:
            return torch.optim.Adagrad(params, lr=lr, eps=eps)
        case EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            return PlainRowWiseAdagrad(params, lr=lr, eps=eps)
    raise ValueError(fused_params)


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """Dense row-wise Adagrad."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                total = self.state[param].setdefault("sum", torch.zeros(param.shape[0], device=param.device))
                total += param.grad.square().mean(1)
                param -= group["lr"] * param.grad / (total.sqrt() + group["eps"])[:, None]


def train_plain(
    ebc: EmbeddingBagCollection,
    steps: Sequence[Sequence[KeyedJaggedTensor]],
    fused_params: dict[str, Any],
    make: MakeOptimizer | None = None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of each step and the weights afterwards, in one process on the global batches."""
    ebc = copy.deepcopy(ebc)
    make = make or partial(make_optimizer, fused_params=fused_params)
    optimizer = make(list(ebc.parameters()))
    outputs = []
    for batches in steps:
        kt = ebc(join(batches))
        outputs.append(kt.values().detach())
        optimizer.zero_grad()
        targets(kt).mean().backward()
        optimizer.step()
    return outputs, {name: value.detach() for name, value in ebc.state_dict().items()}


def train_sharded(
    group: dist.ProcessGroup,
    ebc: EmbeddingBagCollection,
    plan: ModuleSharding,
    steps: Sequence[Sequence[KeyedJaggedTensor]],
    fused_params: dict[str, Any],
    codec: Codec | None = None,
    dedup: bool = False,
    make: MakeOptimizer | None = None,
    local_world_size: int | None = None,
) -> tuple[list[torch.Tensor], dict[str, list[tuple[Any, torch.Tensor]]]]:
    """On one rank: outputs of each step for its own examples, and its shards of every table afterwards.

    Tables with a dense kernel are trained by `make`'s optimizer, by default the plain twin of the fused one.
    """
    sharder = EmbeddingBagCollectionSharder(fused_params, codec=codec, dedup=dedup)
    env = ShardingEnv.from_process_group(group, local_world_size)
    sharded = sharder.shard(ebc, plan, env, DEVICE)
    dense = make_dense_optimizer(sharded, make or partial(make_optimizer, fused_params=fused_params))
    outputs = []
    for batches in steps:
        kt = sharded(batches[group.rank()]).wait()
        outputs.append(kt.values().detach())
        total = sum(kjt.stride() for kjt in batches)
        dense.zero_grad()
        (targets(kt).sum() * group.size() / total).backward()
        dense.step()
    shards = {
        f"embedding_bags.{name}.weight": [(item.shard, item.weight.clone()) for item in table.local]
        for name, table in sharded.tables().items()
    }
    return outputs, shards


ALL = list(ShardingType)
