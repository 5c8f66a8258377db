"""Compiled graphs score as the trainer, in Python and in the C++ server, which holds no Python, maps raw rows, swaps
versions, and leaves nothing behind.

Compiling takes long: one model has every built-in one inside, weighted lists, a vocabulary and two labels.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.inference import Model, Wanted, processor
from rayrec.inference.scorer import Scorer
from rayrec.train.after.export import export_run
from tests.inference.cpp import built, needs_cpp
from tests.inference.runs import AllBuiltIn, train_all_built_in, trainer_scores

pytestmark = [needs_cpp, pytest.mark.long]
LABELS = ("click", "like")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    return train_all_built_in(data)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "v1"
    folder = export_run(run, out, Wanted(target="aoti"), factory=AllBuiltIn).folder
    index = json.loads((folder / "export.json").read_text())
    (folder / "export.json").write_text(json.dumps({**index, "version": "v1"}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("rayrec_server", tmp_path_factory.mktemp("cpp"))


@pytest.fixture(scope="module")
def rows(data: Path, exported: Path) -> list[dict[str, Any]]:
    """The raw evaluation rows, in the order of `trainer_scores`."""
    files = sorted((data / "eval").iterdir())
    columns = Scorer(Model(exported)).schema.feature_columns
    found: list[dict[str, Any]] = [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
    assert len(found) == 301
    return found


class Answer:
    """Status, headers and body of a response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    def json(self) -> Any:
        return json.loads(self.body)

    def scores(self) -> np.ndarray[Any, Any]:
        """`[B, labels]`"""
        assert self.status == 200, self.body
        return np.array([self.json()["scores"][label] for label in LABELS], np.float32).T


def ask(port: int, body: Any = None, path: str = "/score", **headers: str) -> Answer:
    """JSON of a body that is no bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, data, names)
    answer = Answer(connection.getresponse())
    connection.close()
    return answer


def version_at(port: int) -> str:
    return str(ask(port, path="/healthz").json()["models"][0]["version"])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(server: Path, models: Path, told: Path, *flags: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Port and process."""
    port = free_port()
    scratch = told.with_suffix(".tmp")
    scratch.mkdir(exist_ok=True)
    command = [server, models, "--port", str(port), "--look-ms", "5", *flags]
    with open(told, "w") as log:
        started = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=log)
    try:
        until(lambda: _connects(port), f"the server does not answer: {told.read_text()}")
        yield port, started
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait(10)
    assert not list(scratch.iterdir()), "the server left files in the temporary folder"


def _connects(port: int) -> bool:
    try:
        return ask(port, path="/healthz").status == 200
    except OSError:
        return False


