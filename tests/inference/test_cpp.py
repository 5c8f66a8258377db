"""Compiled graphs score as the trainer, in Python and in the C++ server, which holds no Python, swaps versions, and
leaves nothing behind.

Compiling takes long: one model has every built-in one inside, weighted lists, a vocabulary and two labels.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.inference import Model, Wanted, processor
from rayrec.inference.wire import to_bytes
from rayrec.models import Batch
from rayrec.train.after.export import export_run
from tests.inference.runs import AllBuiltIn, train_all_built_in, trainer_scores

SOURCES = Path(__file__).parents[2] / "deploy" / "cpp"
needs_compiler = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("g++") is None,
    reason="deploy/cpp is built with cmake and g++: apt-get install cmake g++",
)


def ask(port: int, body: bytes | None, path: str = "/score") -> tuple[int, str, bytes]:
    """Status, version, answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET" if body is None else "POST", path, body)
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    return response.status, response.getheader("X-Version") or "", answer


def numbers_of(answer: bytes) -> np.ndarray[Any, Any]:
    """Probabilities `[B, labels]`."""
    return np.frombuffer(answer, "<f4").reshape(-1, 2)


def scored_batch(run: Path) -> Batch:
    """The first of the evaluation rows."""
    return trainer_scores(run, AllBuiltIn)[0][0]


