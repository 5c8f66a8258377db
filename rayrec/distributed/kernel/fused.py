"""Lookups by fbgemm's table-batched embedding (TBE): all tables of a kernel in one call, the update in backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from rayrec.distributed.kernel.choice import loop_updates
from rayrec.distributed.kernel.compiled_update import CompiledUpdate, Memory
from rayrec.distributed.kernel.interface import Untrained, of_inner
from rayrec.distributed.kernel.local_table import LocalTable, Lookups
from rayrec.distributed.kernel.rows import StackedTables, TouchedRows
from rayrec.distributed.kernel.tbe import TBE, Padding, make_tbe, set_count
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, Span

# The loop is faster than fbgemm for Adagrad, which fbgemm computes slowly on a CPU. For SGD it is faster for many
# lookups of small bags, for several lookups of a table, for long bags and for large batches, whose rows it prefetches.
MANY_LOOKUPS, FEW_BAGS = 100, 256
MANY_IDS_PER_BAG, MANY_IDS = 4, 10_000


class UpdateCount:
    """Counts the updates of a kernel, and its lookups that may still lead to one.

    Adam and LAMB correct their bias by the number of updates. fbgemm counts forwards instead, evaluations included, so
    a kernel sets fbgemm's count to `before_next` in each forward.
    """

    def __init__(self) -> None:
        self.done = 0
        # An update disappears with its graph if its backward never runs.
        self._pending: WeakSet[_Update] = WeakSet()

    @property
    def pending(self) -> bool:
        """Whether the backward of a lookup that may train has not started."""
        return len(self._pending) > 0

    @property
    def before_next(self) -> int:
        """Number of updates before the one of the next lookup."""
        return self.done + len(self._pending)

    def expect(self, vectors: torch.Tensor) -> None:
        """Counts an update when the backward of `vectors` starts; does nothing if they do not require gradients."""
        if vectors.requires_grad:
            update = _Update(count=self, pending=self._pending)
            self._pending.add(update)
            if vectors.grad_fn is None:
                vectors.register_hook(update)
            else:
                vectors.grad_fn.register_prehook(update)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Update:
    """An autograd hook that counts an update when its backward starts."""

    count: UpdateCount
    pending: WeakSet[_Update]

    def __call__(self, *_: object) -> None:
        self.pending.discard(self)
        self.count.done += 1


class FusedKernel:
    """Bags of tables of one data type, optimizer and cache share, in one TBE. On a CPU a compiled loop may update them.

    Args:
        tables: The rectangles. They have one width if they are padded and their optimizer keeps one number per row.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.touched: TouchedRows | None = None
        self.changed: TouchedRows | None = None
        self.table_of_lookup = list(table_of_lookup)
        rule = tables[0].update.rule
        dims = [tables[table].cols.size for table in table_of_lookup]
        padding = Padding(dims, device, per_row=any(rule.rowwise.values()))
        self._padding, self._scale = padding if padding.needed else None, padding.scale
        self._tbe = make_tbe(self.tables, table_of_lookup, device, self._scale)
        self._updates = UpdateCount()
        self._corrects_bias, self._num_lookups = rule.corrects_bias, len(table_of_lookup)
        self._has_state = bool(rule.rowwise)
        self._frozen, self._anchor = tables[0].update.frozen, torch.zeros(0, device=device, requires_grad=True)
        compiled = not self._frozen and loop_updates(self.tables, table_of_lookup, device)
        self._compiled = CompiledUpdate(_memory(self._tbe), self.tables, table_of_lookup) if compiled else None

    def __repr__(self) -> str:
        return f"FusedKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def lookup(self, lookups: Lookups) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # fbgemm's operators do not support it on a CPU
            with torch.inference_mode(False), torch.no_grad():
                return self.lookup(lookups)
        if self.touched is not None:
            self.touched.add(lookups)
        if self.changed is not None:
            self.changed.add(lookups)
        if self._corrects_bias:
            set_count(self._tbe, self._updates.before_next)
        weights_train = lookups.weights is not None and lookups.weights.requires_grad
        trains = torch.is_grad_enabled() and not weights_train
        if trains and self._frozen:
            with torch.no_grad():
                bags = self.lookup(lookups)
            return Untrained.apply(self._anchor, bags)
        compiled = self._compiled if trains else None
        if compiled is None or not self.loop_is_faster(lookups, self._num_lookups, len(self.tables), self._has_state):
            compiled = None
            bags = self._tbe(lookups.ids, lookups.offsets, lookups.weights)
        else:
            with torch.no_grad():
                bags = self._tbe(lookups.ids, lookups.offsets, lookups.weights)
            bags = compiled.trained(bags, lookups, float(self._tbe.get_learning_rate()), self._count_update)
        if self._padding is not None:
            bags = self._padding.cut(bags)
        if compiled is None:
            self._updates.expect(bags)
        return bags

    @staticmethod
    def loop_is_faster(lookups: Lookups, num_lookups: int, num_tables: int, has_state: bool) -> bool:
        """Whether the compiled loop beats fbgemm's CPU update for a batch of this shape (`jobs/bench/update.py`)."""
        if has_state or lookups.ids.numel() >= MANY_IDS:
            return True
        num_bags = lookups.offsets.numel() - 1
        small = num_lookups >= MANY_LOOKUPS and num_bags <= FEW_BAGS * num_lookups
        return small or num_lookups > num_tables or lookups.ids.numel() >= MANY_IDS_PER_BAG * num_bags

    def _count_update(self) -> None:
        self._updates.done += 1

    def write_back(self) -> None:
        self._tbe.flush()
        # A pending backward writes to the cache slots that its forward found.
        if not self._updates.pending:
            self._tbe.reset_cache_states()

    def weights(self) -> list[torch.Tensor]:
        self.write_back()
        padded = self._tbe.split_embedding_weights()
        return [weight.detach()[:, : table.cols.size] for table, weight in zip(self.tables, padded, strict=True)]

    def states(self) -> list[dict[str, torch.Tensor]]:
        states: list[dict[str, torch.Tensor]] = [{} for _ in self.tables]
        padded = self._tbe.split_optimizer_states()
        for number, (name, per_row) in enumerate(self.tables[0].update.rule.rowwise.items()):
            for table, by_name, tensors in zip(self.tables, states, padded, strict=True):
                state = tensors[number].detach()
                by_name[name] = state if per_row else state.view(table.rows.size, -1)[:, : table.cols.size]
        return states

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
    """Location of the tables of a TBE on a CPU."""
    weights, states = tbe.split_embedding_weights(), [tensors[0] for tensors in tbe.split_optimizer_states() if tensors]
    return Memory(
        tensors=lambda: (tbe.weights_host, [tbe.momentum1_host] if states else []),
        first_weights=[weight.storage_offset() for weight in weights],
        first_states=[[state.storage_offset() for state in states]] if states else [],
        widths=[weight.shape[1] for weight in weights],
    )


