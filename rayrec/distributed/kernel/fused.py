"""Lookups by fbgemm's table-batched embedding (TBE): all tables of a group in one call, the update in backward."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel.layout_choice import LayoutChoice
from rayrec.distributed.kernel.optimizer_rules import DecayMode, rule_of
from rayrec.distributed.kernel.stacking import Stack, parts_of, stacks_of
from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.kernel.update_count import UpdateCount
from rayrec.distributed.types import DEFAULT_LOAD_FACTOR

logging.getLogger("fbgemm_gpu").setLevel(logging.WARNING)

_LOCATIONS = {
    EmbeddingComputeKernel.FUSED: EmbeddingLocation.DEVICE,
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
}
_PRECISION = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16, torch.bfloat16: SparseType.BF16}
_DECAY = {
    None: WeightDecayMode.NONE,  # part of the formula, or none
    DecayMode.L2: WeightDecayMode.L2,
    DecayMode.DECOUPLE: WeightDecayMode.DECOUPLE,
}
_STATES = ("momentum1", "momentum2")  # fbgemm's names for what a rule names as it likes
Result = tuple[torch.Tensor, torch.autograd.graph.Node | None]  # bags, and the last node that trains in backward
# whether a TBE can use the memory of another one, as fbgemm does since 1.8
_SHARES_MEMORY = "preallocated_host_buffers" in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters


def rounds_apart(optimizer: EmbOptimType) -> bool:
    """Whether fbgemm's CPU kernel for a table with several lookups is another one, which rounds in another way."""
    return optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD


