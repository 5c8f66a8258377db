"""How ranks stay in step: a small exchange before every step says how many rows it has and whether anyone failed.

It runs on the CPU (gloo) beside the exchanges of the model, so that a rank whose data is bad can tell the others before
they wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from rayrec.distributed.comm import Group, all_gather, all_gather_object, all_reduce
from rayrec.models import Batch
from rayrec.train.errors import TrainError, describe, is_retryable

T = TypeVar("T")


class RankError(TrainError):
    """A rank failed; raised alike on every rank. `retry`: whether another attempt may end otherwise."""

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True, slots=True)
class Control:
    """The group that joins the ranks for small exchanges on the CPU."""

    rank: int
    world_size: int
    group: Group

    def load(
        self, rows: int, weight: float, wait_s: float = 0.0, error: BaseException | None = None
    ) -> tuple[int, float, float]:
        """Rows that all ranks together bring to the next step, their weights' sum, and how long the rank that waited
        longest has waited for them; costs one all-gather of four numbers.

        Raises:
            RankError: on every rank, if any rank brought an error.
        """
        mine = torch.tensor([rows, weight, wait_s, error is not None], dtype=torch.float64)
        by_rank = all_gather(mine, self.group)
        all_rows, all_weight, _, failed = by_rank.sum(dim=0).tolist()
        if failed:
            self._raise(error)
        return int(all_rows), all_weight, float(by_rank[:, 2].max())

    def together(self, act: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on any, it fails on all with that rank's error.

        For acts that exchange nothing themselves.

        Raises:
            RankError: it failed somewhere.
        """
        error, value = None, None
        try:
            value = act()
        except Exception as caught:
            error = caught
        self.load(0, 0.0, error=error)
        return value  # type: ignore[return-value]

    def _raise(self, error: BaseException | None) -> None:
        mine = None if error is None else (describe(error), is_retryable(error))
        everyone = all_gather_object(mine, self.group)
        failures = [(rank, *failure) for rank, failure in enumerate(everyone) if failure is not None]
        lasting = [failure for failure in failures if not failure[2]]
        _, message, retry = (lasting or failures)[0]
        raise RankError(message, retry) from error

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each number added up over the ranks; one all-reduce."""
        return [float(x) for x in all_reduce(torch.tensor(values, dtype=torch.float64), self.group).tolist()]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return all_gather_object(value, self.group)


class Stream(Protocol):
    """What `rayrec.data.BatchStream` gives: batches, each with the reading position after it."""

    start_cursor: Any

    def __iter__(self) -> Iterator[tuple[Batch, Any]]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one rank.

    Args:
        batch: this rank's rows; none if it has run out.
        rows: rows of all ranks in this step.
        weight: sum of the weights of this rank's rows; how many there are where they have none.
        share: this rank's part of the weights of all ranks in this step, in [0, 1].
        cursor: this rank's reading position after the batch.
        wait_s: seconds that the rank which got its batch last has waited for it; the others wait for that rank.
    """

    batch: Batch
    rows: int
    weight: float
    share: float
    cursor: Any
    wait_s: float

    def on(self, device: torch.device) -> Turn:
        """The same with the batch on `device`."""
        return self if device.type == "cpu" else replace(self, batch=self.batch.to(device, non_blocking=True))


def in_step(stream: Stream, empty: Batch, control: Control, since: float | None = None) -> Iterator[Turn]:
    """This rank's batches, as many steps as the rank with the most has; a rank that runs out goes on with `empty`.

    Args:
        since: when waiting for the first batch began (`time.perf_counter`), if that was before this call.

    Raises:
        RankError: on every rank, if reading failed on any.
    """
    batches, cursor, more = iter(stream), stream.start_cursor, True
    while True:
        batch, error = empty, None
        began, since = since or time.perf_counter(), None
        if more:
            try:
                found = next(batches, None)
            except Exception as caught:
                found, error = None, caught
            more = found is not None
            if found is not None:
                batch, cursor = found
        weight = batch.total_weight
        rows, all_weight, wait_s = control.load(batch.rows, weight, time.perf_counter() - began, error)
        if rows == 0:
            return
        yield Turn(batch, rows, weight, weight / all_weight if all_weight else 0.0, cursor, wait_s)


def due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after this one."""
    return step % every == 0
