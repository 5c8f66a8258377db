"""Averages gradient rows over replicas before each update.

For a nonlinear optimizer, the mean of the states after local steps is not the state after one step on the mean
gradient. So with synchronization in every step, replicas exchange the gradients of the touched rows, and each applies
the same update to the same rows. Replicas stay bit-identical, and training is equivalent to one process on the global
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.kernel.rows import DistinctRows, exchange_rows
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.replicas.env import ShardingEnv2D


class Replicas:
    """The ranks with the same shards, one per group.

    Args:
        group: process group of the replicas.
        every_step: whether gradient rows are averaged before each update; else each group trains alone for some steps.
    """

    def __init__(self, group: comm.Group, every_step: bool) -> None:
        self.group, self.every_step = group, every_step

    def __repr__(self) -> str:
        return f"Replicas(every_step={self.every_step})"

    def mean(self, rows: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows that any replica's batch touched, and their gradients averaged over replicas.

        Two exchanges: numbers of rows, and 8 bytes and a float32 gradient per row to every other replica.

        Args:
            rows: int64 `[n]`, distinct.
            grads: `[n, D]`.
        """
        assert self.group is not None
        size = self.group.size()
        counts = comm.all_gather(torch.tensor([len(rows)], device=rows.device), self.group).tolist()
        ((all_rows, all_grads),) = exchange_rows([rows], [grads.float()], counts, self.group)
        groups = DistinctRows.of(all_rows)
        return groups.distinct, groups.sum(all_grads).div_(size)


def with_replicas(
    optimizers: Mapping[str, OptimizerSpec | None], params: ModuleSharding, env: ShardingEnv
) -> dict[str, OptimizerSpec | None]:
    """Each table's optimizer, with its replicas. Data-parallel tables are small, and averaged in every step."""
    if not isinstance(env, ShardingEnv2D):
        return dict(optimizers)
    shared = Replicas(env.replica_pg, env.every_step)
    always = shared if env.every_step else Replicas(env.replica_pg, every_step=True)
    return {
        name: spec
        if spec is None or spec.frozen
        else replace(spec, replicas=always if params[name].replicated else shared)
        for name, spec in optimizers.items()
    }


def mean_gradient(grad: torch.Tensor, group: comm.Group) -> torch.Tensor:
    """The mean of a parameter's gradient over replicas: a gradient hook for tables of a dense optimizer."""
    assert group is not None
    return comm.all_reduce(grad.contiguous().clone(), group).div_(group.size())


def same_weights(weight: torch.Tensor, env: ShardingEnv) -> None:
    """Copies the weight of the first group to every replica."""
    if isinstance(env, ShardingEnv2D):
        source: Any = comm.broadcast(weight.contiguous(), env.replica_pg)
        weight.copy_(source)
