"""Lookups by fbgemm's table-batched embedding (TBE): all tables of a group in one call, the update in backward; and
counts of these updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from rayrec.distributed.kernel.compiled_update import CompiledUpdate, Memory
from rayrec.distributed.kernel.interface import LocalTable, Lookups, of_inner
from rayrec.distributed.kernel.row_kernel import Stack
from rayrec.distributed.kernel.tbe import TBE, Padding, make_tbe, set_count
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Span


class UpdateCount:
    """Counts the updates of a kernel, and its lookups that may still lead to one.

    Adam and its relatives correct their bias by the number of updates. fbgemm takes it in forward and counts forwards,
    evaluations too; a kernel sets it to `before_next`, the number of the update that the forward's backward makes.
    """

    def __init__(self) -> None:
        self.done = 0
        self._pending: WeakSet[_Update] = WeakSet()  # an update is gone with its graph if backward never comes

    @property
    def pending(self) -> bool:
        """Whether a lookup that may train has not had its backward."""
        return len(self._pending) > 0

    @property
    def before_next(self) -> int:
        """Updates before the one of a lookup that starts now."""
        return self.done + len(self._pending)

    def expect(self, out: torch.Tensor) -> None:
        """Counts the update when the backward of `out` starts; nothing where `out` has none."""
        if out.requires_grad:
            update = _Update(count=self, pending=self._pending)
            self._pending.add(update)
            if out.grad_fn is None:
                out.register_hook(update)
            else:
                out.grad_fn.register_prehook(update)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Update:
    """An autograd hook: counts an update when its backward starts."""

    count: UpdateCount
    pending: WeakSet[_Update]

    def __call__(self, *_: object) -> None:
        self.pending.discard(self)
        self.count.done += 1


class FusedKernel:
    """Tables of one dtype, optimizer and share in a cache, in one TBE; on a CPU a compiled loop may update them.

    Args:
        tables: the rectangles; of one width, if padded and with optimizer state of one number a row.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        rule = tables[0].update.rule
        dims = [tables[table].cols.size for table in table_of_lookup]
        padding = Padding(dims, device, per_row=any(rule.rowwise.values()))
        self._padding, self._scale = padding if padding.needed else None, padding.scale
        self._tbe = make_tbe(self.tables, table_of_lookup, device, self._scale)
        self._updates = UpdateCount()
        self._sets_count = rule.corrects_bias
        possible = CompiledUpdate.possible(self.tables, table_of_lookup, device)
        self._compiled = CompiledUpdate(_memory(self._tbe), self.tables, table_of_lookup) if possible else None

    def __repr__(self) -> str:
        return f"FusedKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # fbgemm's operators do not support it on a CPU
            with torch.inference_mode(False), torch.no_grad():
                return self.pooled(lookups)
        if self._sets_count:
            set_count(self._tbe, self._updates.before_next)
        weights_train = lookups.weights is not None and lookups.weights.requires_grad
        trains = torch.is_grad_enabled() and not weights_train
        if trains and self._compiled is not None and self._compiled.pays(lookups):
            with torch.no_grad():
                bags = self._tbe(lookups.ids, lookups.offsets, lookups.weights)
            bags = self._compiled.trained(bags, lookups, float(self._tbe.get_learning_rate()))
        else:
            bags = self._tbe(lookups.ids, lookups.offsets, lookups.weights)
        if self._padding is not None:
            bags = self._padding.cut(bags)
        self._updates.expect(bags)
        return bags

    def write_back(self) -> None:
        self._tbe.flush()
        if not self._updates.pending:  # a backward under way writes to the places in the cache that it knows
            self._tbe.reset_cache_states()

    def weights(self) -> list[torch.Tensor]:
        self.write_back()
        held = self._tbe.split_embedding_weights()
        return [weight.detach()[:, : table.cols.size] for table, weight in zip(self.tables, held, strict=True)]

    def states(self) -> list[dict[str, torch.Tensor]]:
        out: list[dict[str, torch.Tensor]] = [{} for _ in self.tables]
        held = self._tbe.split_optimizer_states()
        for number, (name, per_row) in enumerate(self.tables[0].update.rule.rowwise.items()):
            for table, of_table, states in zip(self.tables, out, held, strict=True):
                state = states[number].detach()
                of_table[name] = state if per_row else state.view(table.rows.size, -1)[:, : table.cols.size]
        return out

    @property
    def learning_rate(self) -> float:
        return float(self._tbe.get_learning_rate()) * self._scale

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._tbe.set_learning_rate(value / self._scale)

    @property
    def iteration(self) -> int:
        return self._updates.done

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._updates.done = value


