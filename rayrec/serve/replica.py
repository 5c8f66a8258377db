"""What a replica of the service runs."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import TYPE_CHECKING

from rayrec._runtime.imports import quick_imports
from rayrec.serve.config import ServeConfig

if TYPE_CHECKING:
    from rayrec.serve.http import App


class Replica:
    """A process of the service; the ASGI application beside it does the work."""


def application(config: ServeConfig) -> App:
    """The ASGI application of one replica, which scores on all of the replica's cores."""
    with quick_imports():  # here, as Ray itself imports what is above: a replica starts in less time
        import torch

        from rayrec.serve import v2_grpc
        from rayrec.serve.clients import Clients
        from rayrec.serve.http import App
        from rayrec.serve.retrieval import Retrieval, newest_index
        from rayrec.serve.service import Service, settle

    torch.set_num_threads(config.cpus)
    logger = logging.getLogger("rayrec.serve")  # to the worker's log in Ray's folder, audit lines among them
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.__stderr__))  # Serve's own `sys.stderr` waits for a thousand lines
        logger.setLevel(logging.INFO)
    service = Service(config.models, config.limits, config.watch_s, config.log, config.cache_bytes)
    beside = None
    if config.grpc_port is not None:
        beside = partial(v2_grpc.serving, host=config.host, port=config.grpc_port, tls=config.tls)
    retrieval = None if config.index is None else Retrieval(newest_index(config.index), config.limits)
    settle()
    return App(service, Clients(config.clients), config.batching, beside, retrieval)
