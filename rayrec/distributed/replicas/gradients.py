"""Every step's update as one of all groups: gradient rows meet those of the replicas before the optimizer sees them.

A nonlinear optimizer's state after local steps has no mean that would be the state after one step on the mean gradient.
So with synchronisation every step it is the gradients of the touched rows that are exchanged, and each replica applies
the same update to the same rows: groups stay bit-identical, and are one training on the global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.executors.replicated import exchange_rows
from rayrec.distributed.kernel import OptimizerSpec, RowGroups
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.replicas.env import ShardingEnv2D


class Replicas:
    """The ranks with the same shards, one a group.

    Args:
        group: joins them.
        every_step: their gradient rows meet before each update; else each trains on its own for some steps.
    """

    def __init__(self, group: comm.Group, every_step: bool) -> None:
        self.group, self.every_step = group, every_step

    def __repr__(self) -> str:
        return f"Replicas(every_step={self.every_step})"

    def mean(self, rows: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct rows that any replica's batch touched, and their gradients averaged over replicas.

        Two exchanges: how many rows there are, and 8 bytes and a float32 gradient for each, to every other replica.

        Args:
            rows: int64 `[n]`, distinct.
            grads: `[n, D]`.
        """
        assert self.group is not None
        size = self.group.size()
        counts = comm.all_gather(torch.tensor([len(rows)], device=rows.device), self.group).tolist()
        ((all_rows, all_grads),) = exchange_rows([rows], [grads.float()], counts, self.group)
        groups = RowGroups.of(all_rows)
        return groups.distinct, groups.sum(all_grads).div_(size)


def with_replicas(
    optimizers: Mapping[str, OptimizerSpec | None], params: ModuleSharding, env: ShardingEnv
) -> dict[str, OptimizerSpec | None]:
    """Each table's update as the groups share it. Data-parallel tables, which are small, meet in every step."""
    if not isinstance(env, ShardingEnv2D):
        return dict(optimizers)
    shared = Replicas(env.replica_pg, env.every_step)
    always = shared if env.every_step else Replicas(env.replica_pg, every_step=True)
    return {
        name: spec and replace(spec, replicas=always if params[name].replicated else shared)
        for name, spec in optimizers.items()
    }


def meet_gradient(grad: torch.Tensor, group: comm.Group) -> torch.Tensor:
    """The mean over replicas of a parameter's whole gradient, as a hook of a table that a dense optimizer trains."""
    assert group is not None
    return comm.all_reduce(grad.contiguous().clone(), group).div_(group.size())


def same_weights(weight: torch.Tensor, env: ShardingEnv) -> None:
    """Gives every replica the first group's."""
    if isinstance(env, ShardingEnv2D):
        given: Any = comm.broadcast(weight.contiguous(), env.replica_pg)
        weight.copy_(given)
