"""The unsharded embedding collection as the oracle: the same tables, batches and optimizer, in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingCollectionSharder, EmbOptimType, ModuleSharding, ShardingEnv, comm
from rayrec.modules import EmbeddingCollection
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import MakeOptimizer, join, make_dense_optimizer, make_optimizer

Outputs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # vectors and lengths by name


def loss_sum(outputs: Any) -> torch.Tensor:
    """A sum over ids that gives every number another gradient, by feature and column."""
    total = torch.zeros(())
    for place, name in enumerate(outputs):
        values = outputs[name].values()
        factors = torch.linspace(-1, 1, values.shape[1], device=values.device) + 0.1 * place
        total = total + ((values * factors).sum(1) - 0.3).square().sum() + values.sum()
    return total


def plain(outputs: dict[str, JaggedTensor]) -> Outputs:
    return {name: (jt.values().detach(), jt.lengths()) for name, jt in outputs.items()}


class PlainAdam(torch.optim.Optimizer):
    """Adam on the rows that have a gradient, the others untouched, as fbgemm does it."""

    def __init__(self, params: list[torch.nn.Parameter], fused_params: dict[str, Any]) -> None:
        super().__init__(params, {"lr": fused_params["learning_rate"], "eps": fused_params["eps"]})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            first = state.setdefault("first", torch.zeros_like(param))
            second = state.setdefault("second", torch.zeros_like(param))
            rows = param.grad.any(1)
            grad = param.grad[rows]
            first[rows] = 0.9 * first[rows] + 0.1 * grad
            second[rows] = 0.999 * second[rows] + 0.001 * grad.square()
            root = (second[rows] / (1 - 0.999**self.steps)).sqrt() + self.defaults["eps"]
            param[rows] -= self.defaults["lr"] * first[rows] / (1 - 0.9**self.steps) / root


def plain_twin(params: list[torch.nn.Parameter], fused_params: dict[str, Any]) -> torch.optim.Optimizer:
    adam = fused_params.get("optimizer") is EmbOptimType.ADAM
    return PlainAdam(params, fused_params) if adam else make_optimizer(params, fused_params)


def train_plain(
    ec: EmbeddingCollection,
    steps: Sequence[Sequence[KeyedJaggedTensor]],
    fused_params: dict[str, Any],
    make: MakeOptimizer | None = None,
) -> tuple[list[Outputs], dict[str, torch.Tensor]]:
    """Outputs of each step and the weights afterwards, in one process on the global batches."""
    ec = copy.deepcopy(ec)
    optimizer = (make or partial(plain_twin, fused_params=fused_params))(list(ec.parameters()))
    outputs = []
    for batches in steps:
        out = ec(join(batches))
        outputs.append(plain(out))
        optimizer.zero_grad()
        (loss_sum(out) / sum(kjt.stride() for kjt in batches)).backward()
        optimizer.step()
    return outputs, {name: value.detach() for name, value in ec.state_dict().items()}


def train_sharded(
    group: dist.ProcessGroup,
    ec: EmbeddingCollection,
    plan: ModuleSharding,
    steps: Sequence[Sequence[KeyedJaggedTensor]],
    fused_params: dict[str, Any],
    dedup: bool | Literal["auto"] = False,
    make: MakeOptimizer | None = None,
) -> tuple[list[Outputs], dict[str, list[tuple[Any, torch.Tensor]]], list[dict[str, int]]]:
    """On one rank: outputs of each step for its own examples, its shards of every table afterwards, collectives.

    Tables with a dense kernel are trained by `make`'s optimizer, by default the plain twin of the fused one.
    """
    sharder = EmbeddingCollectionSharder(fused_params, dedup=dedup)
    sharded = sharder.shard(ec, plan, ShardingEnv.from_process_group(group), DEVICE)
    dense = make_dense_optimizer(sharded, make or partial(plain_twin, fused_params=fused_params))
    outputs, counts = [], []
    for batches in steps:
        dense.zero_grad()
        with comm.count_collectives() as counter:
            out = sharded(batches[group.rank()])
            total = sum(kjt.stride() for kjt in batches)
            (loss_sum(out) * group.size() / total).backward()
            dense.step()
        counts.append(dict(counter))
        outputs.append(plain(out.wait()))
    shards = {
        f"embeddings.{name}.weight": [(item.shard, item.weight.clone()) for item in table.local]
        for name, table in sharded.tables().items()
    }
    return outputs, shards, counts


def assert_equal(
    answers: Sequence[tuple[list[Outputs], dict[str, Any], Any]],
    expected: tuple[list[Outputs], dict[str, torch.Tensor]],
    atol: float = 1e-5,
) -> None:
    """Ranks' outputs, joined, and their shards are those of the plain process."""
    outputs, weights = expected
    for step, output in enumerate(outputs):
        assert all(list(answer[0][step]) == list(output) for answer in answers)  # names in the same order
        for name, pair in output.items():
            for which, value in enumerate(pair):
                joined = torch.cat([answer[0][step][name][which] for answer in answers])
                torch.testing.assert_close(joined, value, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for _, shards, _ in answers:
        for name, pieces in shards.items():
            for shard, piece in pieces:
                part = weights[name][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, part, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