class FusedVectorKernel:
    """The vector of each id: the tables are stacked into one, and each id is a bag of length 1.

    fbgemm has kernels that do not pool; their backward takes more than ten times as long on a CPU.

    Args:
        tables: Rectangles of one width, data type, optimizer and memory location.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.touched: TouchedRows | None = None
        self.changed: TouchedRows | None = None
        self.table_of_lookup = list(table_of_lookup)
        self._stack = StackedTables(self.tables, table_of_lookup, device)
        table, rows = self.tables[0], self._stack.num_rows
        config = replace(table.config, num_embeddings=rows)
        stacked = table if len(self.tables) == 1 else replace(table, config=config, rows=Span(0, rows))
        self._inner = FusedKernel([stacked], [0], device)
        self._offsets = torch.arange(1, device=device)

    def __repr__(self) -> str:
        return f"FusedVectorKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def lookup(self, lookups: Lookups) -> torch.Tensor:
        if self.touched is not None:
            self.touched.add(lookups)
        if self.changed is not None:
            self.changed.add(lookups)
        num_ids = lookups.ids.numel()
        if self._offsets.numel() <= num_ids:
            # Outside of inference mode: the offsets are kept, and backward cannot save an inference tensor.
            with torch.inference_mode(False):
                self._offsets = torch.arange(2 * num_ids + 1, device=self._offsets.device)
        return self._inner.lookup(Lookups(self._stack.ids(lookups), self._offsets[: num_ids + 1], None))

    def weights(self) -> list[torch.Tensor]:
        (stacked,) = self._inner.weights()
        return self._stack.split(stacked)

    def states(self) -> list[dict[str, torch.Tensor]]:
        (stacked,) = self._inner.states()
        by_name = {name: self._stack.split(state) for name, state in stacked.items()}
        return [{name: states[table] for name, states in by_name.items()} for table in range(len(self.tables))]

    write_back = of_inner("write_back")
    learning_rate = of_inner("learning_rate")
    iteration = of_inner("iteration")


class CacheGuard:
    """Refuses a lookup between the forward and the backward of another one if tables have a device cache.

    The second lookup could evict rows that the first one's backward updates in the cache. The plan decides, not this
    rank's tables, so that every rank raises.

    Args:
        tables: Names of the tables with a cache.
    """

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables = list(tables)
        self._lookups = UpdateCount()

    @classmethod
    def of(cls, plan: Mapping[str, ParameterSharding], device: torch.device) -> CacheGuard | None:
        """The guard of a collection with this plan, or None if no table has a cache on this device."""
        cached = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
        tables = [name for name, table in plan.items() if device.type == "cuda" and table.compute_kernel == cached]
        return cls(tables) if tables else None

    def check(self) -> None:
        """Call before a lookup.

        Raises:
            RuntimeError: The backward of an earlier lookup has not run.
        """
        if self._lookups.pending:
            raise RuntimeError(
                f"tables {self._tables}: a second lookup before the backward of the first, with kernel "
                "'fused_uvm_caching'; run the backward first, drop the first result, or use kernel 'fused_uvm'"
            )

    def watch(self, vectors: torch.Tensor) -> None:
        """Call after a lookup, with its result."""
        self._lookups.expect(vectors)
