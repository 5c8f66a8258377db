"""Keeps ranks in lockstep: before every step, a small collective exchanges the number of rows and errors.

It runs on the CPU (gloo), separate from the collectives of the model, so that a rank with bad data can report its error
before other ranks wait for it. Every exchange carries its purpose and number, so that ranks out of step raise an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Any, NamedTuple, TypeVar

import torch

from rayrec._runtime.interval import Interval
from rayrec.data import BatchStream, MixedStream
from rayrec.distributed.comm import Group, all_gather, all_gather_object, combine, combine_objects
from rayrec.distributed.comm.trace import ROWS, span
from rayrec.models import Batch
from rayrec.train.errors import TrainError, describe, is_retryable

T = TypeVar("T")
VALUES = 6  # sums per exchange; all have the same size, so that even mismatched exchanges complete
MAXIMA = 6  # of an exchange: purpose, number (both also negative, for the minima), whether a rank failed, a time


class RankError(TrainError):
    """A rank failed; every rank raises the same error.

    Args:
        retry: another attempt may succeed.
    """

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class NotFiniteError(RankError):
    """The loss or a dense parameter is not finite."""


class StopRequested(Exception):
    """Raised on every rank between two steps, after the driver has requested a stop."""


class Purpose(IntEnum):
    """The purpose of an exchange."""

    STEP = auto()
    EVALUATION_STEP = auto()
    CHECK = auto()
    SUM = auto()
    GATHER = auto()

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Load(NamedTuple):
    """Totals over ranks for a step: rows, weight sum, longest data wait, stop flag.

    `clock` is rank 0's clock, by which all ranks make the same decisions about time. `evaluated`: rank 0 has results of
    background evaluations.
    """

    rows: int
    weight: float
    wait_s: float
    stop: bool
    clock: float
    evaluated: bool


@dataclass(frozen=True, slots=True)
class Control:
    """The process group for small exchanges on the CPU.

    Args:
        stop_requested: returns whether this rank knows of a stop request; called at every step.
        evaluated: returns whether this rank has results of background evaluations; called at every step.
        numbers: counts this rank's exchanges.
    """

    rank: int
    world_size: int
    group: Group
    stop_requested: Callable[[], bool] = lambda: False
    evaluated: Callable[[], bool] = lambda: False
    numbers: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def load(
        self,
        rows: int,
        weight: float,
        wait_s: float = 0.0,
        error: BaseException | None = None,
        purpose: Purpose = Purpose.STEP,
    ) -> Load:
        """Totals over ranks for the next step; one exchange.

        Args:
            error: error of this rank.

        Raises:
            RankError: on every rank, if some rank has an error, or if they are not at the same exchange.
        """
        clock = time.monotonic() if self.rank == 0 else 0.0
        mine = [rows, weight, float(self.stop_requested()), clock, float(self.evaluated())]
        (all_rows, all_weight, stop, clock, evaluated, *_), wait_s = self._exchange(purpose, mine, error, wait_s)
        return Load(int(all_rows), all_weight, wait_s, bool(stop), clock, bool(evaluated))

    def together(self, act: Callable[[], T]) -> T:
        """Call a function on every rank, and raise on all ranks if it fails on some. It must not use collectives.

        Raises:
            RankError: it failed on some rank.
        """
        error, value = None, None
        try:
            value = act()
        except Exception as caught:
            error = caught
        self._exchange(Purpose.CHECK, [], error)
        return value  # type: ignore[return-value]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks of at most `VALUES` numbers; one exchange."""
        return self._exchange(Purpose.SUM, values)[0][: len(values)]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        self._exchange(Purpose.GATHER, [])
        return all_gather_object(value, self.group)

    def merged(self, value: T, merge: Callable[[T, T], T]) -> T:
        """The values of all ranks merged to one. Unlike in `gather`, the messages that follow one another grow with the
        logarithm of the number of ranks.

        Args:
            merge: from two values, of consecutive ranks, to one; associative.

        Raises:
            Exception: on every rank, if `merge` failed on one.
        """
        self._exchange(Purpose.GATHER, [])
        return combine_objects(value, self.group, merge)

    def _exchange(
        self, purpose: Purpose, values: Sequence[float], error: BaseException | None = None, time_s: float = 0.0
    ) -> tuple[list[float], float]:
        """(`VALUES` sums over ranks, the largest `time_s` of a rank)

        Raises:
            RankError: ranks are at different exchanges, or one has an error.
        """
        assert len(values) <= VALUES, "too many numbers for an exchange"
        number = next(self.numbers)
        maxima = [purpose, -purpose, number, -number, error is not None, time_s]
        mine = torch.tensor([*maxima, *values, *[0.0] * (VALUES - len(values))], dtype=torch.float64)
        totals = combine(mine, self.group, _merge).tolist()
        last_purpose, first_purpose, last_number, first_number, failed, longest_s = totals[:MAXIMA]
        if last_purpose != -first_purpose or last_number != -first_number:
            self._refuse_mismatch(purpose, number)
        if failed:
            self._raise(error)
        return totals[MAXIMA:], longest_s

    def _refuse_mismatch(self, purpose: Purpose, number: int) -> None:
        by_rank = all_gather(torch.tensor([purpose, number]), self.group).tolist()
        exchanges = [f"rank {r}: {Purpose(p)} (exchange {n})" for r, (p, n) in enumerate(by_rank)]
        raise RankError(
            f"ranks are not at the same exchange: {'; '.join(exchanges)}; what a model or a callback does must not "
            f"depend on the rank"
        )

    def _raise(self, error: BaseException | None) -> None:
        mine = None if error is None else (describe(error), is_retryable(error))
        by_rank = all_gather_object(mine, self.group)
        failures = [(rank, *failure) for rank, failure in enumerate(by_rank) if failure is not None]
        permanent = [failure for failure in failures if not failure[2]]
        _, message, retry = (permanent or failures)[0]
        raise RankError(message, retry) from error


