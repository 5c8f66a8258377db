"""A Ray for the tests of the data path, where none is running yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    import ray

    mine = not ray.is_initialized()
    if mine:
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    yield
    if mine:
        ray.shutdown()
