"""Averages weights over replicas after local steps (local SGD: Stich, "Local SGD converges fast and communicates
little", ICLR 2019).

Only rows that some group has looked up since the last averaging are exchanged; all other rows are equal already.
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
    one float32 per number in the union of rows.

    Args:
        kernels: kernels of this rank; replicas have the same.
        group: group of the replicas.
        state: whether to average the optimizer state too.
        all_reduce: replaces the all-reduce over `group`.
    """
    for kernel in kernels:
        if kernel.touched is not None:
            _average(kernel, kernel.touched, group, state, all_reduce)


def _average(
    kernel: Kernel, touched: TouchedRows, group: comm.Group, state: bool, all_reduce: AllReduce | None
) -> None:
    assert group is not None
    sizes = [table.rows.size for table in kernel.tables]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    own_rows = torch.cat([rows + start for rows, start in zip(touched.take(), starts, strict=True)])
    union = torch.unique(comm.all_gather_uneven(own_rows, group))
    edges = torch.searchsorted(union, torch.tensor([*starts, sum(sizes)], device=union.device)).tolist()
    states = kernel.states() if state else [{} for _ in sizes]
    targets = [  # (tensor, its rows to average)
        (tensor, union[low:high] - start)
        for weight, table_state, low, high, start in zip(
            kernel.weights(), states, edges[:-1], edges[1:], starts, strict=True
        )
        for tensor in (weight, *table_state.values())
        if high > low
    ]
    if not targets:
        return
    values = [tensor[rows].float() for tensor, rows in targets]
    flat = torch.cat([value.view(-1) for value in values])
    if all_reduce is None:
        comm.all_reduce(flat, group).div_(group.size())
    else:
        all_reduce([flat])
    means = flat.split([value.numel() for value in values])
    for (tensor, rows), value, mean in zip(targets, values, means, strict=True):
        tensor[rows] = mean.view(value.shape).to(tensor.dtype)
