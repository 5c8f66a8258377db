"""Chooses the kernel of a table, and the tables that share one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch

from rayrec.distributed.kernel.dense_kernel import DenseKernel
from rayrec.distributed.kernel.fused import FusedKernel, FusedVectorKernel
from rayrec.distributed.kernel.interface import Kernel, LocalTable, PoolingKernel, UpdatingKernel, VectorKernel
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.kernel.recording import RecordingKernel, records
from rayrec.distributed.kernel.row_kernel import RowKernel
from rayrec.distributed.kernel.tbe import padded
from rayrec.distributed.plan.shards import EmbeddingComputeKernel
from rayrec.modules import BaseEmbeddingConfig

_logger = logging.getLogger(__name__)
MatrixKernel = RowKernel | DenseKernel


def pooling_group(table: LocalTable, device: torch.device) -> Hashable:
    """Tables of one key share a kernel for bags: one TBE for each optimizer, dtype and cache; the rest by width."""
    fused = _fbgemm_trains(table.optimizer, table.config, table.cols.size, device)
    key = (fused, table.optimizer, table.config.data_type, table.load_factor)
    if not fused:
        return (*key, table.cols.size)
    # see `Padding`: with optimizer state of one number a row, padded tables have one width
    alone = padded(table.cols.size) > table.cols.size and any(table.update.rule.rowwise.values())
    return (*key, table.cols.size if alone else None)


def vector_group(table: LocalTable, device: torch.device) -> Hashable:
    """Tables of one key share a kernel for ids; it has one width and one place in memory."""
    fused = _fbgemm_trains(table.optimizer, table.config, table.cols.size, device)
    return (fused, table.optimizer, table.config.data_type, table.load_factor, table.cols.size, table.kernel)


def make_pooling_kernel(tables: Sequence[LocalTable], readers: Sequence[int], device: torch.device) -> PoolingKernel:
    """The kernel of the tables of one `pooling_group`; `readers` has the table of each lookup."""
    return _make(FusedKernel, tables, readers, device)


def make_vector_kernel(tables: Sequence[LocalTable], readers: Sequence[int], device: torch.device) -> VectorKernel:
    """The kernel of the tables of one `vector_group`."""
    return _make(FusedVectorKernel, tables, readers, device)


def make_matrix_kernel(tables: Sequence[LocalTable], readers: Sequence[int], device: torch.device) -> MatrixKernel:
    """The kernel, of torch's operators, of tables of one width, dtype and optimizer."""
    return _make(None, tables, readers, device)


def _make(
    fused: Callable[..., Kernel] | None, tables: Sequence[LocalTable], readers: Sequence[int], device: torch.device
) -> Any:
    first = tables[0]
    _warn_of_rounding(tables)
    make: Callable[..., Kernel] = DenseKernel if first.optimizer is None else RowKernel
    if fused is not None and _fbgemm_trains(first.optimizer, first.config, first.cols.size, device):
        make = fused
    kernel = make(tables, readers, device)
    return RecordingKernel(kernel, readers, device) if records(first) else kernel


def _warn_of_rounding(tables: Sequence[LocalTable]) -> None:
    """Logs a warning where updates smaller than the distance between two 16-bit numbers are lost."""
    first = tables[0]
    if first.optimizer and not first.optimizer.stochastic_rounding and first.config.data_type.dtype.itemsize == 2:
        names = list(dict.fromkeys(table.config.name for table in tables))
        _logger.warning(
            "tables %s hold %s weights and are rounded to the nearest number after each update, so small updates are "
            "lost; set `stochastic_rounding: true` in the optimizer's settings (`fused_params`) to keep them",
            names,
            first.config.data_type.value,
        )


def updating(kernels: Sequence[Kernel]) -> list[UpdatingKernel]:
    """The kernels that update their tables inside backward."""
    return [cast(UpdatingKernel, kernel) for kernel in kernels if not isinstance(kernel, DenseKernel)]


def check_trainable(
    config: BaseEmbeddingConfig, kernel: EmbeddingComputeKernel, spec: OptimizerSpec | None, device: torch.device
) -> None:
    """Raises ValueError for a table in host memory that a GPU reads, if fbgemm does not have its update."""
    in_host_memory = kernel in (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)
    if not in_host_memory or spec is None or device.type != "cuda":
        return
    if _fbgemm_trains(spec, config, config.embedding_dim, device):
        return
    why = (
        "updates before the gradients of other groups arrive; synchronise every 2 steps or more, or use kernel 'fused'"
        if _synchronises_every_step(spec)
        else f"does not have {spec.optimizer.value!r} with weight decay {spec.decay_mode!r} or width "
        f"{config.embedding_dim}; use kernel 'fused', another optimizer, no weight decay or a width that is a "
        "multiple of 4"
    )
    raise ValueError(f"table {config.name!r}: kernel {kernel.value!r} trains by fbgemm only, which {why}")


def _synchronises_every_step(spec: OptimizerSpec) -> bool:
    return spec.replicas is not None and spec.replicas.every_step


def _fbgemm_trains(spec: OptimizerSpec | None, config: BaseEmbeddingConfig, dim: int, device: torch.device) -> bool:
    """Whether fbgemm can update a table on this device by the formula of its optimizer."""
    data_type = config.data_type.dtype
    if spec is None or data_type == torch.bfloat16:  # it trains fp32 and fp16, on either device
        return False
    if _synchronises_every_step(spec):  # it updates before gradients of replicas are exchanged
        return False
    if device.type == "cuda":
        one_kind_of_state = len(set(spec.rule.rowwise.values())) < 2
        decays = not spec.weight_decay or spec.decay_mode in spec.rule.fbgemm_decay
        return decays and (padded(dim) == dim or one_kind_of_state)  # see `Padding.scale`
    # on a CPU it leaves out weight decay in places, and does not round stochastically
    rounds = spec.stochastic_rounding and data_type != torch.float32
    return spec.rule.fbgemm_on_cpu and not spec.weight_decay and not rounds
