"""The Ray Serve application: replicas answer HTTP themselves, or stand behind HAProxy; never Serve's Python proxy."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rayrec._debug import debugging
from rayrec.local_ray import init_local, quiet_unless_debug
from rayrec.serve.http import App
from rayrec.serve.limits import Limits
from rayrec.serve.retrieval import Retrieval, check_index, newest_index
from rayrec.serve.service import ModelSpec, Service
from rayrec.serve.versions import check_version, newest

LOOPBACK = ("127.0.0.1", "localhost")
_LAST_PORT = 64_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of a service.

    Args:
        models: what is served.
        host: who may reach it; the machine itself by default.
        port: of HAProxy, behind which all replicas are; with `direct` of the first replica, the next one has the next.
        replicas: processes, each with `cpus` cores.
        direct: replicas answer HTTP themselves, at the lowest latency; one that is started anew may have another port.
        token: what requests must carry; None: none.
        watch_s: seconds between two looks for newer versions.
        name: of the Serve application; a cluster may run several services.
        route: prefix of the service's paths, "/" or such as "/ctr".
        index: of `POST /retrieve`: an index, or a folder of indexes of which the newest by name is served.
    """

    models: tuple[ModelSpec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    cpus: int = 1
    direct: bool = False
    token: str | None = field(default=None, repr=False)
    watch_s: float = 5.0
    name: str = "rayrec"
    route: str = "/"
    limits: Limits = field(default_factory=Limits)
    index: Path | None = None


def check(settings: Settings) -> None:
    """What can be known before anything is started: that the models are there and whole, and the port is free.

    Raises:
        ExportError: a path holds no export, or one that is damaged or outside its limits; names it.
        ValueError: a port that cannot be listened on, more cores than this machine has, or a route that is no path.
    """
    if not settings.name or not re.fullmatch(r"/|(/[\w.-]+)+", settings.route, re.ASCII):
        raise ValueError(f"--name {settings.name} --route {settings.route}: give a name, and a route such as /ctr")
    for spec in settings.models:
        check_version(newest(spec.path))
    if settings.index is not None:
        check_index(newest_index(settings.index))
    if not 0 < settings.port <= _LAST_PORT:
        raise ValueError(
            f"--port {settings.port}: choose one of 1 to {_LAST_PORT}; what comes after is for the service"
        )
    if os.environ.get("RAY_ADDRESS"):
        return  # of another machine nothing is known
    cores = len(os.sched_getaffinity(0))
    if settings.cpus > cores:
        raise ValueError(f"--cpus {settings.cpus}: this machine has {cores} cores")
    try:
        _bind(settings)
    except OSError as error:
        text = f"cannot listen on --host {settings.host} --port {settings.port}: {error.strerror}; choose another"
        raise ValueError(text) from error


def _bind(settings: Settings) -> None:
    """
    Raises:
        OSError: the address cannot be listened on.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((settings.host, settings.port))


def prepare_environment(settings: Settings) -> None:
    """What Serve reads from the environment, before Ray starts; what is set already stays."""
    wanted = {"RAY_worker_niceness": "0"}  # Ray's own 15 lets every other process of the machine go first
    wanted |= {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
    }
    if not settings.direct:
        wanted |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}
    else:
        last = settings.port + max(settings.replicas, 1) * 2
        wanted |= {
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(settings.port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(last),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # no balancer in front has to hear of it first
        }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """A service on the Ray that runs here, or a local one; gives its address once it answers, and ends it on leaving.

    Serve's other applications go on; Serve and Ray end with the service where they were started for it.

    Raises:
        ExportError, ValueError: as `check`; or an application of this name runs already.
        RuntimeError: it does not come up, or its route is another's; the text holds the reason.
    """
    check(settings)
    prepare_environment(settings)
    with _ray(settings) as shared:
        from ray import serve
        from ray.serve.config import HTTPOptions

        _check_free(settings)
        proxy_port = settings.port + 1000 if settings.direct else settings.port  # Serve's own proxy stays unused
        serve.start(http_options=HTTPOptions(host=settings.host, port=proxy_port))
        replica = serve.deployment(
            name="scorer",
            num_replicas=settings.replicas,
            max_ongoing_requests=4 * settings.limits.queue,  # most of them are refused; bodies on their way have room
            max_queued_requests=settings.limits.queue,
            ray_actor_options={"num_cpus": settings.cpus},
            health_check_period_s=2,
            health_check_timeout_s=10,
        )(serve.ingress(_application(settings))(Replica))
        try:
            serve.run(replica.bind(), name=settings.name, route_prefix=settings.route)
            host = settings.host if settings.host != "0.0.0.0" else "127.0.0.1"
            address = f"http://{host}:{settings.port}{settings.route.rstrip('/')}"
            _await(f"{address}/healthz")
            yield address
        finally:
            if shared:
                serve.delete(settings.name)
            else:
                with _unsaid():
                    serve.shutdown()
    if not shared:
        _await_port(settings)


@contextmanager
def _ray(settings: Settings) -> Iterator[bool]:
    """A connection to Ray; gives whether others use it as well."""
    import ray

    if ray.is_initialized():
        yield True
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, **quiet_unless_debug())
    else:
        init_local(settings.replicas * settings.cpus + 1)
    try:
        yield address is not None
    finally:
        ray.shutdown()


@contextmanager
def _unsaid() -> Iterator[None]:
    """Serve ends by having its controller killed, which Ray prints as an error with infinite retries."""
    if debugging():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _check_free(settings: Settings) -> None:
    """
    Raises:
        ValueError: Serve runs an application of this name, which it would replace.
    """
    from ray import serve

    if settings.name in serve.status().applications:
        raise ValueError(
            f"--name {settings.name}: this Ray serves an application of that name already; choose another --name and "
            f"--route, or end that one: python -c 'from ray import serve; serve.delete(\"{settings.name}\")'"
        )


def _await_port(settings: Settings) -> None:
    """Waits a while for the port to be free."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            _bind(settings)
            return
        except OSError:  # a replica's process is on its way out
            time.sleep(0.1)


class Replica:
    """A process of the service; the ASGI application beside it does the work."""


def _application(settings: Settings) -> Any:
    def build() -> App:
        return application(settings)

    return build


def application(settings: Settings) -> App:
    """The ASGI application of one replica, which scores on all of the replica's cores."""
    torch.set_num_threads(settings.cpus)
    service = Service(list(settings.models), limits=settings.limits, watch_s=settings.watch_s)
    retrieval = None if settings.index is None else Retrieval(newest_index(settings.index), settings.limits)
    return App(service, token=settings.token, retrieval=retrieval)


def read_token(path: Path | None) -> str | None:
    """The first line of a file.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file {path} cannot be read: {error}") from error
    if not token or not token.isascii() or len(token.split()) > 1:
        raise ValueError(f"--token-file {path} must hold one word of ASCII; write a long random one into it")
    return token


def _await(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer after {seconds:.0f} s: {error}") from error
            time.sleep(0.1)
