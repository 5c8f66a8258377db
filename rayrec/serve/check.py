"""What can be known before a service is started: models, files, and whether its port is free."""

from __future__ import annotations

import os

from rayrec.serve.clients import Clients, check_tls
from rayrec.serve.config import ServeConfig
from rayrec.serve.on_ray import wait_until_free
from rayrec.serve.retrieval import check_index, newest_index
from rayrec.serve.versions import check_version


def check(config: ServeConfig) -> None:
    """What can be known before anything is started: that models and files are there and whole, and the port is free.

    Raises:
        ExportError: a path holds no export, or one that is damaged or outside its limits; names it.
        ValueError: a port that cannot be listened on, more cores than this machine has, or a file that cannot be read.
    """
    for spec in config.models:
        check_version(spec.folder, config.cache_bytes)
    if config.index is not None:
        check_index(newest_index(config.index))
    Clients(config.clients)
    if config.tls is not None:
        check_tls(config.tls)
    if os.environ.get("RAY_ADDRESS"):
        return  # of another machine nothing is known
    cores = len(os.sched_getaffinity(0))
    if config.cpus > cores:
        raise ValueError(f"--cpus {config.cpus}: this machine has {cores} cores")
    try:
        wait_until_free(config)
    except OSError as error:
        text = f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}; choose another"
        raise ValueError(text) from error
