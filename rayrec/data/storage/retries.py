"""Tries again what may have failed for a passing reason: a network, a storage service that is busy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from rayrec.data.errors import DataError

T = TypeVar("T")

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 8.0


def with_retries(work: Callable[[], T], retries: int) -> T:
    """The result of `work`, tried again after a wait that doubles when a read failed for a reason that may pass.

    Raises:
        DataError: what the last try raised.
    """
    wait_s = FIRST_WAIT_S
    for _ in range(retries):
        try:
            return work()
        except DataError as error:
            if not _may_pass(error):
                raise
        time.sleep(wait_s * random.uniform(0.5, 1.0))  # ranks that failed together should not come back together
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    return work()


def _may_pass(error: DataError) -> bool:
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