class FusedKernel:
    """A group of rectangles of one dtype, one optimizer and one share in a cache, in one TBE.

    On a CPU neighbouring tables of one width may also be one table to fbgemm, in further TBEs over the same memory.
    Whichever is faster with the batches that come is used; results are the same to the last bit.

    Args:
        tables: the rectangles; on a CPU either all with one lookup or all with several, if `rounds_apart`.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self._tbe = _make_tbe(self.tables, table_of_lookup, device)
        stacked = device.type == "cpu" and _SHARES_MEMORY
        self._stacks = stacks_of(self.tables, table_of_lookup, device) if stacked else []
        memory = _memory(self._tbe, self._stacks)
        self._stacked_tbes = [
            _make_tbe([stack.table], [0], device, held) for stack, held in zip(self._stacks, memory, strict=True)
        ]
        self._ways = self._make_ways(several_lookups=len(table_of_lookup) > len(tables))
        self._choice = LayoutChoice(len(self._ways))
        self._updates = UpdateCount()
        self._behind_cache = device.type == "cuda" and any(
            table.kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING for table in self.tables
        )

    def _make_ways(self, several_lookups: bool) -> list[Callable[[Lookups], Result]]:
        if not self._stacks:
            return [self._pooled_apart]
        if several_lookups and rounds_apart(self.tables[0].update.optimizer):
            return [self._pooled_stacked]
        return [self._pooled_apart, self._pooled_stacked]

    def __repr__(self) -> str:
        return f"FusedKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        """As `PoolingKernel`'s.

        Raises:
            RuntimeError: behind a device cache, a lookup between another one's forward and backward: it may evict rows
                whose places in the cache that backward writes to.
        """
        if self._behind_cache and self._updates.pending:
            names = [table.config.name for table in self.tables]
            raise RuntimeError(
                f"tables {names}: a second lookup before the backward of the first, with kernel 'fused_uvm_caching'; "
                "run the backward first, drop the first result, or take kernel 'fused_uvm'"
            )
        out = self._choice.run(lookups.ids.numel(), [partial(way, lookups) for way in self._ways])
        self._updates.expect(out)
        return out

    def _pooled_apart(self, lookups: Lookups) -> Result:
        bags = self._run(self._tbe, lookups.ids, lookups)
        return bags, bags.grad_fn

    def _pooled_stacked(self, lookups: Lookups) -> Result:
        parts = zip(self._stacks, self._stacked_tbes, parts_of(self._stacks, lookups), strict=True)
        bags = [(stack, self._run(tbe, stack.ids(part), part)) for stack, tbe, part in parts]
        columns = [stack.by_example(of_stack).flatten(1) for stack, of_stack in bags]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1), bags[0][1].grad_fn

    def _run(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, ids: torch.Tensor, lookups: Lookups) -> torch.Tensor:
        _set_count(tbe, self._updates.before_next)
        bags: torch.Tensor = tbe(ids, lookups.offsets, lookups.weights)
        return bags

    def write_back(self) -> None:
        self._tbe.flush()
        if not self._updates.pending:  # a backward under way writes to the places in the cache that it knows
            self._tbe.reset_cache_states()

    def weights(self) -> list[torch.Tensor]:
        self.write_back()
        return [weight.detach() for weight in self._tbe.split_embedding_weights()]

    def states(self) -> list[dict[str, torch.Tensor]]:
        rule = self.tables[0].update.rule
        if not rule.rowwise:
            return [{} for _ in self.tables]
        self._tbe.flush()
        return [
            {
                name: state.detach() if per_row else state.detach().view(table.rows.size, -1)
                for (name, per_row), state in zip(rule.rowwise.items(), of_table, strict=True)
            }
            for table, of_table in zip(self.tables, self._tbe.split_optimizer_states(), strict=True)
        ]

    @property
    def learning_rate(self) -> float:
        return float(self._tbe.get_learning_rate())

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for tbe in (self._tbe, *self._stacked_tbes):
            tbe.set_learning_rate(value)

    @property
    def iteration(self) -> int:
        return self._updates.done

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._updates.done = value


def _make_tbe(
    tables: Sequence[LocalTable],
    table_of_lookup: Sequence[int],
    device: torch.device,
    memory: Mapping[str, torch.Tensor] | None = None,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """The TBE of some tables, over memory of its own, or over a CPU TBE's of the same rows."""
    first, on_cpu = tables[0], device.type == "cpu"
    spec = first.update
    return SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[
            (
                table.rows.size,
                table.cols.size,
                EmbeddingLocation.HOST if on_cpu else _LOCATIONS[table.kernel],
                ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA,
            )
            for table in tables
        ],
        feature_table_map=list(table_of_lookup),
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
        weight_decay_mode=_DECAY[spec.decay_mode if spec.weight_decay else None],
        stochastic_rounding=spec.stochastic_rounding,
        pooling_mode=PoolingMode.SUM,
        cache_load_factor=first.load_factor or DEFAULT_LOAD_FACTOR,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids were checked where they came in, with their names
        device=device,
        **({} if memory is None else {"preallocated_host_buffers": dict(memory)}),
    )


def _memory(tbe: SplitTableBatchedEmbeddingBagsCodegen, stacks: Sequence[Stack]) -> list[dict[str, torch.Tensor]]:
    """The memory of each stack, by fbgemm's names: a CPU TBE has its tables one below the other."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in stacks]
    per_row = [False, *rule_of(tbe.optimizer).rowwise.values()]
    for name, one_number in zip(("weights", *_STATES), per_row, strict=False):
        whole, end = getattr(tbe, f"{name}_host").detach(), 0
        for stack, part in zip(stacks, parts, strict=True):
            start, end = end, end + stack.num_rows * (1 if one_number else stack.table.cols.size)
            part[name] = whole[start:end]
    return parts


def _set_count(tbe: SplitTableBatchedEmbeddingBagsCodegen, updates: int) -> None:
    """Tells fbgemm how many updates came before the one of the next lookup, which it counts by itself."""
    tbe.iter_cpu.fill_(updates)
    if not updates:
        tbe.iter.zero_()  # fbgemm takes a count of 0 on the host for one that was not loaded, and reads this one