def _merge(ranks: torch.Tensor) -> torch.Tensor:
    """The maxima and sums of an exchange, from those of several ranks."""
    return torch.cat([ranks[:, :MAXIMA].amax(0), ranks[:, MAXIMA:].sum(0)])


@dataclass(frozen=True, slots=True)
class StepInput:
    """One rank's input of a step.

    Args:
        batch: this rank's rows; empty if it has run out.
        rows: rows of all ranks in this step.
        weight: sum of the weights of this rank's rows, or their number without weights.
        share: this rank's fraction of the weights of all ranks, in [0, 1].
        cursor: this rank's reading position after the batch.
        wait_s: longest wait of a rank for its batch, in seconds.
        stop: whether to stop after this step.
        clock: clock of rank 0, in seconds.
        evaluated: whether rank 0 has results of background evaluations.
    """

    batch: Batch
    rows: int
    weight: float
    share: float
    cursor: Any
    wait_s: float
    stop: bool = False
    clock: float = 0.0
    evaluated: bool = False

    def on(self, device: torch.device) -> StepInput:
        """This input with the batch on `device`."""
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
    """The inputs of this rank, until no rank has rows. A rank without rows continues with the batch `empty`.

    Args:
        since: start of the wait for the first batch (`time.perf_counter`); default: this call.

    Raises:
        RankError: on every rank, if reading failed on some rank.
    """
    batches, cursor, has_rows = iter(stream), stream.start_cursor, True
    while True:
        batch, error = empty, None
        start, since = since or time.perf_counter(), None
        if has_rows:
            try:
                with span(ROWS):
                    item = next(batches, None)
            except Exception as caught:
                item, error = None, caught
            has_rows = item is not None
            if item is not None:
                batch, cursor = item
        weight = batch.total_weight
        with span(ROWS):
            load = control.load(batch.rows, weight, time.perf_counter() - start, error, purpose)
        if load.rows == 0:
            return
        share = weight / load.weight if load.weight else 0.0
        yield StepInput(batch, load.rows, weight, share, cursor, load.wait_s, load.stop, load.clock, load.evaluated)


class Every:
    """Decides when an action is due that repeats at an interval.

    Seconds count by rank 0's clock, so that all ranks agree, from the first call of `is_due`.

    Args:
        interval: None: never.
    """

    def __init__(self, interval: Interval | None) -> None:
        self._interval = interval
        self._since: float | None = None
        self._begins = interval is not None and interval.seconds is not None  # until the first duration has passed

    def is_due(self, step: int, clock: float) -> bool:
        """Whether the action is due after this step. Call once after each step."""
        if self._interval is None:
            return False
        steps, seconds = self._interval.steps, self._interval.seconds
        if steps is not None:
            return step % steps == 0
        assert seconds is not None
        if self._since is None:
            self._since = clock
        if clock - self._since < seconds:
            return False
        self._since, self._begins = clock, False
        return True

    def is_early(self, step: int) -> bool:
        """Whether to log this step although the first duration has not passed: steps 1, 2, 3, 4, 6, 8, 12, 16, …

        With a duration alone, a run that ends sooner would have one point in its charts.
        """
        power = 1 << (step.bit_length() - 1)
        return self._begins and (step == power or 2 * step == 3 * power)

    def restart(self) -> None:
        """Restart the clock at the next step."""
        self._since = None
