"""Out-of-memory errors, reported with the memory use of the rank."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch

from rayrec._runtime.cgroup_limits import available_bytes, memory_bytes
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.train.errors import TrainError
from rayrec.train.worker.learner import Learner

_MAX_TABLES = 5
# torch raises a plain RuntimeError that contains this name.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


class OutOfMemory(TrainError):
    """The memory of a rank's GPU or host ran out; the message lists its use."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device or host ran out. Affects only the message, never whether to retry."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and _CPU_ALLOCATOR in str(error)


def memory_use(learner: Learner, device: torch.device) -> str:
    """One line about a rank's memory: its shards of the largest tables and the dense part, both with optimizer state,
    and the rest of the process."""
    tables = {
        name: sum(_bytes([shard.parameter, *shard.state.values()]) for shard in table.local)
        for name, table in learner.model.tables().items()
    }
    moments = (value for state in learner.optimizer.state.values() for value in state.values())
    dense = _bytes(learner.model.other_parameters().values()) + _bytes(moments)
    largest = sorted(tables, key=tables.__getitem__, reverse=True)[:_MAX_TABLES]
    largest_text = ", ".join(f"{name} {human_bytes(tables[name])}" for name in largest)
    table_bytes = sum(tables.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_reserved(device)
        device_text = f"its GPU has {human_bytes(free)} of {human_bytes(total)} free"
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        device_text = f"its host has {human_bytes(available_bytes())} of {human_bytes(memory_bytes())} free"
    rest = max(0, used - table_bytes - dense)
    return (
        f"{len(tables)} tables with optimizer state use {human_bytes(table_bytes)} ({largest_text}), the dense part "
        f"with optimizer state {human_bytes(dense)}, batches, activations and the rest {human_bytes(rest)}; "
        f"{device_text}"
    )


def out_of_memory(error: BaseException, learner: Learner | None, device: torch.device, rank: int) -> OutOfMemory:
    """An error with the memory use of a rank.

    Args:
        learner: None if the model was not yet built.
    """
    use = "the model was being built" if learner is None else memory_use(learner, device)
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return OutOfMemory(
        f"rank {rank} is out of memory: {use}. Reduce trainer.batch_size, increase trainer.micro_batches, or use more "
        f"workers. ({line})"
    )


def _bytes(values: Iterable[object]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
