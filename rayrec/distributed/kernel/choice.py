"""Which kernel a table gets, and which tables share one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeGuard

import torch

from rayrec.distributed.kernel.dense import DenseKernel
from rayrec.distributed.kernel.fused import FusedKernel, rounds_apart
from rayrec.distributed.kernel.optimizer import FUSED_ON_CPU
from rayrec.distributed.kernel.rows import RowKernel
from rayrec.distributed.kernel.tables import Kernel, LocalTable, PoolingKernel, UpdatingKernel, VectorKernel
from rayrec.distributed.kernel.vectors import FusedVectorKernel


def pooling_group(table: LocalTable, device: torch.device) -> Hashable:
    """Tables of one key share a kernel for bags: one TBE for each optimizer, dtype and cache; the rest by width.

    On a CPU tables whose rows fbgemm would train by another kernel are apart too.
    """
    fused = _fbgemm_trains(table, device)
    key = (fused, table.optimizer, table.config.data_type, table.load_factor)
    if not fused:
        return (*key, table.cols.size)
    several = device.type == "cpu" and len(table.config.feature_names) > 1
    return (*key, several and rounds_apart(table.update.optimizer))


def vector_group(table: LocalTable, device: torch.device) -> Hashable:
    """Tables of one key share a kernel for ids, which has one width and one place in memory."""
    fused = _fbgemm_trains(table, device)
    return (fused, table.optimizer, table.config.data_type, table.load_factor, table.cols.size, table.kernel)


def make_pooling_kernel(
    tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device
) -> PoolingKernel:
    """The kernel of the tables of one `pooling_group`."""
    if _fbgemm_trains(tables[0], device):
        return FusedKernel(tables, table_of_lookup, device)
    return make_matrix_kernel(tables, table_of_lookup, device)


def make_vector_kernel(
    tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device
) -> VectorKernel:
    """The kernel of the tables of one `vector_group`."""
    if _fbgemm_trains(tables[0], device):
        return FusedVectorKernel(tables, table_of_lookup, device)
    return make_matrix_kernel(tables, table_of_lookup, device)


def make_matrix_kernel(
    tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device
) -> RowKernel | DenseKernel:
    """The kernel of tables of one width, dtype and optimizer that fbgemm does not train."""
    kind = DenseKernel if tables[0].optimizer is None else RowKernel
    return kind(tables, table_of_lookup, device)


def updating(kernels: Sequence[Kernel]) -> list[UpdatingKernel]:
    """Those that update their tables inside backward."""
    return [kernel for kernel in kernels if _updates(kernel)]


def _updates(kernel: Kernel) -> TypeGuard[UpdatingKernel]:
    return not isinstance(kernel, DenseKernel)


def _fbgemm_trains(table: LocalTable, device: torch.device) -> bool:
    """Whether fbgemm can update the table on this device."""
    if table.optimizer is None or device.type == "cuda":
        return table.optimizer is not None
    return table.optimizer.optimizer in FUSED_ON_CPU and table.config.data_type.dtype != torch.bfloat16
