"""A Ray and an S3 server for the tests of the data path, where none is running yet."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


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
    from moto.server import ThreadedMotoServer

    before = {name: os.environ.get(name) for name in KEYS}
    os.environ.update(KEYS)
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"{host}:{port}"
    moto.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
