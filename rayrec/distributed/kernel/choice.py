"""Decides which code updates a table: fbgemm, the compiled loop, torch's formulas, or the user's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.local_table import LOOP_LIMIT, LocalTable
from rayrec.distributed.kernel.optimizer_spec import OptimizerSpec
from rayrec.distributed.kernel.tbe import padded
from rayrec.distributed.plan.shards import EmbeddingComputeKernel
from rayrec.modules.configs import BaseEmbeddingConfig

# The optimizers of the compiled loop, by their names in `update_loops`.
LOOP_RULES = {
    EmbOptimType.EXACT_SGD: "SGD",
    EmbOptimType.EXACT_ADAGRAD: "ADAGRAD",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "ROWWISE_ADAGRAD",
    EmbOptimType.ADAM: "ADAM",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "PARTIAL_ROWWISE_ADAM",
}
HOST_KERNELS = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)  # in memory of the host


def fbgemm_updates(spec: OptimizerSpec | None, config: BaseEmbeddingConfig, dim: int, device: torch.device) -> bool:
    """Whether fbgemm can update a table of width `dim` on this device by the formula of its optimizer."""
    return spec is not None and fbgemm_lacks(spec, config, dim, device) is None


def fbgemm_lacks(spec: OptimizerSpec, config: BaseEmbeddingConfig, dim: int, device: torch.device) -> str | None:
    """Why fbgemm cannot update a table of width `dim` on this device, and what to change; None if it can."""
    data_type, optimizer = config.data_type.dtype, spec.optimizer.value
    # fbgemm trains fp32 and fp16, and updates before the gradients of replicas are exchanged.
    if data_type == torch.bfloat16:
        return f"does not train {config.data_type.value} tables; use data type fp16 or fp32"
    if _synchronises_every_step(spec):
        return "updates before the gradients of other groups arrive; synchronise every 2 steps or more"
    if device.type == "cuda":
        if spec.weight_decay and spec.decay_mode not in spec.rule.fbgemm_decay:
            mode = "" if spec.decay_mode is None else f" of mode {spec.decay_mode.value!r}"
            return (
                f"has no weight decay{mode} for {optimizer!r}; use another mode, another optimizer or no weight decay"
            )
        one_kind_of_state = len(set(spec.rule.rowwise.values())) < 2
        if padded(dim) != dim and not one_kind_of_state:  # see `Padding.scale`
            return f"does not have {optimizer!r} for width {dim}; use a width that is a multiple of 4"
        return None
    # On a CPU it ignores weight decay of some optimizers, and does not round stochastically.
    rounds = spec.stochastic_rounding and data_type != torch.float32
    runs = spec.rule.fbgemm_on_cpu and not spec.weight_decay and not rounds
    return None if runs else f"does not have {optimizer!r} with these settings on a CPU"


def loop_updates(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> bool:
    """Whether the compiled loop can update the tables of a kernel: it runs on a CPU, reads the lookups of each table
    side by side, rounds to the nearest number and has no weight decay."""
    spec, is_float32 = tables[0].update, tables[0].config.data_type.dtype == torch.float32
    return (
        device.type == "cpu"
        and spec.optimizer in LOOP_RULES
        and not spec.weight_decay
        and (is_float32 or not spec.stochastic_rounding)
        and not _synchronises_every_step(spec)
        and all(table <= following for table, following in pairwise(table_of_lookup))
        and all(table.rows.size < LOOP_LIMIT for table in tables)
    )


def check_trainable(
    config: BaseEmbeddingConfig, kernel: EmbeddingComputeKernel, spec: OptimizerSpec | None, device: torch.device
) -> None:
    """Checks that a table in host memory that a GPU reads can be updated.

    Raises:
        ValueError: fbgemm does not have the table's update.
    """
    if kernel not in HOST_KERNELS or spec is None or device.type != "cuda":
        return
    reason = fbgemm_lacks(spec, config, config.embedding_dim, device)
    if reason is not None:
        raise ValueError(
            f"table {config.name!r}: kernel {kernel.value!r} trains by fbgemm only, which {reason}, or kernel 'fused'"
        )


def averages_rows(table: LocalTable) -> bool:
    """Whether replicas of the table are averaged every few steps, which needs the touched rows."""
    replicas = None if table.optimizer is None else table.optimizer.replicas
    return replicas is not None and not replicas.every_step


def _synchronises_every_step(spec: OptimizerSpec) -> bool:
    return spec.replicas is not None and spec.replicas.every_step
