"""`rayrec serve` on Ray Serve: it answers, loads a version that appears, and outlives a SIGKILL of its replica."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rayrec.train import export_run
from tests.inference.runs import train
from tests.s3 import s3_bucket
from tests.serve.test_object_storage import BUCKET, send
from tests.serve.test_service import another_version
from tests.serve.test_v2 import certificate

pytest.importorskip("ray.serve")
GOOD = {"user": 1, "item": 2, "tags": [1, 2], "age": 0.5}


def ask(port: int, path: str, body: Any = None, token: str = "") -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def until(condition: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = condition()
        except (OSError, urllib.error.URLError):
            found = None
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def first_that_answers(ports: list[int]) -> int | None:
    return next((port for port in ports if until(lambda: ask(port, "/healthz"), 0)), None)  # noqa: B023


def processes_under(root: int) -> set[int]:
    """Its children, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in {root, *found}} - found:
        found |= more
    return found


class Clients:
    """Ask again as soon as they are answered; after a failure a moment later."""

    def __init__(self, port: int, token: str, count: int = 3) -> None:
        self.answered, self.failed = list[float](), list[float]()
        self._port, self._token, self._stop = port, token, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                ask(self._port, "/score", {"rows": [GOOD]}, self._token)
                self.answered.append(time.monotonic())
            except (OSError, http.client.HTTPException):
                self.failed.append(time.monotonic())
                time.sleep(0.05)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def killed_before(command: list[str], environment: dict[str, str], folder: Path) -> None:
    """Start a service and kill its driver: its balancer ends, too, and leaves its port to the next service."""
    with open(folder / "told", "w") as told:
        service = subprocess.Popen(command, env=environment, stdout=told, start_new_session=True)
    try:
        assert until(lambda: "serving ctr" in (folder / "told").read_text(), 240), (folder / "told").read_text()
        balancers = balancers_of(service)
        left = files_of(balancers[0])
    finally:
        service.kill()
        service.wait()
    assert until(lambda: not any(map(is_haproxy, balancers)), 120), "HAProxy goes on"
    assert left.exists()
    shutil.rmtree(left)


def balancers_of(service: subprocess.Popen[bytes]) -> list[int]:
    found = [pid for pid in processes_under(service.pid) if is_haproxy(pid)]
    assert found
    return found


def files_of(balancer: int) -> Path:
    """The folder of its config."""
    words = Path(f"/proc/{balancer}/cmdline").read_text().split("\0")
    return Path(words[words.index("-f") + 1]).parents[1]


@pytest.mark.long(minutes=3)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("front", ["haproxy", "direct"])
def test_the_service_watches_for_versions_and_survives_the_loss_of_its_replica(tmp_path: Path, front: str) -> None:
    """Of a folder, on the port of a service whose driver was killed; without HAProxy, of a bucket."""
    model = export_run(train(tmp_path / "run"), tmp_path / "export").folder
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "token").write_text("s3cret\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(s3_bucket(BUCKET)) if front == "direct" else ""
        place = f"s3://{BUCKET}/ctr{options}" if options else str(models)

        def add(version: str) -> None:
            folder = another_version(model, models / version)
            if options:
                send(folder, f"s3://{BUCKET}/ctr/{version}{options}")

        add("v1")
        command = [sys.executable, "-m", "rayrec.cli", "serve", f"ctr={place}", "--port", str(port), "--watch", "0.5"]
        command += ["--token-file", str(tmp_path / "token"), *(["--direct"] if front == "direct" else [])]
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
        if front == "haproxy":
            killed_before(command, environment, tmp_path)
        with open(tmp_path / "told", "w") as told:
            service = subprocess.Popen(command, env=environment, stdout=told, start_new_session=True)
        started: set[int] = set()
        try:
            assert until(lambda: "serving ctr" in (tmp_path / "told").read_text(), 240), "the service does not come up"
            assert until(lambda: "next: curl" in (tmp_path / "told").read_text(), 120)
            balancer = files_of(balancers_of(service)[0]) if front == "haproxy" else None
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, "/score", {"rows": [GOOD]})
            assert ask(port, "/score", {"rows": [GOOD]}, "s3cret")["version"] == "v1"
            add("v2")
            assert until(lambda: ask(port, "/score", {"rows": [GOOD]}, "s3cret")["version"] == "v2", 120)
            replica = ask(port, "/healthz")["pid"]
            assert os.getpriority(os.PRIO_PROCESS, replica) == os.getpriority(os.PRIO_PROCESS, 0)
            clients = Clients(port, "s3cret")
            assert until(lambda: len(clients.answered) > 20, 180)
            killed = time.monotonic()
            os.kill(replica, signal.SIGKILL)
            ports = [port] if front == "haproxy" else [port, port + 1]  # the next one, where the old is not free yet
            back = until(lambda: first_that_answers(ports), 240)
            assert back and ask(back, "/healthz")["pid"] != replica, "the replica does not come back"
            if back == port:
                assert until(lambda: clients.answered[-1] > time.monotonic() - 0.5, 120)
            clients.close()
            gap, lost = time.monotonic() - killed, len(clients.failed)
            print(f"{front}: {lost} failed requests of {lost + len(clients.answered)}, answers after {gap:.1f} s")
            # None need fail: HAProxy tries again, and a new replica may be there by then.
            assert all(at >= killed for at in clients.failed), "requests failed before the kill"
            found = ask(back, "/score", {"rows": [GOOD]}, "s3cret")
            assert found["version"] == "v2"
            started = processes_under(service.pid)
            assert started
        finally:
            before = (tmp_path / "told").read_text()  # with what Ray says of the replica that was killed
            heard = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not under nohup, which the service inherits
            service.send_signal(signal.SIGHUP if front == "haproxy" and heard else signal.SIGINT)
            assert service.wait(240) == 0
    assert (tmp_path / "told").read_text() == before, "a stop says nothing"
    assert until(lambda: not [pid for pid in started if Path(f"/proc/{pid}").exists()], 120), "processes are left"
    assert balancer is None or not balancer.exists()


