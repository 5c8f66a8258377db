"""A Ray and an S3 server for the tests of the data path, where none is running yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3 import s3_server


@pytest.fixture(scope="package")
def running_ray() -> Iterator[None]:
    """One Ray of 2 CPUs for all tests of this folder, from the first that asks for it."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of an S3 server, with keys for it in the environment."""
    with s3_server() as found:
        yield found
