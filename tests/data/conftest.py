"""Fixtures of the data tests: Ray, an S3 server, and small limits of readers and vocabularies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayrec.data.mapping import vocabulary
from rayrec.data.source import footers, slices
from rayrec.data.stream import ray_reader, readers
from tests.s3 import s3_server


@pytest.fixture(scope="package")
def running_ray() -> Iterator[None]:
    """A Ray with 2 CPUs for all tests of this folder."""
    import ray

    # Tasks import the tests' modules, as this process does.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        runtime_env={"env_vars": environment},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of an S3 server, with its keys in the environment."""
    with s3_server() as address:
        yield address


@pytest.fixture
def auto_reader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets when `reader: auto` uses Ray: after how many rows, and from how many cores per rank on."""

    def set_limits(head_rows: int, cores: int = 2) -> None:
        for name, value in (("HEAD_ROWS", head_rows), ("CORES_FOR_RAY", cores)):
            monkeypatch.setattr(readers, name, value)

    return set_limits


@pytest.fixture
def index_above(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of ids above which a vocabulary is looked up in an index file."""
    return lambda size: monkeypatch.setattr(vocabulary, "_IN_MEMORY", size)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose footers were read from the files themselves, not from an index."""
    uris: list[str] = []
    read_footer = footers.read_footer
    monkeypatch.setattr(footers, "read_footer", lambda uri: uris.append(uri) or read_footer(uri))
    return uris


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The files and row groups whose decoding began."""
    groups: list[tuple[str, int]] = []
    begin = slices._begin
    monkeypatch.setattr(
        slices, "_begin", lambda part, *rest: groups.append((part.uri, part.row_group)) or begin(part, *rest)
    )
    return groups


@pytest.fixture
def catalogs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets pyiceberg's settings of catalogs, which it reads once a process: NAME__URI=…, NAME__WAREHOUSE=…"""
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    def set_all(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__{name}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())

    return set_all


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was given to Ray Data to read."""
    given: list[Any] = []
    dataset = ray_reader._dataset
    monkeypatch.setattr(ray_reader, "_dataset", lambda *all, **more: given.append(all) or dataset(*all, **more))
    return given
