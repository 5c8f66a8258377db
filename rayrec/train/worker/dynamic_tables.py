"""Dynamic ids in training and evaluation: batches of ids become batches of rows, and rows of new ids are reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from rayrec.checkpoint.increments import AnyReader
from rayrec.checkpoint.rectangles import PIECE_BYTES, Rectangle, Rectangles
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.collections.sharded_table import ShardedTable
from rayrec.distributed.comm import Group, all_gather_object, exchange_messages
from rayrec.dynamic_ids import Fresh, SharedMap, TableMaps, cut, first_weights, map_of, row_seeds
from rayrec.models import Batch, Retriever
from rayrec.train.errors import TrainError
from rayrec.train.setup.dynamic_ids import found, ids_of, places_of, with_rows
from rayrec.train.setup.earlier_ids import EarlierIds
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
        self._group, self._module = group, model.module
        self._paths, by_name = dict(model.tables()), dict[str, list[ShardedTable]]()
        for name, table in self._paths.items():
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
        places = places_of(batch.sparse, self.maps.shared)
        rows, fresh = self.maps.step(ids_of(batch.sparse, self.maps.shared), times, number, places[1])
        for shared, tables, each in zip(self.maps.shared, self._tables, fresh, strict=True):
            if each.rows.size:
                if isinstance(self._module, Retriever) and self._module.item in shared.features:
                    self._module.loss.renew(torch.from_numpy(each.rows))
                for table in tables:
                    table.renew_rows(torch.from_numpy(each.rows), _first_vectors(table, each))
        return with_rows(batch, self.maps.shared, rows, places)

    def rows_in_use(self, feature: str) -> torch.Tensor | None:
        """The rows of the table of a feature that ids have, in order; None if its ids are not dynamic."""
        own = self.maps.by_feature().get(feature)
        if own is None:
            return None
        rows = torch.from_numpy(own.listing().rows)
        return rows if self._group is None else torch.cat(all_gather_object(rows, self._group))

    def take_statistics(self, control: Control) -> dict[str, dict[str, float]]:
        """By map, for a line of metrics: rows in use, the share of full buckets, and since the last call the numbers of
        ids that were admitted, waiting, refused by a full bucket, evicted and expired, and the share of lookups with a
        row of their own."""
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

    def changed(self) -> dict[str, torch.Tensor]:
        """By key, the live marks of changes since `maps.track_changes`, for each position of this rank's range."""
        return {
            part.name: torch.from_numpy(part.changed)
            for part in self.maps.saved()
            if part.changed is not None and part.array.size
        }

    def finish_warm_start(self, loaded: Iterable[str]) -> None:
        """Call after the state of some maps was filled from another run. A clock that counts steps starts anew."""
        self.maps.finish_loading()
        for shared, own in zip(self.maps.shared, self.maps.maps, strict=True):
            if shared.name in loaded and not shared.timed:
                own.clock = 0
                own.last_seen[:] = 0

    def take_rows(self, name: str, earlier: EarlierIds, keys: Mapping[str, str], reader: AnyReader) -> int:
        """Fills a map with the ids of a run without dynamic ids, and the tables with their rows. Not a collective.

        Args:
            name: the map.
            keys: path of each table → its key in the checkpoint.
            reader: of the checkpoint.

        Returns:
            The number of ids that found no row.
        """
        number = next(number for number, shared in enumerate(self.maps.shared) if shared.name == name)
        own, saved = self.maps.maps[number], reader.index.tensors
        tables = [
            (table, key := keys[path], saved[key].size)
            for path, table in self._paths.items()
            if table in self._tables[number]
        ]
        ids, rows, counts, shared_rows = earlier.read(tables[0][2][0])
        placed = map_of(ids, own.config, 0, counts)
        part = cut(placed.ids, self.maps.rank, self.maps.ranks)
        own.load(part.state(), 0)
        source = placed.source.copy()
        source[source >= 0] = rows[source[source >= 0]]
        if shared_rows:
            fallback = own.layout.fallback_rows()
            source[fallback] = shared_rows.start + np.arange(len(fallback)) * len(shared_rows) // len(fallback)
        targets = np.flatnonzero(source >= 0)
        targets = targets[np.argsort(source[targets], kind="stable")]
        sources = source[targets]
        for table, key, size in tables:
            if size[1] != table.config.embedding_dim:
                raise TrainError(
                    f"init_from: table {table.config.name!r} has dim {table.config.embedding_dim}, but {size[1]} in "
                    "the checkpoint; change it, or list the table in init_from.fresh"
                )
            step = max(1, PIECE_BYTES // (4 * size[1]))
            for start in range(0, size[0], step):
                low, high = np.searchsorted(sources, (start, start + step))
                if low < high:
                    block = reader.tensor(key, slice(start, min(start + step, size[0])))
                    vectors = block[torch.from_numpy(sources[low:high] - start)].float()
                    table.set_rows(torch.from_numpy(targets[low:high]), vectors)
        return len(placed.dropped)


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
            torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed, of all devices, takes 80 µs an id
            config.init_fn(vector[None])
    return vectors


def _shown(total: Counter[str]) -> dict[str, float]:
    counts = ("rows", "rows_used", "admitted", "waiting", "refused", "evicted", "expired")
    shares = {
        "own_share": total["own"] / max(total["lookups"], 1),
        "full_share": total["full_buckets"] / total["buckets"],
    }
    return {**{name: total[name] for name in counts}, **shares}


def _exchange(messages: list[np.ndarray], group: Group) -> list[np.ndarray]:
    received = exchange_messages([[torch.from_numpy(message)] for message in messages], group)()
    return [message.numpy() for message in received]
