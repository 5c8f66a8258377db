"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def _end_rank_pools() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pools()