@needs_compiler
@pytest.mark.long
def test_the_server_scores_as_the_trainer_does_and_swaps_versions(tmp_path: Path) -> None:
    run = train_all_built_in(tmp_path / "run")
    exported = export_run(run, tmp_path / "export", Wanted(target="aoti"), factory=AllBuiltIn).folder
    _check_python(run, exported)
    _check_instructions(exported)
    build = tmp_path / "build"
    subprocess.run(["cmake", "-S", SOURCES, "-B", build, f"-DPYTHON={sys.executable}"], check=True, timeout=200)
    subprocess.run(["cmake", "--build", build], check=True, timeout=300)
    server = build / "rayrec_server"
    assert "libpython" not in subprocess.run(["ldd", server], capture_output=True, text=True, check=True).stdout
    models, scratch = tmp_path / "models", tmp_path / "tmp"
    models.mkdir()
    scratch.mkdir()
    for name in ("v1", "v2"):
        _copy(exported, models / name)
    damaged = shutil.copytree(models / "v2", models / "v3")
    (damaged / "tables.bin").write_bytes(b"\x01" + (damaged / "tables.bin").read_bytes()[1:])
    (models / "current").write_text("v1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment = {**os.environ, "TMPDIR": str(scratch)}
    command = [server, models, "--port", str(port), "--threads", "2", "--look-ms", "5"]
    with open(tmp_path / "told", "w") as told:
        started = subprocess.Popen(command, env=environment, stderr=told)
    try:
        _await(port)
        _check_scores(port, run, exported)
        _check_refusals(port, exported, run)
        body = to_bytes(scored_batch(run), Model(exported).index.inputs)
        _check_swaps(port, models, body, expected={name: _score(models / name, run) for name in ("v1", "v2")})
        before = ask(port, body)[1]
        (models / "current").write_text("v3")
        time.sleep(0.5)
        assert ask(port, body)[1] == before, "a damaged version is not served"
        (damaged / "tables.bin").write_bytes((models / "v2" / "tables.bin").read_bytes())
        deadline = time.monotonic() + 120
        while ask(port, body)[1] != "v2":  # a copy of it
            assert time.monotonic() < deadline, "a version that was mended does not take over"
        _check_refused_versions(port, models, tmp_path / "told")
        _check_newest(port, models)
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait(10)
    assert not list(scratch.iterdir()), "the server left files in the temporary folder"


def _check_python(run: Path, exported: Path) -> None:
    compiled, eager = Model(exported), Model(exported, target="eager")
    assert compiled.target == "aoti" and compiled.index.inputs.weighted and compiled.labels == ("click", "like")
    for batch, logits in trainer_scores(run, AllBuiltIn):
        atol = 1e-6 * max(1.0, float(logits.abs().max()))  # an export's own limit
        torch.testing.assert_close(compiled.score(batch), logits, rtol=0, atol=atol)
        torch.testing.assert_close(eager.score(batch), logits, rtol=0, atol=0)


def _check_instructions(exported: Path) -> None:
    """Compiled for a level: no register of 512 bits, even where this processor has some."""
    assert Model(exported).index.march == processor.choose_march(None)
    if platform.machine() == "x86_64":
        for library in (exported / "aoti").rglob("*.so"):
            code = subprocess.run(["objdump", "-d", library], check=True, capture_output=True, text=True).stdout
            assert "%ymm" in code and "%zmm" not in code


def _copy(exported: Path, folder: Path) -> None:
    """A version that answers by its name; the second one's tables hold other numbers."""
    shutil.copytree(exported, folder)
    tables, path = folder / "tables.bin", folder / "export.json"
    index = json.loads(path.read_text())
    if folder.name == "v2":
        tables.write_bytes(bytes(tables.stat().st_size))
        index["files"]["tables.bin"][1] = zlib.crc32(tables.read_bytes())
    path.write_text(json.dumps({**index, "version": folder.name}))


def _score(folder: Path, run: Path) -> np.ndarray[Any, Any]:
    """Of the first batch, in Python."""
    return torch.sigmoid(Model(folder).score(scored_batch(run))).numpy()


def _check_swaps(port: int, models: Path, body: bytes, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    """A hundred swaps while two clients ask: every answer is that of the version it names, and both come."""
    stop, answers, failed = threading.Event(), Counter[str](), []

    def client() -> None:
        while not stop.is_set():
            try:
                status, version, answer = ask(port, body)
                assert status == 200
                np.testing.assert_allclose(numbers_of(answer), expected[version], rtol=0, atol=1e-6)
                answers[version] += 1
            except (AssertionError, OSError) as error:
                failed.append(repr(error))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for thread in clients:
        thread.start()
    try:
        for number in range(100):
            name = ("v2", "v1")[number % 2]
            (models / ".current").write_text(name)
            os.replace(models / ".current", models / "current")
            deadline = time.monotonic() + 120
            while ask(port, None, "/healthz")[1] != name:
                assert time.monotonic() < deadline, f"swap {number} to {name} does not come"
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert not failed, failed[:3]
    assert len(answers) == 2 and min(answers.values()) > 10, answers


def _check_refused_versions(port: int, models: Path, told: Path) -> None:
    """What the service in Python refuses; each is whole by its checksums."""

    def offer(name: str, **index: Any) -> Path:
        folder = shutil.copytree(models / "v1", models / f".{name}")
        raw = json.loads((folder / "export.json").read_text())
        raw |= {"version": name} | index
        for file in ("parity.json", "tables.bin"):
            if name == "parity" and file == "parity.json":
                parity = json.loads((folder / file).read_text())
                (folder / file).write_text(json.dumps({**parity, "within_limits": False}))
            if name == "nan" and file == "tables.bin":
                tables = np.full((folder / file).stat().st_size // 4, np.nan, np.float32)
                (folder / file).write_bytes(tables.tobytes())
            data = (folder / file).read_bytes()
            raw["files"][file] = [len(data), zlib.crc32(data)]
        (folder / "export.json").write_text(json.dumps(raw))
        folder = folder.rename(models / name)
        (models / ".current").write_text(name)
        os.replace(models / ".current", models / "current")
        return folder

    _, before, _ = ask(port, None, "/healthz")
    versions = json.loads((models / "v1" / "export.json").read_text())["versions"]
    for name, text, index in (
        ("parity", "its scores are outside their limits", {}),
        ("nan", "a row of zeros scores no number", {}),
        ("flags", "this one lacks no_such_flag", {"instructions": ["no_such_flag"]}),
        ("torch", "was compiled with torch 1.0", {"versions": {**versions, "torch": "1.0"}}),
    ):
        offer(name, **index)
        deadline = time.monotonic() + 60
        while text not in told.read_text():
            assert time.monotonic() < deadline, f"{name} is not refused"
            time.sleep(0.02)
        assert ask(port, None, "/healthz")[1] == before
        assert told.read_text().count(text) == 1


def _check_newest(port: int, models: Path) -> None:
    """The last by number; and another version in the same folder."""
    for name in ("parity", "nan", "flags", "torch", "v2", "v3"):
        shutil.rmtree(models / name)
    for name in ("v9", "v10"):
        folder = shutil.copytree(models / "v1", models / f".{name}")
        index = json.loads((folder / "export.json").read_text())
        (folder / "export.json").write_text(json.dumps({**index, "version": name}))
        folder.rename(models / name)
    (models / "current").unlink()
    _await_version(port, "v10")
    index = json.loads((models / "v10" / "export.json").read_text())
    (models / "v10" / ".export.json").write_text(json.dumps({**index, "version": "again"}))
    os.replace(models / "v10" / ".export.json", models / "v10" / "export.json")
    _await_version(port, "again")


def _await_version(port: int, version: str) -> None:
    deadline = time.monotonic() + 60
    while ask(port, None, "/healthz")[1] != version:
        assert time.monotonic() < deadline, f"{version} does not take over"
        time.sleep(0.02)


def _await(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            ask(port, None, "/healthz")
            return
        except OSError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


def _check_scores(port: int, run: Path, exported: Path) -> None:
    rows = 0
    for batch, logits in trainer_scores(run, AllBuiltIn):
        status, version, answer = ask(port, to_bytes(batch, Model(exported).index.inputs))
        assert (status, version) == (200, "v1")
        np.testing.assert_allclose(numbers_of(answer), torch.sigmoid(logits).numpy(), rtol=0, atol=1e-6)
        rows += batch.rows
    assert rows == 301


def _check_refusals(port: int, exported: Path, run: Path) -> None:
    batch = scored_batch(run)
    body = to_bytes(batch, Model(exported).index.inputs)
    ids_at = len(body) - (8 + 4) * batch.sparse.values().numel()  # weights come last
    for value in (-1, 10**9):
        bad = bytearray(body)
        bad[ids_at : ids_at + 8] = int(value).to_bytes(8, "little", signed=True)
        status, _, text = ask(port, bytes(bad))
        assert status == 422 and b"feature user: id" in text
    for cut in (b"", body[:15], body[:-1], body + b"x", b"\xff" * 64):
        assert ask(port, cut)[0] == 400
    for at in (16, len(body) - 4):  # the first dense number, the last weight
        nan = bytearray(body)
        nan[at : at + 4] = np.float32("nan").tobytes()
        assert ask(port, bytes(nan))[0] == 422
    assert ask(port, body)[0] == 200, "a refused request must not end the server"
