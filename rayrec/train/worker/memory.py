"""Out-of-memory errors, reported with what had used the memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch

from rayrec._runtime.cgroup_limits import available_bytes, memory_bytes
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.train.errors import TrainError
from rayrec.train.worker.learner import Learner

_MOST_TABLES = 5
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch's error of it has no type of its own


class OutOfMemory(TrainError):
    """A rank's GPU, or its host, has no more memory; the message names what took it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's memory ran out. Decides the message, never whether to retry."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and _CPU_ALLOCATOR in str(error)


def what_took_memory(learner: Learner, device: torch.device) -> str:
    """One line on a rank's memory: its shards of the largest tables with their optimizer states, the dense part with
    its optimizer's, and all that the process holds beside them."""
    tables = {
        name: sum(_bytes([shard.parameter, *shard.state.values()]) for shard in table.local)
        for name, table in learner.model.tables().items()
    }
    moments = (value for state in learner.optimizer.state.values() for value in state.values())
    dense = _bytes(learner.model.other_parameters().values()) + _bytes(moments)
    largest = sorted(tables, key=tables.__getitem__, reverse=True)[:_MOST_TABLES]
    named = ", ".join(f"{name} {human_bytes(tables[name])}" for name in largest)
    here = sum(tables.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        where = f"its GPU has {human_bytes(free)} of {human_bytes(total)} free"
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        where = f"its host has {human_bytes(available_bytes())} of {human_bytes(memory_bytes())} free"
    rest = max(0, held - here - dense)
    return (
        f"{len(tables)} tables with their optimizer states hold {human_bytes(here)} ({named}), the dense part with its "
        f"optimizer's {human_bytes(dense)}, batches, activations and all else {human_bytes(rest)}; {where}"
    )


def out_of_memory(error: BaseException, learner: Learner | None, device: torch.device, rank: int) -> OutOfMemory:
    """The error that a user sees.

    Args:
        learner: None where the model was still being made.
    """
    took = "the model was being made" if learner is None else what_took_memory(learner, device)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return OutOfMemory(
        f"rank {rank} is out of memory: {took}. A smaller trainer.batch_size, trainer.micro_batches or more "
        f"workers take less. ({first})"
    )


def _bytes(values: Iterable[object]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
