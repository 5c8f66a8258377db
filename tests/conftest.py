"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("RAYREC_PRETEND_GPUS"):
    import tests.dryrun.guard  # noqa: F401  (before torch)

import torch

from tests.device import PRETENDED
from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    torch.set_num_threads(1)
    if PRETENDED:
        from tests.dryrun.ranks import pretend

        pretend()
    yield
    close_pools()
