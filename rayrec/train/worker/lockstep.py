"""How ranks stay in step: a small exchange before every step says how many rows it has and whether anyone failed.

It runs on the CPU (gloo) beside the exchanges of the model, so that a rank with bad data can inform the others before
they wait for it. Every exchange carries its purpose and number, so ranks that disagree raise an error.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Any, NamedTuple, TypeVar

import torch

from rayrec.data import BatchStream, MixedStream
from rayrec.distributed.comm import Group, all_gather, all_gather_object
from rayrec.distributed.comm.trace import ROWS, span
from rayrec.models import Batch
from rayrec.train.errors import TrainError, describe, is_retryable

T = TypeVar("T")
VALUES = 6  # numbers that one exchange carries; all exchanges are of one size, so that different kinds are still paired


class RankError(TrainError):
    """A rank failed; raised alike on every rank. `retry`: whether another attempt may end otherwise."""

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class NotFiniteError(RankError):
    """The loss or a dense parameter is not a finite number any more."""


class StopRequested(Exception):
    """Raised alike on every rank, between two steps, after the driver has requested a stop."""


class Purpose(IntEnum):
    """What an exchange is for."""

    STEP = auto()
    EVALUATION_STEP = auto()
    CHECK = auto()
    SUM = auto()
    GATHER = auto()

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Load(NamedTuple):
    """What all ranks bring to a step: rows, their weights' sum, the longest wait for them, whether to stop after it;
    and rank 0's clock, so that all agree on what is due by time."""

    rows: int
    weight: float
    wait_s: float
    stop: bool
    clock: float


@dataclass(frozen=True, slots=True)
class Control:
    """The group that joins the ranks for small exchanges on the CPU.

    Args:
        stop_requested: whether this rank knows that the run is to stop; called at every step.
        numbers: of this rank's exchanges.
    """

    rank: int
    world_size: int
    group: Group
    stop_requested: Callable[[], bool] = lambda: False
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def load(
        self,
        rows: int,
        weight: float,
        wait_s: float = 0.0,
        error: BaseException | None = None,
        purpose: Purpose = Purpose.STEP,
    ) -> Load:
        """What all ranks bring to the next step; one exchange.

        Raises:
            RankError: on every rank, if any rank brought an error, or they are not at the same exchange.
        """
        mine = [rows, weight, wait_s, float(self.stop_requested()), time.monotonic()]
        by_rank = self._exchange(purpose, mine, error)
        all_rows, all_weight, _, stop = by_rank.sum(dim=0).tolist()[:4]
        return Load(int(all_rows), all_weight, float(by_rank[:, 2].max()), bool(stop), float(by_rank[0, 4]))

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
        self._exchange(Purpose.CHECK, [], error)
        return value  # type: ignore[return-value]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each of at most `VALUES` numbers added up over the ranks; one exchange."""
        return [float(x) for x in self._exchange(Purpose.SUM, values).sum(dim=0)[: len(values)].tolist()]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        self._exchange(Purpose.GATHER, [])
        return all_gather_object(value, self.group)

    def _exchange(self, purpose: Purpose, values: Sequence[float], error: BaseException | None = None) -> torch.Tensor:
        """`[W, VALUES]`: every rank's numbers.

        Raises:
            RankError: ranks are at unlike exchanges, or one brought an error.
        """
        assert len(values) <= VALUES, "an exchange has room for few numbers"
        header = [purpose, next(self.numbers), error is not None]
        mine = torch.tensor([*header, *values, *[0.0] * (VALUES - len(values))], dtype=torch.float64)
        by_rank = all_gather(mine, self.group)
        if (by_rank[:, :2] != mine[:2]).any():
            self._refuse_unlike(by_rank)
        if by_rank[:, 2].any():
            self._raise(error)
        return by_rank[:, 3:]

    def _refuse_unlike(self, by_rank: torch.Tensor) -> None:
        places = [
            f"rank {r}: {Purpose(int(p))} (exchange {int(n)})" for r, (p, n) in enumerate(by_rank[:, :2].tolist())
        ]
        raise RankError(
            f"ranks are not at the same place: {'; '.join(places)}; what a model or a callback does must not depend on "
            f"the rank"
        )

    def _raise(self, error: BaseException | None) -> None:
        mine = None if error is None else (describe(error), is_retryable(error))
        everyone = all_gather_object(mine, self.group)
        failures = [(rank, *failure) for rank, failure in enumerate(everyone) if failure is not None]
        lasting = [failure for failure in failures if not failure[2]]
        _, message, retry = (lasting or failures)[0]
        raise RankError(message, retry) from error


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one rank brings to one step.

    Args:
        batch: this rank's rows; none if it has run out.
        rows: rows of all ranks in this step.
        weight: sum of the weights of this rank's rows; how many there are where they have none.
        share: this rank's part of the weights of all ranks in this step, in [0, 1].
        cursor: this rank's reading position after the batch.
        wait_s: seconds that the rank which got its batch last has waited for it; the others wait for that rank.
        stop: whether the run is to stop after this step.
        clock: rank 0's clock.
    """

    batch: Batch
    rows: int
    weight: float
    share: float
    cursor: Any
    wait_s: float
    stop: bool = False
    clock: float = 0.0

    def on(self, device: torch.device) -> StepInput:
        """The same with the batch on `device`."""
        if device.type == "cpu":
            return self
        return replace(self, batch=self.batch.pin_memory().to(device, non_blocking=True))


def in_step(
    stream: BatchStream | MixedStream,
    empty: Batch,
    control: Control,
    since: float | None = None,
    purpose: Purpose = Purpose.STEP,
) -> Iterator[StepInput]:
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
                with span(ROWS):
                    found = next(batches, None)
            except Exception as caught:
                found, error = None, caught
            more = found is not None
            if found is not None:
                batch, cursor = found
        weight = batch.total_weight
        with span(ROWS):
            load = control.load(batch.rows, weight, time.perf_counter() - began, error, purpose)
        if load.rows == 0:
            return
        share = weight / load.weight if load.weight else 0.0
        yield StepInput(batch, load.rows, weight, share, cursor, load.wait_s, load.stop, load.clock)


class Every:
    """When something is done that comes every so many steps (None: not by steps), or seconds, or both.

    Seconds are those of rank 0's clock, so that all ranks agree, from the first step on that is looked at.
    """

    def __init__(self, steps: int | None, seconds: float = math.inf) -> None:
        self._steps, self._seconds = steps, seconds
        self._since: float | None = None

    def is_due(self, step: int, clock: float) -> bool:
        """Whether it is done after this step; asked once after each."""
        if self._since is None:
            self._since = clock
        by_step = self._steps is not None and step % self._steps == 0
        by_time = clock - self._since >= self._seconds
        if by_step or by_time:
            self._since = clock
        return by_step or by_time

    def restart(self) -> None:
        """The time up to the next step does not count."""
        self._since = None
