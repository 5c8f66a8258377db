"""A save and a resume by torch.distributed.checkpoint, of what one rank of a fake world holds."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.utils import _pytree as pytree

from rayrec.distributed import DistributedModelParallel


class OneRank(DefaultSavePlanner):
    """Does not ask whether all shards are saved: the other ranks are not there."""

    def create_global_plan(self, all_plans: Any) -> Any:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


def save_spoil_and_load(model: DistributedModelParallel, dense: torch.optim.Optimizer) -> int:
    """Returns how many tensors came back as they were saved, on the device that they had.

    Raises:
        AssertionError: one did not.
    """
    state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict(), "dense": dense.state_dict()}
    before = [(tensor.device, tensor.detach().clone()) for tensor in local_tensors(state)]
    assert all(device.type == "cuda" or tensor.dim() == 0 for device, tensor in before)
    with tempfile.TemporaryDirectory(prefix="dryrun-") as folder:
        dcp.save(state, checkpoint_id=folder, planner=OneRank(), no_dist=True)
        for tensor in local_tensors(state):
            if tensor.is_floating_point():
                tensor.detach().add_(1)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["fused"])
    dense.load_state_dict(state["dense"])
    again = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict(), "dense": dense.state_dict()}
    for (device, wanted), found in zip(before, local_tensors(again), strict=True):
        assert found.device == device and torch.equal(found, wanted)
    return len(before)


def local_tensors(state: Any) -> list[torch.Tensor]:
    """What of a state this rank holds."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(state):
        if isinstance(leaf, ShardedTensor):
            found += [shard.tensor for shard in leaf.local_shards()]
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found