def _memory(tbe: TBE) -> Memory:
    """Where a TBE on a CPU has its tables."""
    weights, states = tbe.split_embedding_weights(), [held[0] for held in tbe.split_optimizer_states() if held]
    return Memory(
        held=lambda: (tbe.weights_host, [tbe.momentum1_host] if states else []),
        first_weights=[weight.storage_offset() for weight in weights],
        first_states=[[state.storage_offset() for state in states]] if states else [],
        widths=[weight.shape[1] for weight in weights],
    )


class FusedVectorKernel:
    """Lookups id by id: every id is a bag of its own in one table that holds all others.

    fbgemm has kernels that do not pool; on a CPU their backward takes more than ten times as long.

    Args:
        tables: of one width, dtype, optimizer and place in memory.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self._stack = Stack(self.tables, table_of_lookup, device)
        first, rows = self.tables[0], self._stack.num_rows
        one = replace(first.config, num_embeddings=rows)
        whole = first if len(self.tables) == 1 else replace(first, config=one, rows=Span(0, rows))
        self._inner = FusedKernel([whole], [0], device)
        self._counting = torch.arange(1, device=device)

    def __repr__(self) -> str:
        return f"FusedVectorKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        num_ids = lookups.ids.numel()
        if self._counting.numel() <= num_ids:
            with torch.inference_mode(False):  # kept, and an inference tensor cannot be saved for backward
                self._counting = torch.arange(2 * num_ids + 1, device=self._counting.device)
        return self._inner.pooled(Lookups(self._stack.ids(lookups), self._counting[: num_ids + 1], None))

    def weights(self) -> list[torch.Tensor]:
        (whole,) = self._inner.weights()
        return self._stack.split(whole)

    def states(self) -> list[dict[str, torch.Tensor]]:
        (whole,) = self._inner.states()
        parts = {name: self._stack.split(state) for name, state in whole.items()}
        return [{name: pieces[number] for name, pieces in parts.items()} for number in range(len(self.tables))]

    write_back = of_inner("write_back")
    learning_rate = of_inner("learning_rate")
    iteration = of_inner("iteration")


class CacheGuard:
    """Refuses a lookup between the forward and the backward of another one, if tables are behind a device cache: it
    could evict rows that this backward updates in the cache.

    The plan decides, not this rank's tables, so that every rank raises.

    Args:
        plan: of all tables of a collection.
        device: of this rank.
    """

    def __init__(self, plan: Mapping[str, ParameterSharding], device: torch.device) -> None:
        cached = EmbeddingComputeKernel.FUSED_UVM_CACHING
        on_gpu = device.type == "cuda"  # a CPU has no cache
        self._names = [name for name, table in plan.items() if on_gpu and table.compute_kernel == cached.value]
        self._lookups = UpdateCount()

    def check(self) -> None:
        """Call before a lookup.

        Raises:
            RuntimeError: a lookup has not had its backward.
        """
        if self._names and self._lookups.pending:
            raise RuntimeError(
                f"tables {self._names}: a second lookup before the backward of the first, with kernel "
                "'fused_uvm_caching'; run the backward first, drop the first result, or use kernel 'fused_uvm'"
            )

    def watch(self, vectors: torch.Tensor) -> None:
        """Call after a lookup, with its result."""
        if self._names:
            self._lookups.expect(vectors)
