"""A local S3 server for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def s3_server() -> Iterator[str]:
    """host:port of a server, with keys for it in the environment."""
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


@contextmanager
def s3_bucket(name: str) -> Iterator[str]:
    """Options of URIs in a new bucket on a server of its own."""
    import pyarrow.fs as pafs

    with s3_server() as server:
        options = f"?endpoint_override={server}&scheme=http&region=us-east-1"
        filesystem, _ = pafs.FileSystem.from_uri(f"s3://{name}{options}&allow_bucket_creation=true")
        filesystem.create_dir(name)
        yield options
