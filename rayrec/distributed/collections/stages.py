"""The stages of a collection's step, by its two executors. Ids and what ranks are told with them are one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from rayrec.distributed.comm.awaitable import Awaitable, Deferred, LazyAwaitable
from rayrec.distributed.comm.trace import IDS, LOOKUP, ROUTE, VECTORS, span, within
from rayrec.distributed.executors.replicated import OwnRows
from rayrec.distributed.executors.setup import Executor, Looked, Own
from rayrec.distributed.ids.exchange import HostIds, IdExchange
from rayrec.distributed.ids.receiver import RoutedIds
from rayrec.distributed.ids.routes import Output
from rayrec.distributed.ids.sender import Notice
from rayrec.distributed.kernel import Kernel
from rayrec.sparse import KeyedJaggedTensor

Ids = TypeVar("Ids", HostIds, RoutedIds)
Batch = TypeVar("Batch")
Replicated = Executor[OwnRows, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class StepIds(Generic[Ids, Own, Batch]):
    """A batch after `route`, or after `send`: its ids, what each executor keeps of it, and what the collection does."""

    ids: Ids
    sharded: Own
    replicated: OwnRows | None
    batch: Batch


@dataclass(frozen=True)
class StepVectors(Generic[Own, Looked, Batch]):
    """A batch after `lookup`: each executor's vectors."""

    ids: StepIds[RoutedIds, Own, Batch]
    sharded: Looked
    replicated: tuple[torch.Tensor, ...]


class Stages(Generic[Own, Looked]):
    """Both executors, stage after stage.

    Args:
        sharded: of the tables that are cut, which has a way for ids even if there are none.
        replicated: of the others; None where there are none.
    """

    def __init__(self, sharded: Executor[Own, Looked], replicated: Replicated | None) -> None:
        assert sharded.ids is not None
        self.exchange: IdExchange = sharded.ids
        self._sharded, self._replicated = sharded, replicated

    @property
    def executors(self) -> list[Executor[Any, Any]]:
        return [executor for executor in (self._sharded, self._replicated) if executor is not None]

    @property
    def kernels(self) -> list[Kernel]:
        """This rank's: those of sharded tables, then those of replicated ones."""
        return [kernel for executor in self.executors for kernel in executor.kernels]

    @property
    def blocks(self) -> list[list[Output]]:
        """The outputs of each tensor of the results."""
        return [block for executor in self.executors for block in executor.blocks]

    def route(self, kjt: KeyedJaggedTensor, problem: ValueError | None, batch: Batch) -> StepIds[HostIds, Own, Batch]:
        """Host work. Where there is a problem, waiting for `send` raises on every rank."""
        with span(ROUTE):
            sharded, own, counts = self._sharded.prepare(kjt), None, None
            if self._replicated is not None:
                replicated = self._replicated.prepare(kjt)
                own, counts = replicated.own, torch.tensor(replicated.counts, dtype=torch.int64)
            return StepIds(self.exchange.route(sharded.kjt, Notice(counts, problem)), sharded.own, own, batch)

    def send(self, step: StepIds[HostIds, Own, Batch]) -> Awaitable[StepIds[RoutedIds, Own, Batch]]:
        """Begins to send ids to the ranks that hold their rows."""
        ids = self.exchange.send(step.ids)
        return Deferred(within(IDS, lambda: StepIds(ids.wait(), step.sharded, step.replicated, step.batch)))

    def lookup(self, step: StepIds[RoutedIds, Own, Batch]) -> StepVectors[Own, Looked, Batch]:
        """This rank's rows for all ranks, and replicated tables for itself."""
        with span(LOOKUP):
            own = step.replicated
            replicated = () if self._replicated is None or own is None else self._replicated.lookup(step.ids, own)
            return StepVectors(step, self._sharded.lookup(step.ids, step.sharded), replicated)

    def output_dist(self, vectors: StepVectors[Own, Looked, Batch]) -> LazyAwaitable[list[torch.Tensor]]:
        """Begins to send vectors back; waits for the tensors of `blocks`."""
        step = vectors.ids
        results = [self._sharded.output_dist(vectors.sharded, step.ids, step.sharded)]
        if self._replicated is not None and step.replicated is not None:
            results.append(self._replicated.output_dist(vectors.replicated, step.ids, step.replicated))
        return Deferred(within(VECTORS, lambda: [tensor for result in results for tensor in result.wait()]))


def places_of(outputs: Sequence[Output], blocks: Sequence[Sequence[Output]]) -> list[tuple[int, Output]]:
    """For each output of a collection the tensor of the results that has it, and its columns there."""
    where = {(out.table, out.feature): (number, out) for number, block in enumerate(blocks) for out in block}
    return [where[output.table, output.feature] for output in outputs]