def is_haproxy(pid: int) -> bool:
    """Whether it runs, and is one."""
    return Path(f"/proc/{pid}/exe").resolve().name == "haproxy"


SHARED = """
import os, subprocess, sys, urllib.error, urllib.request
import ray
from rayrec.serve import ModelSpec, ServeConfig
from rayrec.serve import serving
from rayrec.serve.on_ray import environment

def replace(config, **changes):
    return config.model_copy(update=changes)

one = ServeConfig(models=(ModelSpec(name="ctr", path=sys.argv[1]),), port=int(sys.argv[2]), name="one", route="/one")
other = replace(one, name="other", route="/other")
os.environ.update(environment(one))
ray.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False)
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address

def status(address):
    try:
        return urllib.request.urlopen(f"{address}/schema/ctr", timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code

with serving(one) as first:
    with serving(other) as second:
        print(first, status(first), second, status(second))
        for taken in (replace(one, route="/third"), replace(one, name="third")):
            try:
                with serving(taken):
                    print("replaced it")
            except Exception as error:
                print(error)
        print("still", status(first), status(second))
    print("ended", status(first), status(second))

words = [sys.executable, "-m", "rayrec.cli", "serve", f"ctr={sys.argv[1]}", "--port", sys.argv[2], "--detach"]
print(subprocess.run([*words, "--name", "kept", "--route", "/kept"], capture_output=True, text=True).stdout)
kept = first.replace("/one", "/kept")
print("outlives", status(kept))
print(subprocess.run([*words[:3], "service", "stop", "kept"], capture_output=True, text=True).stdout.strip())
print("stopped", status(kept))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_services_on_one_ray_leave_each_other_alone(model: Path) -> None:
    """One that ends takes only itself away; one whose name or route is taken takes nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    words = [sys.executable, "-c", SHARED, str(model), port]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    at = f"http://127.0.0.1:{port}"
    assert f"{at}/one 200 {at}/other 200" in done.stdout, done.stdout + done.stderr
    assert "--name one: this Ray already serves an application with that name" in done.stdout
    assert "Prefix /one is being used by application" in done.stdout
    assert "still 200 200\nended 200 404" in done.stdout and done.returncode == 0, done.stdout + done.stderr
    assert "ends with `rayrec service stop kept`" in done.stdout
    assert "outlives 200\nended kept\nstopped 404" in done.stdout, done.stdout + done.stderr


SECURE = """
import json, ssl, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path
import ray
from rayrec.serve import load_serve_config
from rayrec.serve import serving
from tests.serve.test_service import another_version
from tests.serve.test_v2 import columns, inputs, triton_grpc

root = Path(sys.argv[1])
secret = (root / "token").read_text()
context = ssl.create_default_context(cafile=str(root / "cert.pem"))
known = {"authorization": f"Bearer {secret}"}

def status(url, **headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__

config = load_serve_config(root / "serve.yaml")
with serving(config) as address:
    url = address.replace("127.0.0.1", "localhost")
    print("https", status(url + "/v2/models/ctr", **known), status(url + "/v2/models/ctr"))
    print("http", status(url.replace("https", "http") + "/healthz"))
    client = triton_grpc.InferenceServerClient(
        f"localhost:{config.grpc_port}", ssl=True, root_certificates=config.tls.cert_file
    )
    print("grpc", client.infer("ctr", inputs(triton_grpc, columns()), headers=known).as_numpy("label").shape)
    shown = []
    for file in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        try:
            shown += [str(file)] if secret.encode() in file.read_bytes() else []
        except OSError:
            pass
    logs = ray._private.worker._global_node.get_session_dir_path()
    shown += subprocess.run(["grep", "-rlF", secret, logs], capture_output=True, text=True).stdout.split()
    print("shown", shown)
    another_version(root / "models" / "v1", root / "models" / "v2")
    for _ in range(300):
        found = subprocess.run(["grep", "-rhF", '"outcome": "loaded", "version": "v2"', logs], capture_output=True)
        if found.stdout:
            break
        time.sleep(0.2)
    print("audit", len(found.stdout.splitlines()))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tls_and_tokens_of_a_file_hold_on_ray_and_no_token_is_shown(model: Path, tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "models").mkdir()
    another_version(model, tmp_path / "models" / "v1")
    (tmp_path / "token").write_text("pl4nted-token")
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    (tmp_path / "serve.yaml").write_text(
        f"models: [{{name: ctr, path: models}}]\nport: {ports[0]}\ngrpc_port: {ports[1]}\ndirect: true\n"
        "clients: [{name: shop, token_file: token}]\ntls: {cert_file: cert.pem, key_file: key.pem}\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    words = [sys.executable, "-c", SECURE, str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    said = done.stdout + done.stderr
    assert "https 200 401\n" in said and "http 200" not in said, said
    assert "grpc (3,)\nshown []\naudit 1" in said and done.returncode == 0, said
