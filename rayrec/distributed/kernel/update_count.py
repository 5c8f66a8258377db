"""Counts of updates, and of lookups without their backward so far."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakSet

import torch

from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding


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
            update = _Update(self, self._pending)
            if out.grad_fn is None:
                out.register_hook(update)
            else:
                out.grad_fn.register_prehook(update)


class _Update:
    """An autograd hook: counts an update when its backward starts."""

    def __init__(self, count: UpdateCount, pending: WeakSet[_Update]) -> None:
        self._count, self._pending = count, pending
        pending.add(self)

    def __call__(self, *_: object) -> None:
        self._pending.discard(self)
        self._count.done += 1


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
