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


def average(
    kernels: Sequence[Kernel],
    group: comm.Group,
    state: bool,
    all_reduce: AllReduce | None = None,
    block_numbers: int = 1 << 24,
) -> None:
    """Sets every touched row, and its optimizer state, to the mean over replicas.

    Exchanges per kernel: numbers of rows, the rows (8 bytes each, to every other replica), and an all-reduce of one
    float32 per number in the union of rows, block by block.

    Args:
        kernels: kernels of this rank; replicas have the same.
        group: group of the replicas.
        state: whether to average the optimizer state too.
        all_reduce: replaces the all-reduce over `group`.
        block_numbers: numbers that are averaged at a time, which bounds the memory of their float32 copies.
    """
    for kernel in kernels:
        if kernel.touched is not None:
            _average(kernel, kernel.touched, group, state, all_reduce, block_numbers)


def _average(
    kernel: Kernel,
    touched: TouchedRows,
    group: comm.Group,
    state: bool,
    all_reduce: AllReduce | None,
    block_numbers: int,
) -> None:
    assert group is not None
    sizes = [table.rows.size for table in kernel.tables]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    own_rows = torch.cat([rows + start for rows, start in zip(touched.take(), starts, strict=True)])
    union = torch.unique(comm.all_gather_uneven(own_rows, group))
    states = kernel.states() if state else [{} for _ in sizes]
    tensors = [(weight, *of_table.values()) for weight, of_table in zip(kernel.weights(), states, strict=True)]
    # Blocks of rows of all tables: their float32 copies are small beside the tables.
    width = max(sum(tensor[:1].numel() for tensor in of_table) for of_table in tensors)
    for block in union.split(max(1, block_numbers // width)):
        edges = torch.searchsorted(block, torch.tensor([*starts, sum(sizes)], device=block.device)).tolist()
        targets = [  # (tensor, its rows to average)
            (tensor, block[low:high] - start)
            for of_table, low, high, start in zip(tensors, edges[:-1], edges[1:], starts, strict=True)
            for tensor in of_table
            if high > low
        ]
        _average_rows(targets, group, all_reduce)


def _average_rows(
    targets: Sequence[tuple[torch.Tensor, torch.Tensor]], group: comm.Group, all_reduce: AllReduce | None
) -> None:
    if not targets:
        return
    assert group is not None
    values = [tensor[rows].float() for tensor, rows in targets]
    flat = torch.cat([value.view(-1) for value in values])
    if all_reduce is None:
        comm.all_reduce(flat, group).div_(group.size())
    else:
        all_reduce([flat])
    means = flat.split([value.numel() for value in values])
    for (tensor, rows), value, mean in zip(targets, values, means, strict=True):
        tensor[rows] = mean.view(value.shape).to(tensor.dtype)
