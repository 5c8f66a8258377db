"""Averages weights over replicas after local steps (local SGD: Stich, "Local SGD converges fast and communicates
little", ICLR 2019).

Only rows that some group has looked up since the last averaging are exchanged; all others are equal already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rayrec.distributed import comm
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.kernel.rows import TouchedRows

AllReduce = Callable[[list[torch.Tensor]], None]  # averages tensors over replicas in place


def average(kernels: Sequence[Kernel], group: comm.Group, state: bool, all_reduce: AllReduce | None = None) -> None:
    """Sets every touched row, and its optimizer state, to the mean over replicas.

    Three exchanges per kernel: numbers of rows, the rows (8 bytes each, to every other replica), and an all-reduce of
    a float32 for each number in the union of rows.

    Args:
        kernels: of this rank; the same on its replicas.
        group: the replicas.
        state: average the optimizer state too.
        all_reduce: replaces the all-reduce over `group`.
    """
    for kernel in kernels:
        if kernel.touched is not None:
            _average(kernel, kernel.touched, group, state, all_reduce)


def _average(
    kernel: Kernel, rows_of_kernel: TouchedRows, group: comm.Group, state: bool, all_reduce: AllReduce | None
) -> None:
    assert group is not None
    sizes = [table.rows.size for table in kernel.tables]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    touched = [rows + start for rows, start in zip(rows_of_kernel.take(), starts, strict=True)]
    union = torch.unique(comm.all_gather_uneven(torch.cat(touched), group))
    edges = torch.searchsorted(union, torch.tensor([*starts, sum(sizes)], device=union.device)).tolist()
    held = list(zip(kernel.weights(), kernel.states() if state else [{} for _ in sizes], strict=True))
    parts = [
        (tensor, union[first:last] - start)
        for (weight, states), first, last, start in zip(held, edges[:-1], edges[1:], starts, strict=True)
        for tensor in (weight, *states.values())
        if last > first
    ]
    if not parts:
        return
    numbers = [tensor[rows].float() for tensor, rows in parts]
    flat = torch.cat([each.view(-1) for each in numbers])
    if all_reduce is None:
        comm.all_reduce(flat, group).div_(group.size())
    else:
        all_reduce([flat])
    means = flat.split([each.numel() for each in numbers])
    for (tensor, rows), each, mean in zip(parts, numbers, means, strict=True):
        tensor[rows] = mean.view(each.shape).to(tensor.dtype)
