"""Dynamic ids in training and evaluation: batches of ids become batches of rows, and rows of new ids are reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm import Group, exchange_messages
from rayrec.dynamic_ids import Fresh, SharedMap, TableMaps, first_weights, row_seeds
from rayrec.models import Batch
from rayrec.train.errors import TrainError
from rayrec.train.setup.dynamic_ids import found, ids_of, with_rows
from rayrec.train.worker.lockstep import Control, StepInput


class DynamicTables:
    """The maps of a sharded model, on one rank. Methods are collectives unless documented otherwise.

    Args:
        shared: the maps.
        model: the sharded model, whose rows are reset.
        group: CPU group of all ranks; None for one rank.

    Raises:
        TrainError: a table has a dense kernel.
    """

    def __init__(self, shared: list[SharedMap], model: DistributedModelParallel, group: Group) -> None:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.maps = TableMaps(shared, rank, ranks, lambda messages: _exchange(messages, group))
        by_name: dict[str, list[ShardedTable]] = {}
        for name, table in model.tables().items():
            by_name.setdefault(name.rpartition(".")[2], []).append(table)
        self._tables = [[table for name in each.tables for table in by_name.get(name, ())] for each in shared]
        dense = sorted({table.config.name for tables in self._tables for table in tables if table.dense})
        if dense:
            raise TrainError(f"tables {dense} have dynamic ids and kernel `dense`; constrain them to `fused`")

    def trained(self, steps: Iterator[StepInput], done: Callable[[], int]) -> Iterator[StepInput]:
        """The inputs of training steps with rows. Rows that an id takes in a step are reset before the step begins.

        Args:
            steps: inputs with ids, on the host. The next one is taken when the step before is done.
            done: the number of steps before the current one.
        """
        for step in steps:
            yield replace(step, batch=self._trained(step.batch, done() + 1))

    def found(self, steps: Iterator[StepInput]) -> Iterator[StepInput]:
        """The inputs of an evaluation with rows. Changes nothing."""
        for step in steps:
            yield replace(step, batch=found(step.batch, self.maps))

    def _trained(self, batch: Batch, number: int) -> Batch:
        times = None if batch.time is None else batch.time.numpy()
        rows, fresh = self.maps.step(ids_of(batch.sparse, self.maps.shared), times, number)
        for tables, each in zip(self._tables, fresh, strict=True):
            if each.rows.size:
                for table in tables:
                    table.renew_rows(torch.from_numpy(each.rows), _first_vectors(table, each))
        return with_rows(batch, self.maps.shared, rows)

    def take_statistics(self, control: Control) -> dict[str, dict[str, float]]:
        """By map, for a line of metrics: rows in use, and of the steps since the last call, how many ids were admitted,
        waiting, refused by a full bucket, evicted and expired, and the share of lookups with a row of their own."""
        totals: dict[str, Counter[str]] = {each.name: Counter() for each in self.maps.shared}
        for of_rank in control.gather(self.maps.take_statistics()):
            for name, counts in of_rank.items():
                totals[name].update(counts)
        return {name: _shown(total) for name, total in totals.items()}

    def rectangles(self, names: Mapping[str, str] | None = None) -> dict[str, Rectangles]:
        """The state by key, to save, or to fill and finish with `maps.finish_loading`. Not a collective.

        Args:
            names: of some maps, their names in the keys; default: all maps, by their own names.
        """
        state = {}
        for part in self.maps.saved():
            own_name, _, array = part.name.partition("/")
            if names is None or own_name in names:
                offsets = (part.first, *(0 for _ in part.array.shape[1:]))
                own = [Rectangle(offsets, torch.from_numpy(part.array))] if part.array.size else []
                key = part.name if names is None else f"{names[own_name]}/{array}"
                state[key] = Rectangles((part.size, *part.array.shape[1:]), own)
        return state

    def finish_warm_start(self, loaded: Iterable[str]) -> None:
        """Call after the state of some maps was filled from another run. A clock that counts steps starts anew."""
        self.maps.finish_loading()
        for shared, own in zip(self.maps.shared, self.maps.maps, strict=True):
            if shared.name in loaded and not shared.timed:
                own.clock = 0
                own.last_seen[:] = 0


def _first_vectors(table: ShardedTable, fresh: Fresh) -> torch.Tensor:
    """First weights of ids, `[N, dim]` on the host."""
    config = table.config
    if config.init_fn is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        drawn = first_weights(fresh.ids, config.embedding_dim, table=config.name, seed=table.seed, low=low, high=high)
        return torch.from_numpy(drawn)
    vectors = torch.empty(len(fresh.ids), config.embedding_dim)
    with torch.random.fork_rng(devices=[]):
        for vector, seed in zip(vectors, row_seeds(fresh.ids, config.name, table.seed).tolist(), strict=True):
            torch.manual_seed(seed >> 1)
            config.init_fn(vector[None])
    return vectors


def _shown(total: Counter[str]) -> dict[str, float]:
    counts = ("rows", "rows_used", "admitted", "waiting", "refused", "evicted", "expired")
    return {**{name: total[name] for name in counts}, "own_share": total["own"] / max(total["lookups"], 1)}


def _exchange(messages: list[np.ndarray], group: Group) -> list[np.ndarray]:
    received = exchange_messages([[torch.from_numpy(message)] for message in messages], group)()
    return [message.numpy() for message in received]
