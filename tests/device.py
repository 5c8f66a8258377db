"""Where sharded tables are tested: on the CPU, a pretended GPU (`RAYREC_PRETEND_GPUS=1`, see `tests/dryrun`), or the
first GPU of the machine, which all ranks share (`RAYREC_TEST_GPU=1`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing
from torch.utils import _pytree as pytree

PRETENDED = bool(os.environ.get("RAYREC_PRETEND_GPUS"))
ON_GPU = bool(os.environ.get("RAYREC_TEST_GPU"))
DEVICE = torch.device("cuda", 0) if PRETENDED or ON_GPU else torch.device("cpu")


def use_gpu() -> None:
    """From here on this process computes on the GPU: inputs of sharded modules are moved to it, and what it found is
    compared with what tests computed on the CPU."""
    torch.cuda.set_device(DEVICE)
    move_inputs()
    close, equal = torch.testing.assert_close, torch.equal
    torch.testing.assert_close = lambda a, b, **settings: close(on_host(a), on_host(b), **settings)
    torch.equal = lambda a, b: equal(a, b) if a.device == b.device else equal(a.cpu(), b.cpu())


def move_inputs() -> None:
    """The inputs of all sharded modules are moved to the device."""
    from rayrec import distributed

    for cls in (
        distributed.ShardedEmbeddingBagCollection,
        distributed.ShardedEmbeddingCollection,
        distributed.DistributedModelParallel,
    ):
        _move_inputs_of(cls)


def _move_inputs_of(cls: Any) -> None:
    forward = cls.forward

    def moved(self: Any, *args: Any) -> Any:
        return forward(self, *(a.to(DEVICE) if hasattr(a, "to") else a for a in args))

    cls.forward = moved


@contextmanager
def alone_on_gpu(backend: str) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, on the first GPU."""
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        dist.destroy_process_group()


def on_host(item: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), item)


def drawn(examples: int) -> int:
    """How many problems a property is tried on: fewer on a GPU, as the CPU's run tries it, too."""
    return examples // 5 if DEVICE.type == "cuda" else examples


def exchanges(on_cpus: int) -> dict[str, int]:
    """What a step costs on the device, and on its hosts, that costs so many exchanges on CPU ranks.

    For GPUs sizes are known before ids leave: these never take two exchanges, and none where there are no ids.
    """
    if DEVICE.type == "cpu":
        return {"all_to_all": on_cpus}
    return {"exchange_on_hosts": 1} | ({"all_to_all": on_cpus - (on_cpus % 2 == 0)} if on_cpus > 1 else {})