def until(true: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def test_python_scores_compiled_and_uncompiled(run: Path, exported: Path) -> None:
    _check_python(run, exported)
    _check_instructions(exported)


def test_the_server_scores_as_the_trainer_does_and_swaps_versions(
    run: Path, exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert "libpython" not in subprocess.run(["ldd", server], capture_output=True, text=True, check=True).stdout
    models, told = tmp_path / "models", tmp_path / "told"
    models.mkdir()
    for name in ("v1", "v2"):
        _copy(exported, models / name)
    damaged = shutil.copytree(models / "v2", models / "v3")
    (damaged / "tables.bin").write_bytes(b"\x01" + (damaged / "tables.bin").read_bytes()[1:])
    (models / "current").write_text("v1")
    with serving(server, models, told, "--threads", "2") as (port, _):
        trainer = torch.cat([torch.sigmoid(logits) for _, logits in trainer_scores(run, AllBuiltIn)]).numpy()
        np.testing.assert_allclose(ask(port, {"rows": rows}).scores(), trainer, rtol=0, atol=1e-6)
        few = rows[:20]
        _check_swaps(port, models, few, expected={name: _score(models / name, few) for name in ("v1", "v2")})
        before = version_at(port)
        (models / "current").write_text("v3")
        until(lambda: "checksum is another" in told.read_text(), "a damaged version is not refused")
        assert version_at(port) == before and "checksum" in ask(port, path="/healthz").json()["models"][0]["refused"]
        (damaged / "tables.bin").write_bytes((models / "v2" / "tables.bin").read_bytes())
        until(lambda: version_at(port) == "v2", "a version that was mended does not take over")  # a copy of it
        _check_refused_versions(port, models, told)
        _check_reason_that_passes(port, models, told)
        _check_newest(port, models)


def test_requests_in_every_form_have_the_scores_of_the_rows(
    exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    some = [{**row, **{name: rows[0][name] for name in ("user", "city")}} for row in rows[:50]]
    with serving(server, exported, tmp_path / "told", "--threads", "2") as (port, _):
        expected = ask(port, {"rows": some}).scores()
        np.testing.assert_allclose(expected, _score(exported, some), rtol=0, atol=1e-6)
        columns = {name: [row[name] for row in some] for name in some[0]}
        np.testing.assert_array_equal(ask(port, {"rows": columns}).scores(), expected)
        context = {name: some[0][name] for name in ("user", "city")}
        candidates = [{name: row[name] for name in row if name not in context} for row in some]
        body = {"context": context, "candidates": candidates}
        np.testing.assert_allclose(ask(port, body).scores(), expected, rtol=0, atol=1e-6)
        assert ask(port, path="/schema").json()["sparse"][0]["name"] == "user"
        metadata = ask(port, path="/v2/models/model").json()
        kinds = {one["name"]: one["datatype"] for one in metadata["inputs"]}
        for binary in (False, True):
            answer = _infer(port, columns, context, kinds, binary)
            np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(_triton(port, columns, context, kinds), expected, rtol=0, atol=1e-6)
        results: list[float] = []

        def client(part: int) -> None:  # together with others
            for turn in range(20):
                first = (part * 7 + turn) % 40
                found = ask(port, {"rows": some[first : first + 1 + part]}).scores()
                results.append(float(np.abs(found - expected[first : first + 1 + part]).max()))

        _at_once([lambda part=part: client(part) for part in range(8)])  # type: ignore[misc]
        assert len(results) == 160 and max(results) <= 1e-6
        metrics = ask(port, path="/metrics").body.decode()
        assert 'rayrec_requests_total{model="model",status="200"}' in metrics
        assert 'rayrec_rows_total{model="model",version="v1"}' in metrics
        together = float(metrics.split("rayrec_batch_requests_sum")[1].split("} ")[1].split()[0])
        assert together >= 160
        unknown = next(line for line in metrics.splitlines() if line.startswith("rayrec_unknown_ids_total"))
        assert 'feature="city"' in unknown


def _tensors(columns: dict[str, list[Any]], context: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists as values and lengths, the context as inputs of one row."""
    found: dict[str, list[Any]] = {}
    for name, given in columns.items():
        values = [context[name]] if name in context else given
        if isinstance(values[0], list):
            found[f"{name}.lengths"] = [len(one) for one in values]
            values = [one for value in values for one in value]
        found[name] = values
    return found


def _triton(
    port: int, columns: dict[str, list[Any]], context: dict[str, Any], kinds: dict[str, str]
) -> np.ndarray[Any, Any]:
    """By a client that is not ours."""
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_ready() and client.is_model_ready("model")
    inputs = []
    for name, values in _tensors(columns, context).items():
        dtypes: dict[str, Any] = {"INT64": np.int64, "FP64": np.float64, "FP32": np.float32, "BYTES": np.object_}
        inputs.append(triton.InferInput(name, [len(values)], kinds[name]))
        inputs[-1].set_data_from_numpy(np.array(values, dtypes[kinds[name]]))
    found = client.infer("model", inputs)
    scores = np.stack([found.as_numpy(label) for label in LABELS], 1)
    client.close()
    return scores


def _infer(
    port: int, columns: dict[str, list[Any]], context: dict[str, Any], kinds: dict[str, str], binary: bool
) -> np.ndarray[Any, Any]:
    """In the open inference protocol, the context as inputs of one row."""
    inputs, rest = [], b""
    for tensor, flat in _tensors(columns, context).items():
        entry: dict[str, Any] = {"name": tensor, "datatype": kinds[tensor], "shape": [len(flat)]}
        if binary:
            raw = _bytes_of(flat, kinds[tensor])
            entry["parameters"] = {"binary_data_size": len(raw)}
            rest += raw
        else:
            entry["data"] = flat
        inputs.append(entry)
    head = json.dumps({"id": "mine", "inputs": inputs, "parameters": {"binary_data_output": binary}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
    answer = ask(port, head + rest, "/v2/models/model/versions/v1/infer", **headers)
    assert answer.status == 200, answer.body
    if not binary:
        found = json.loads(answer.body)
        assert found["id"] == "mine" and found["model_version"] == "v1"
        return np.array([one["data"] for one in found["outputs"]], np.float32).T
    size = int(answer.headers["Inference-Header-Content-Length"])
    names = [one["name"] for one in json.loads(answer.body[:size])["outputs"]]
    assert names == list(LABELS)
    return np.frombuffer(answer.body[size:], "<f4").reshape(len(names), -1).T


def _bytes_of(values: list[Any], kind: str) -> bytes:
    if kind == "BYTES":
        return b"".join(len(one.encode()).to_bytes(4, "little") + one.encode() for one in values)
    return np.array(values, {"INT64": "<i8", "FP64": "<f8", "FP32": "<f4"}[kind]).tobytes()


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_who_may_ask_and_how_much(exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(f"token-of-{name}\n")
    outside = subprocess.run([server, exported, "--host", "0.0.0.0"], capture_output=True, text=True)
    assert outside.returncode == 2 and "--token-file" in outside.stderr
    tokens = ("--token-file", str(tmp_path / "one"), "--token-file", str(tmp_path / "other"), "--requests-per-s", "2")
    limits = ("--rows", "20", "--body-bytes", "100000", "--body-s", "0.3", "--ids", "2000", "--host", "0.0.0.0")
    with serving(server, exported, tmp_path / "told", *tokens, *limits) as (port, _):
        one, other = ({"Authorization": f"Bearer token-of-{name}"} for name in ("one", "other"))
        body = {"rows": rows[:3]}
        for wrong in ({}, {"Authorization": "Bearer token-of-on"}, {"Authorization": "token-of-one"}):
            assert ask(port, body, **wrong).status == 401
            assert ask(port, path="/metrics", **wrong).status == 401
        assert [ask(port, body, **one).status for _ in range(4)].count(429) >= 1
        busy = ask(port, body, **one)
        assert busy.status == 429 and busy.headers["Retry-After"] == "1"
        assert ask(port, body, **other).status == 200, "a client's rate is its own"
        assert ask(port, path="/healthz").status == 200
        time.sleep(1.1)
        assert ask(port, {"rows": rows[:21]}, **one).status == 413
        assert ask(port, {"rows": [{**rows[0], "tags": [1] * 2001, "tag_weights": [1] * 2001}]}, **other).status == 413
        assert ask(port, b" " * 100_001, **one).status == 413
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_what_is_wrong_with_a_row_is_told(
    exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    with serving(server, exported, tmp_path / "told") as (port, _):
        for change, column, text in (
            ({"tags": [10**9]}, "tags", "outside its table's rows"),
            ({"user": None}, "user", "null id"),
            ({"user": 1.5}, "user", "whole number"),
            ({"city": 7}, "city", "must be a string"),
            ({"tag_weights": []}, "tag_weights", "not as many weights as ids"),
        ):
            wrong = [{**rows[0], "tag_weights": [1.0], "tags": [1]} | change]
            answer = ask(port, {"rows": wrong})
            (problem,) = answer.json()["errors"]
            assert (answer.status, problem["column"]) == (422, column) and text in problem["problem"], answer.body
        second = ask(port, {"rows": [rows[0], {**rows[1], "tags": [-1], "tag_weights": [1.0]}]})
        assert second.json()["errors"][0]["row"] == 1 and "1 of 2 rows" in second.json()["error"]
        missing = [{name: value for name, value in rows[0].items() if name != "city"}]
        assert "column 'city' is missing" in ask(port, {"rows": missing}).json()["error"]
        late = ask(port, {"rows": rows}, X_Deadline_Ms="0.001")
        assert late.status == 504
        assert ask(port, {"rows": rows[:1]}, X_Request_Id="mine").headers["X-Request-Id"] == "mine"


def test_a_full_queue_refuses_at_once_and_health_answers_meanwhile(
    exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    body = json.dumps({"rows": rows * 30}).encode()
    with serving(server, exported, tmp_path / "told", "--queue", "2") as (port, _):
        statuses: Counter[int] = Counter()

        def client() -> None:
            for _ in range(4):
                answer = ask(port, body)
                statuses[answer.status] += 1
                assert answer.status == 200 or answer.headers["Retry-After"] == "1"

        _at_once([client] * 8 + [lambda: [ask(port, path="/healthz") for _ in range(20)] and None])
        assert set(statuses) == {200, 503} and sum(statuses.values()) == 32, statuses


def test_sigterm_answers_what_is_there_and_ends(
    exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    body = json.dumps({"rows": rows * 30}).encode()
    with serving(server, exported, tmp_path / "told") as (port, process):
        expected = ask(port, body).scores()
        idle = http.client.HTTPConnection("127.0.0.1", port)
        idle.request("GET", "/healthz")
        idle.getresponse().read()
        busy = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        busy.request("POST", "/score", body)
        until(lambda: _has_begun(process.pid), "the request is not scored")
        process.send_signal(signal.SIGTERM)
        np.testing.assert_array_equal(Answer(busy.getresponse()).scores(), expected)
        assert process.wait(20) == 0
        idle.close()
        busy.close()
        with pytest.raises(OSError):
            ask(port, path="/healthz")


def _has_begun(pid: int) -> bool:
    """Whether one of the process's threads is running."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(task.read_text().rpartition(")")[2].split()[0] == "R" for task in tasks)


def test_no_request_ends_the_server_or_changes_a_score(
    exported: Path, server: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Drawn changes of bytes, values and heads of requests in both protocols."""
    draw = random.Random(0)
    some = rows[:5]
    columns = {name: [row[name] for row in some] for name in some[0]}
    with serving(server, exported, tmp_path / "told", "--body-s", "0.5", "--body-bytes", "200000") as (port, process):
        kinds = {one["name"]: one["datatype"] for one in ask(port, path="/v2/models/model").json()["inputs"]}
        expected = ask(port, {"rows": some}).scores()
        statuses: Counter[int] = Counter()
        for turn in range(3000):
            if turn % 3:
                answer = ask(port, _mutated(draw, json.dumps({"rows": some}).encode()))
            else:
                answer = ask(port, _mutated(draw, _v2_body(columns, kinds)), "/v2/models/model/infer")
            statuses[answer.status] += 1
            if turn % 100 == 0:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
                    raw.sendall(_mutated(draw, b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"))
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(65536):
                        pass
                np.testing.assert_array_equal(ask(port, {"rows": some}).scores(), expected)
        assert process.poll() is None
        assert set(statuses) <= {200, 400, 413, 422} and min(statuses[200], statuses[400], statuses[422]) > 20, statuses


_ODD = (
    b"null",
    b"-1",
    b"1e400",
    b"99999999999999999999",
    b"true",
    b'"x"',
    b"[[[[[[[[",
    b"{}",
    b"\xff",
    b"NaN",
    b"[]",
    b"0.5",
)


def _mutated(draw: random.Random, body: bytes) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(body) + 1)
        match draw.randrange(4):
            case 0:
                body = body[:at] + draw.randbytes(1) + body[at + 1 :]
            case 1:
                body = body[:at] + draw.choice(_ODD) + body[at + draw.choice((0, 1, 2)) :]
            case 2:
                body = body[:at] if draw.random() < 0.3 else body[:at] + body[at + 1 :]
            case 3:
                body = body.replace(draw.choice((b"1", b"2", b'"tags"', b"0.5")), draw.choice(_ODD), 1)
    return body


def _v2_body(columns: dict[str, list[Any]], kinds: dict[str, str]) -> bytes:
    tensors = _tensors(columns, {}).items()
    inputs = [{"name": name, "datatype": kinds[name], "shape": [len(data)], "data": data} for name, data in tensors]
    return json.dumps({"inputs": inputs}).encode()


def test_features_that_are_not_done_in_cpp_are_refused_by_name(exported: Path, server: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "v1")
    raw = json.loads((folder / "mapping.json").read_text())
    raw["schema"]["derived"] = [{"kind": "tokens", "name": "city", "column": "title"}]
    (folder / "mapping.json").write_text(json.dumps(raw))
    index = json.loads((folder / "export.json").read_text())
    data = (folder / "mapping.json").read_bytes()
    index["files"]["mapping.json"] = [len(data), zlib.crc32(data)]
    (folder / "export.json").write_text(json.dumps(index))
    done = subprocess.run([server, folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "derived column 'city' (tokens)" in done.stderr


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


def _score(folder: Path, rows: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """In Python."""
    found = Scorer(Model(folder)).score(rows).probabilities
    return np.array([found[label] for label in LABELS]).T


def _check_swaps(
    port: int, models: Path, rows: list[dict[str, Any]], expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    """A hundred swaps while two clients ask: every answer is that of the version it names, and both come."""
    stop, answers, failed = threading.Event(), Counter[str](), []

    def client() -> None:
        while not stop.is_set():
            try:
                answer = ask(port, {"rows": rows})
                version = answer.json()["version"]
                np.testing.assert_allclose(answer.scores(), expected[version], rtol=0, atol=1e-6)
                answers[version] += 1
            except (AssertionError, KeyError, OSError) as error:
                failed.append(repr(error))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for thread in clients:
        thread.start()
    try:
        for number in range(100):
            name = ("v2", "v1")[number % 2]
            (models / ".current").write_text(name)
            os.replace(models / ".current", models / "current")
            until(lambda name=name: version_at(port) == name, f"swap {number} to {name} does not come")  # type: ignore[misc]
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

    before = version_at(port)
    versions = json.loads((models / "v1" / "export.json").read_text())["versions"]
    for name, text, index in (
        ("parity", "its scores are outside their limits", {}),
        ("nan", "a row of zeros scores no number", {}),
        ("flags", "this one lacks no_such_flag", {"instructions": ["no_such_flag"]}),
        ("unrecorded", "did not record for which processors", {"march": None}),
        ("torch", "was compiled with torch 1.0", {"versions": {**versions, "torch": "1.0"}}),
    ):
        offer(name, **index)
        until(lambda text=text: text in told.read_text(), f"{name} is not refused")  # type: ignore[misc]
        assert version_at(port) == before
        assert told.read_text().count(text) == 1


def _check_reason_that_passes(port: int, models: Path, told: Path) -> None:
    """A table is mended without a trace in its size and time: the version is read again after a wait."""
    folder = shutil.copytree(models / "v1", models / ".late")
    index, tables = json.loads((folder / "export.json").read_text()), folder / "tables.bin"
    (folder / "export.json").write_text(json.dumps({**index, "version": "late"}))
    data, time_ns = tables.read_bytes(), tables.stat().st_mtime_ns
    tables.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(tables, ns=(time_ns, time_ns))
    tables = folder.rename(models / "late") / tables.name
    (models / "current").write_text("late")
    until(lambda: f"{tables}" in told.read_text(), "late is not refused")
    tables.write_bytes(data)
    os.utime(tables, ns=(time_ns, time_ns))
    _await_version(port, "late")


def _check_newest(port: int, models: Path) -> None:
    """The last by number; and another version in the same folder."""
    for name in ("parity", "nan", "flags", "unrecorded", "torch", "late", "v2", "v3"):
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
    until(lambda: version_at(port) == version, f"{version} does not take over")
