"""Lookups by fbgemm's table-batched embedding (TBE): all tables of a group in one call, the update in backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel.stacking import Stacks
from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.types import DEFAULT_LOAD_FACTOR

logging.getLogger("fbgemm_gpu").setLevel(logging.WARNING)

_LOCATIONS = {
    EmbeddingComputeKernel.FUSED: EmbeddingLocation.DEVICE,
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
}
_PRECISION = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}
_STATE_NAMES: dict[EmbOptimType, tuple[str, ...]] = {
    EmbOptimType.EXACT_SGD: (),
    EmbOptimType.EXACT_ADAGRAD: ("momentum1",),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("momentum1",),
    EmbOptimType.LARS_SGD: ("momentum1",),
    EmbOptimType.ADAM: ("momentum1", "exp_avg_sq"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("momentum1", "exp_avg_sq"),
    EmbOptimType.LAMB: ("momentum1", "exp_avg_sq"),
}


class FusedKernel:
    """A group of rectangles of one dtype, one optimizer and one share in a cache, in one TBE.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        first = self.tables[0]
        spec = first.update
        on_cpu = device.type == "cpu"
        self._stacks = Stacks(self.tables, table_of_lookup, device, apart=not on_cpu)
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (
                    table.rows.size,
                    table.cols.size,
                    EmbeddingLocation.HOST if on_cpu else _LOCATIONS[table.kernel],
                    ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA,
                )
                for table in self._stacks.tables
            ],
            feature_table_map=self._stacks.stack_of_lookup,
            weights_precision=_PRECISION[first.config.data_type.dtype],
            output_dtype=SparseType.FP32,
            optimizer=spec.optimizer,
            learning_rate=spec.learning_rate,
            eps=spec.eps,
            beta1=spec.beta1,
            beta2=spec.beta2,
            momentum=spec.momentum,
            eta=spec.eta,
            weight_decay=spec.weight_decay,
            weight_decay_mode=WeightDecayMode.L2 if spec.weight_decay else WeightDecayMode.NONE,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            cache_load_factor=first.load_factor or DEFAULT_LOAD_FACTOR,
            bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked where they came in, with their names
            device=device,
        )

    def __repr__(self) -> str:
        return f"FusedKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        return self._tbe(self._stacks.ids(lookups), lookups.offsets, lookups.weights)

    def weights(self) -> list[torch.Tensor]:
        self._tbe.flush()
        return self._stacks.apart([weight.detach() for weight in self._tbe.split_embedding_weights()])

    def states(self) -> list[dict[str, torch.Tensor]]:
        names = _STATE_NAMES[self.tables[0].update.optimizer]
        if not names:
            return [{} for _ in self.tables]
        self._tbe.flush()
        columns = []  # one for each name, of every table
        for of_stacks in zip(*self._tbe.split_optimizer_states(), strict=True):
            shaped = [
                state.detach() if state.numel() == stack.rows.size else state.detach().view(stack.rows.size, -1)
                for stack, state in zip(self._stacks.tables, of_stacks, strict=True)
            ]
            columns.append(self._stacks.apart(shaped))
        return [dict(zip(names, of_table, strict=True)) for of_table in zip(*columns, strict=True)]

    @property
    def learning_rate(self) -> float:
        return float(self._tbe.get_learning_rate())

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._tbe.set_learning_rate(value)

    @property
    def iteration(self) -> int:
        return int(self._tbe.iter[0])

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._tbe.iter[0] = value
        self._tbe.iter_cpu.fill_(value)  # fbgemm counts on the host, and keeps `iter` for checkpoints
