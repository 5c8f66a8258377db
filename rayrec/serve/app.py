"""The ASGI application of a replica."""

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
    """The class that Ray Serve deploys. Empty: the ASGI application answers all requests."""


def application(config: ServeConfig) -> App:
    """The ASGI application of a replica, which computes on all cores of the replica."""
    # Ray imports this module itself, so imports at its top would not be quick ones.
    with quick_imports():
        import torch

        from rayrec.serve import v2_grpc
        from rayrec.serve.clients import Clients
        from rayrec.serve.http import App
        from rayrec.serve.service import Service, freeze_garbage

    torch.set_num_threads(config.cpus)
    logger = logging.getLogger("rayrec.serve")  # includes the audit lines
    if not logger.handlers:
        # The worker's log in Ray's folder. Serve's `sys.stderr` buffers a thousand lines.
        logger.addHandler(logging.StreamHandler(sys.__stderr__))
        logger.setLevel(logging.INFO)
    service = Service(config.models, config.limits, config.watch_s, config.log, config.cache_bytes, config.index)
    grpc_server = None
    if config.grpc_port is not None:
        grpc_server = partial(v2_grpc.serving, host=config.host, port=config.grpc_port, tls=config.tls)
    freeze_garbage()
    return App(service, Clients(config.clients), config.batching, grpc_server)
