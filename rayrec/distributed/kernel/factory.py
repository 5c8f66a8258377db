"""Groups the tables of a rank by kernel, and makes the kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

from rayrec.distributed.kernel.choice import averages_rows, fbgemm_updates
from rayrec.distributed.kernel.dense_kernel import DenseKernel
from rayrec.distributed.kernel.fused import FusedKernel, FusedVectorKernel
from rayrec.distributed.kernel.interface import Kernel
from rayrec.distributed.kernel.local_table import LocalTable
from rayrec.distributed.kernel.row_kernel import RowKernel
from rayrec.distributed.kernel.rows import TouchedRows
from rayrec.distributed.kernel.tbe import padded

_logger = logging.getLogger(__name__)
MatrixKernel = RowKernel | DenseKernel


def pooling_group(table: LocalTable, device: torch.device) -> Hashable:
    """Key of the tables that share a kernel for bags: one TBE per optimizer, data type and cache; others by width."""
    fused = fbgemm_updates(table.optimizer, table.config, table.cols.size, device)
    key = (fused, table.optimizer, table.config.data_type, table.load_factor)
    if not fused:
        return (*key, table.cols.size)
    # With optimizer state of one number per row, padded tables must have one width: see `Padding`.
    needs_one_width = padded(table.cols.size) > table.cols.size and any(table.update.rule.rowwise.values())
    return (*key, table.cols.size if needs_one_width else None)


def vector_group(table: LocalTable, device: torch.device) -> Hashable:
    """Key of the tables that share a kernel for sequences, which has one width and one memory location."""
    fused = fbgemm_updates(table.optimizer, table.config, table.cols.size, device)
    return (fused, table.optimizer, table.config.data_type, table.load_factor, table.cols.size, table.kernel)


def make_pooling_kernel(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> Kernel:
    """The kernel of the tables of one `pooling_group`; its lookups return bags."""
    return _make(FusedKernel, tables, table_of_lookup, device, pooled=True)


def make_vector_kernel(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> Kernel:
    """The kernel of the tables of one `vector_group`; its lookups return the vector of each id."""
    return _make(FusedVectorKernel, tables, table_of_lookup, device, pooled=False)


def make_matrix_kernel(
    tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device
) -> MatrixKernel:
    """A kernel of torch's operators for tables of one width, data type and optimizer."""
    _warn_of_rounding(tables)
    make = DenseKernel if tables[0].optimizer is None else RowKernel
    return make(tables, table_of_lookup, device)


def track_changes(kernels: Sequence[Kernel], device: torch.device) -> None:
    """Makes kernels mark the rows that they change, in `changed`. Tables of dense kernels are not marked: the user's
    optimizer may change all of their rows."""
    for kernel in kernels:
        if not isinstance(kernel, DenseKernel):
            kernel.changed = TouchedRows(kernel.tables, kernel.table_of_lookup, device)


def _make(
    make_fused: Callable[..., Kernel],
    tables: Sequence[LocalTable],
    table_of_lookup: Sequence[int],
    device: torch.device,
    pooled: bool,
) -> Kernel:
    first = tables[0]
    _warn_of_rounding(tables)
    kernel: Kernel
    if fbgemm_updates(first.optimizer, first.config, first.cols.size, device):
        kernel = make_fused(tables, table_of_lookup, device)
    elif first.optimizer is None:
        kernel = DenseKernel(tables, table_of_lookup, device, pooled)
    else:
        kernel = RowKernel(tables, table_of_lookup, device, pooled)
    if averages_rows(first):
        kernel.touched = TouchedRows(tables, table_of_lookup, device)
    return kernel


def _warn_of_rounding(tables: Sequence[LocalTable]) -> None:
    """Logs a warning if updates smaller than the distance between two 16-bit numbers are lost."""
    first = tables[0]
    if first.optimizer and not first.optimizer.stochastic_rounding and first.config.data_type.dtype.itemsize == 2:
        names = list(dict.fromkeys(table.config.name for table in tables))
        _logger.warning(
            "tables %s hold %s weights and are rounded to the nearest number after each update, so small updates are "
            "lost; set `stochastic_rounding: true` in the optimizer's settings (`fused_params`) to keep them",
            names,
            first.config.data_type.value,
        )
