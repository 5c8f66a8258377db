"""`rayrec serve` on Ray Serve: it answers, loads a version that appears, and outlives a SIGKILL of its replica."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rayrec.train.export_run import export_run
from tests.inference.runs import train
from tests.serve.test_service import another_version

pytest.importorskip("ray.serve")
GOOD = {"user": 1, "item": 2, "tags": [1, 2], "age": 0.5}


def ask(port: int, path: str, body: Any = None, token: str = "") -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": f"Bearer {token}"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
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


@pytest.mark.long
def test_the_service_watches_for_versions_and_survives_the_loss_of_its_replica(tmp_path: Path) -> None:
    model = export_run(train(tmp_path / "run"), tmp_path / "export").folder
    models = tmp_path / "models"
    models.mkdir()
    another_version(model, models / "v1")
    (tmp_path / "token").write_text("s3cret\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "rayrec.cli", "serve", f"ctr={models}", "--port", str(port), "--watch", "0.5"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    service = subprocess.Popen(
        [*command, "--token-file", str(tmp_path / "token")], env=environment, start_new_session=True
    )
    try:
        assert until(lambda: ask(port, "/healthz"), 120), "the service does not come up"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, "/score", {"rows": [GOOD]})
        assert ask(port, "/score", {"rows": [GOOD]}, "s3cret")["version"] == "v1"
        another_version(model, models / "v2")
        assert until(lambda: ask(port, "/score", {"rows": [GOOD]}, "s3cret")["version"] == "v2", 20)
        os.kill(ask(port, "/healthz")["pid"], signal.SIGKILL)
        assert until(lambda: ask(port, "/score", {"rows": [GOOD]}, "s3cret")["version"] == "v2", 60)
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
