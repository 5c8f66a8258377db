"""The maps of a model's tables on one rank: ids of all ranks become rows, and rows that a new id takes are named.

A step has two exchanges. Each rank sends its ids to the ranks that own their buckets. An owner maps the ids of all
ranks in one step of the map, answers with rows, and tells every rank which rows an id took: a table may be sharded in
any way, and each rank resets the parts of these rows that it holds. The caller passes in the exchange, because this
package has no collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec._runtime.numba_loops import in_threads
from rayrec.dynamic_ids.clock import advance, newest_times
from rayrec.dynamic_ids.config import DynamicIds
from rayrec.dynamic_ids.id_map import BY_ROW, COUNTED, IdMap, Mapped
from rayrec.dynamic_ids.layout import HASHED, ZERO

Messages = list[np.ndarray]
Exchange = Callable[[Messages], Messages]
"""Sends message r to each rank r and returns the message of each rank; int64 vectors of any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMap:
    """Tables that are connected by features, and therefore have one map.

    Args:
        name: Name of the map in checkpoints, metrics and messages: its first table.
        tables: Names of the tables.
        features: Features whose ids the map holds.
        config: The rules of the map.
        timed: Whether the clock is event time. If not, it is the number of the step.
        drops: Whether an id without a row is left out in evaluation. If not, it has a fallback row.
    """

    name: str
    tables: tuple[str, ...]
    features: tuple[str, ...]
    config: DynamicIds
    timed: bool = False
    drops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Rows of a whole table that ids took in a step, and the ids. They are distinct."""

    rows: np.ndarray
    ids: np.ndarray


_NONE = np.empty(0, np.int64)
_NO_ROWS = Fresh(rows=_NONE, ids=_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRange:
    """A range of a state array of a whole table, as it is saved.

    Args:
        name: `<map>/<array>`.
        size: Length of the whole array in its first dimension.
        first: Position of the range.
        array: The live numbers, in a type that checkpoints have; loading writes them in place.
        changed: Live marks, for each position of the range, of what may have changed; None without `track_changes`.
    """

    name: str
    size: int
    first: int
    array: np.ndarray
    changed: np.ndarray | None = None


class TableMaps:
    """The buckets of all maps that a rank owns.

    Args:
        shared: The maps, in the same order on every rank.
        rank, ranks: This rank, and the number of ranks.
        exchange: Exchanges messages between the ranks; not called for one rank.
    """

    def __init__(self, shared: Sequence[SharedMap], rank: int, ranks: int, exchange: Exchange) -> None:
        self.shared = tuple(shared)
        self.maps = [IdMap(each.config, rank, ranks) for each in self.shared]
        self.rank, self.ranks, self._exchange = rank, ranks, exchange
        self._clocks = np.zeros(len(self.maps), np.int64)
        self._totals = [np.zeros(len(COUNTED), np.int64) for _ in self.maps]
        self._changed: list[tuple[np.ndarray, np.ndarray]] | None = None  # marks of rows and of buckets of each map

    def track_changes(self) -> None:
        """Marks what changes from now on, for checkpoints of the changes."""
        self._changed = [(np.zeros(len(m.identity), bool), np.zeros(len(m.buckets), bool)) for m in self.maps]

    def step(
        self,
        ids: Sequence[np.ndarray],
        times: np.ndarray | None,
        number: int,
        out: Sequence[np.ndarray | None] | None = None,
    ) -> tuple[list[np.ndarray], list[Fresh]]:
        """Maps the ids of a training step, and learns from them. A collective.

        Args:
            ids: For each map, this rank's ids, int64, with repetitions.
            times: Event times of this rank's rows in seconds; None without a time column.
            number: Number of the step, the clock of maps without a time.
            out: For each map, an array that its rows are written to; None for a new one.

        Returns:
            For each map, the row in the whole table of each id, and the rows to reset before the step's lookup, which
            are the same on every rank.
        """
        newest = _NONE if times is None else newest_times(times)
        outs = [None] * len(self.maps) if out is None else out
        if self.ranks == 1:
            alone = self._steps([(own_ids, [newest]) for own_ids in ids], number, outs)
            return [mapped.rows for mapped, _ in alone], [fresh for _, fresh in alone]
        splits, requests = self._ask(ids, newest)
        answers: list[Messages] = [[] for _ in requests]
        newest_of_ranks = [request.pop(0) for request in requests]
        parts_of = list(zip(*requests, strict=True))
        asked = [(np.concatenate(parts), newest_of_ranks) for parts in parts_of]
        done = self._steps(asked, number, [None] * len(self.maps))
        for own, parts, (mapped, fresh) in zip(self.maps, parts_of, done, strict=True):
            rows = np.split(mapped.rows + own.first_row, np.cumsum([len(part) for part in parts])[:-1])
            for answer, own_rows in zip(answers, rows, strict=True):
                answer += [own_rows, fresh.rows, fresh.ids]
        replies = self._answered(answers)
        rows_of = [
            split.joined([reply[3 * n] for reply in replies], into)
            for n, (split, into) in enumerate(zip(splits, outs, strict=True))
        ]
        taken_of = [[np.concatenate([reply[3 * n + k] for reply in replies]) for k in (1, 2)] for n in range(len(ids))]
        return rows_of, [Fresh(rows=rows, ids=new) for rows, new in taken_of]

    def _steps(
        self, asked: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]], number: int, outs: Sequence[np.ndarray | None]
    ) -> list[tuple[Mapped, Fresh]]:
        """The steps of all maps, on torch's threads: maps know nothing of each other."""
        done: dict[int, tuple[Mapped, Fresh]] = {}

        def run(start: int, stop: int) -> int:
            for n in range(start, stop):
                done[n] = self._step(n, *asked[n], number, outs[n])
            return 0

        in_threads(run, np.array([len(ids) for ids, _ in asked]))
        return [done[n] for n in range(len(asked))]

    def _step(
        self,
        position: int,
        ids: np.ndarray,
        newest_of_ranks: Sequence[np.ndarray],
        number: int,
        out: np.ndarray | None,
    ) -> tuple[Mapped, Fresh]:
        """A step of the owned buckets of a map, with local rows; and the rows of the whole table that an id took."""
        own, clock = self.maps[position], number
        if self.shared[position].timed:
            clock = advance(own.clock, newest_of_ranks)
            if not own.clock and clock:  # of a vocabulary, or before the first known time: seen at that time
                own.last_seen[own.score > 0] = clock
                self._mark(position, np.flatnonzero(own.score > 0), _NONE, _NONE)
        mapped = own.step(ids, clock, out=out)
        self._totals[position] += mapped.counted
        changes = mapped.changes
        self._mark(position, mapped.rows, changes.row, mapped.aged)
        if not len(changes.row):
            return mapped, _NO_ROWS
        taken = changes.taken
        return mapped, Fresh(rows=changes.row[taken] + own.first_row, ids=changes.new[taken])

    def _mark(self, position: int, looked_up: np.ndarray, changed: np.ndarray, aged: np.ndarray) -> None:
        """Marks rows that a step looked up, whose ids it changed, or whose ids lost counts without a lookup; and the
        buckets in which it counted an id."""
        if self._changed is None:
            return
        (rows, buckets), layout = self._changed[position], self.maps[position].layout
        rows[looked_up] = rows[changed] = rows[aged] = True
        without_row = looked_up[looked_up % layout.bucket_rows >= layout.own_rows]
        buckets[without_row // layout.bucket_rows] = buckets[changed // layout.bucket_rows] = True

    def find(self, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The row in the whole table of each id, for evaluation; changes nothing. A collective.

        Returns:
            For each map, rows int64; -1 for an id that is left out.
        """
        splits, requests = self._ask(ids, _NONE)
        answers: list[Messages] = [[] for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            for own, shared, part in zip(self.maps, self.shared, request[1:], strict=True):
                rows = own.find(part, ZERO if shared.drops else HASHED)
                rows[rows >= 0] += own.first_row
                answer.append(rows)
        replies = self._answered(answers)
        return [split.joined([reply[n] for reply in replies]) for n, split in enumerate(splits)]

    def _ask(self, ids: Sequence[np.ndarray], newest: np.ndarray) -> tuple[list[_Split], list[Messages]]:
        """Sends ids to their owners. Returns the splits, and what each rank asks: its newest times, then its ids."""
        splits = [_Split.of(own, each, self.ranks) for own, each in zip(self.maps, ids, strict=True)]
        sent = [[newest, *(split.parts[rank] for split in splits)] for rank in range(self.ranks)]
        return splits, self._answered(sent)

    def _answered(self, messages: list[Messages]) -> list[Messages]:
        """Exchanges a list of arrays with each rank."""
        if self.ranks == 1:
            return messages
        return [_unpacked(message) for message in self._exchange([_packed(arrays) for arrays in messages])]

    # -- state

    def saved(self) -> Iterator[SavedRange]:
        """The state for a checkpoint: ranges of whole tables, and the clocks, which every rank has."""
        for number, (shared, own) in enumerate(zip(self.shared, self.maps, strict=True)):
            self._clocks[number] = own.clock
            for name, array in own.state().items():
                per_row = name in BY_ROW
                size = own.layout.rows if per_row else own.layout.buckets
                first = own.first_row if per_row else own.buckets.start
                view = array.view(np.int32) if array.dtype == np.uint32 else array
                changed = None if self._changed is None else self._changed[number][0 if per_row else 1]
                if view.ndim == 1 or view.shape[1]:  # without min_count the filter has no cells
                    yield SavedRange(name=f"{shared.name}/{name}", size=size, first=first, array=view, changed=changed)
            clock = self._clocks[number : number + 1]
            yield SavedRange(name=f"{shared.name}/clock", size=1, first=0, array=clock)

    def finish_loading(self) -> None:
        """Call after the arrays of `saved` were filled."""
        for own, clock in zip(self.maps, self._clocks.tolist(), strict=True):
            own.clock = clock

    def take_statistics(self) -> dict[str, dict[str, int]]:
        """For each map, counts of the steps since the last call and of the rows in use; ranks' counts add up."""
        taken = {}
        for number, (shared, own) in enumerate(zip(self.shared, self.maps, strict=True)):
            counted = dict(zip(COUNTED, self._totals[number].tolist(), strict=True))
            taken[shared.name] = {**counted, **own.statistics()}
            self._totals[number][:] = 0
        return taken

    def by_feature(self) -> dict[str, IdMap]:
        """The map of each feature."""
        return {name: own for each, own in zip(self.shared, self.maps, strict=True) for name in each.features}

    @property
    def nbytes(self) -> int:
        """Bytes of the maps on this rank."""
        return sum(own.nbytes for own in self.maps)


def connected(tables: Iterable[tuple[str, Iterable[str]]], dynamic: Iterable[str]) -> list[tuple[list[str], list[str]]]:
    """Groups of tables, with their features, that are connected by dynamic features.

    Args:
        tables: Name and features of each table.
        dynamic: Names of the dynamic features.

    Returns:
        (names of the tables, names of the features in the order of `tables`) of each group with a dynamic feature.
    """
    chosen = set(dynamic)
    groups: list[tuple[list[str], list[str]]] = []
    for name, features in tables:
        own = list(features)
        if not chosen & {*own}:
            continue
        joined = [group for group in groups if {*group[1]} & {*own}]
        groups = [group for group in groups if group not in joined]
        names = [table for group in joined for table in group[0]] + [name]
        groups.append((names, list(dict.fromkeys([feature for group in joined for feature in group[1]] + own))))
    return groups


@dataclass(frozen=True, slots=True)
class _Split:
    """Ids by owner.

    Args:
        parts: The ids for each rank.
        order: The position of each sent id among the given ones; None if nothing was moved.
    """

    parts: Messages
    order: np.ndarray | None

    @classmethod
    def of(cls, own: IdMap, ids: np.ndarray, ranks: int) -> _Split:
        if ranks == 1:
            return cls([ids], None)
        owner = own.layout.owner(ids, ranks).astype(np.uint16)  # numpy sorts these by radix
        order = np.argsort(owner, kind="stable")
        return cls(np.split(ids[order], np.cumsum(np.bincount(owner, minlength=ranks))[:-1]), order)

    def joined(self, parts: Messages, out: np.ndarray | None = None) -> np.ndarray:
        """What each rank answered, in the order of the given ids."""
        if self.order is None:
            return parts[0]
        out = np.empty(len(self.order), np.int64) if out is None else out
        out[self.order] = np.concatenate(parts)
        return out


def _packed(arrays: Messages) -> np.ndarray:
    """Arrays as one message: their number, their lengths, their contents."""
    return np.concatenate([np.array([len(arrays), *map(len, arrays)], np.int64), *arrays])


def _unpacked(message: np.ndarray) -> Messages:
    count = int(message[0])
    return np.split(message[1 + count :], np.cumsum(message[1 : 1 + count])[:-1])
