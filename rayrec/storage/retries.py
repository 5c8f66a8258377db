"""Retries reads that failed for a transient reason: the network, or busy or unreachable storage."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rayrec.storage.errors import DataError, DataUnavailable
from rayrec.storage.locations import open_filesystem

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 4.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to retry.

    Args:
        retries: retries of a read that fails while its storage responds.
        outage_s: seconds to wait for storage that does not respond.
    """

    retries: int = 3
    outage_s: float = 60.0


def waits_s(first_s: float | None = None, longest_s: float | None = None) -> Iterator[float]:
    """Seconds to wait between attempts: each wait is twice as long as the one before, up to a limit.

    Args:
        first_s: default 0.25 s.
        longest_s: default 4 s.
    """
    wait_s, limit_s = first_s or FIRST_WAIT_S, longest_s or LONGEST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, limit_s)


def with_patience(work: Callable[[], T], uri: str, patience: Patience) -> T:
    """The result of `work`, retried with exponential back-off after transient failures.

    While the storage responds, a read fails after a few retries; while it does not, retries continue for an outage.

    Args:
        uri: the file that `work` reads.

    Raises:
        DataUnavailable: the storage did not respond for `patience.outage_s`, and `work` raises `DataError`.
        DataError, OSError: the error of the last try.
    """
    failures, waits = 0, waits_s()
    outage_start: float | None = None
    while True:
        try:
            return work()
        except (DataError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
                raise
            if _answers(uri):
                failures, outage_start = failures + 1, None
                if failures > patience.retries:
                    raise
            else:
                outage_start = outage_start or time.monotonic()
                if time.monotonic() - outage_start >= patience.outage_s:
                    if isinstance(error, OSError):
                        raise
                    raise _unavailable(error, uri, patience) from error
        # Random, so that ranks that failed together do not retry together.
        time.sleep(next(waits) * random.uniform(0.5, 1.0))


def _answers(uri: str) -> bool:
    """Whether the storage of a file responds, even that the file does not exist."""
    try:
        filesystem, path = open_filesystem(uri)
        filesystem.get_file_info(path)
    except (OSError, DataError):
        return False
    return True


def _unavailable(error: DataError, uri: str, patience: Patience) -> DataUnavailable:
    return DataUnavailable(
        f"the storage has not answered for {patience.outage_s:g} s: {error.problem}",
        file=uri,
        fix="check storage and network, then start the run again: it resumes from its last checkpoint; "
        "data.read.patience_s sets how long it waits",
    )
