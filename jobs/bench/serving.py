"""Measures a service: latency and requests per second of a replica against bare uvicorn; 60 version swaps under load;
batching of requests, a second core, and gRPC.

    python jobs/bench/serving.py --json
    git worktree add OLD COMMIT; python jobs/bench/serving.py --beside OLD

The load comes from this machine. A request is one context and 100 candidates of 26 features, as JSON, or as tensors
over gRPC. `--beside` also runs the benchmark of another checkout and prints ratios.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, machine, paired_ratio, print_json, require
from ranker import DENSE, trained_ranker

from rayrec.inference import ExportOptions, Model, export
from rayrec.inference.artifact import checksum
from rayrec.serve import ModelSpec, ServeConfig, Service
from rayrec.serve.on_ray import serving

ROWS, CONTEXT, CANDIDATES = 10_000, 13, 100
SWAPS = 60
ENVIRONMENT = dict(os.environ)  # before the service of this process adds its ports
UVICORN = (
    "import sys, torch, uvicorn; from pathlib import Path; from rayrec.serve import ModelSpec, Service; "
    "from rayrec.serve.http import App; path, port, cores, together = sys.argv[1:]; torch.set_num_threads(int(cores)); "
    "app = App(Service([ModelSpec(name='ctr', path=Path(path))]), batching=together == 'True'); "
    "uvicorn.run(app, port=int(port), log_level='error')"
)


def make_export(folder: Path) -> Path:
    trained, _ = trained_ranker(ROWS)
    return export(trained, folder, ExportOptions(tables="int8", target="aoti", force=True)).folder


def body(count: int = CANDIDATES) -> bytes:
    """A request with `count` candidates."""
    drawn = np.random.default_rng(0)
    context: dict[str, Any] = {f"f{i}": int(drawn.integers(ROWS)) for i in range(CONTEXT)}
    context |= {f"d{i}": float(drawn.normal()) for i in range(DENSE)}
    candidates = {f"f{i}": drawn.integers(ROWS, size=count).tolist() for i in range(CONTEXT, 26)}
    return json.dumps({"context": context, "candidates": candidates}).encode()


class Load:
    """Clients that send the next request as soon as the last one is answered."""

    def __init__(
        self, port: int, clients: int, check: Callable[[dict[str, Any]], bool] = lambda _: True, sent: bytes = body()
    ) -> None:
        self._port, self._clients, self._check, self._sent = port, clients, check, sent
        self._stop = threading.Event()
        self.times: list[float] = []
        self.failed = self.mixed = 0

    def run(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> dict[str, float]:
        threads = [threading.Thread(target=self._client) for _ in range(self._clients)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        if meanwhile is None:
            time.sleep(seconds)
        else:
            meanwhile()
        self._stop.set()
        for thread in threads:
            thread.join()
        took, ms = time.perf_counter() - begin, sorted(value * 1e3 for value in self.times)
        at = {"p50": statistics.median(ms), "p99": ms[int(len(ms) * 0.99)]}
        return {**at, "rps": len(ms) / took}

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._stop.is_set():
            begin = time.perf_counter()
            try:
                connection.request("POST", "/score", self._sent, {"content-type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                self.times.append(time.perf_counter() - begin)
                self.failed += response.status != 200
                self.mixed += response.status == 200 and not self._check(answer)
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection.close()
                time.sleep(0.02)


class GrpcLoad(Load):
    """Sends tensors by the open inference protocol."""

    def _client(self) -> None:
        import grpc

        from rayrec.serve.v2_messages import SERVICE, message

        raw = json.loads(body())
        request = message("ModelInferRequest")(model_name="ctr")
        for name, value in {**raw["context"], **raw["candidates"]}.items():
            values = np.atleast_1d(np.array(value))
            request.inputs.add(name=name, datatype="FP64" if values.dtype.kind == "f" else "INT64", shape=values.shape)
            request.raw_input_contents.append(values.tobytes())
        with grpc.insecure_channel(f"127.0.0.1:{self._port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(
                f"/{SERVICE}/ModelInfer",
                request_serializer=message("ModelInferRequest").SerializeToString,
                response_deserializer=message("ModelInferResponse").FromString,
            )
            while not self._stop.is_set():
                begin = time.perf_counter()
                answer = infer(request, timeout=30)
                self.times.append(time.perf_counter() - begin)
                scores = np.frombuffer(answer.raw_output_contents[0], "<f4").tolist()
                found = {"version": answer.model_version, "scores": {"label": scores}}
                self.mixed += not self._check(found)


def grpc_over_json(
    ports: dict[str, int], sound: Callable[[dict[str, Any]], bool], args: argparse.Namespace
) -> dict[str, float]:
    """The replica's gRPC against its JSON, with 8 clients."""
    checked: list[Load] = []

    def load(kind: type[Load], port: int) -> Load:
        checked.append(kind(port, 8, sound))
        return checked[-1]

    loads = {"json": lambda: load(Load, ports["json"]), "grpc": lambda: load(GrpcLoad, ports["grpc"])}
    turns = loads_in_turns(loads, args.turns, args.seconds)
    results: dict[str, float] = {"grpc_wrong": sum(load.failed + load.mixed for load in checked)}
    for key in ("p50", "p99", "rps"):
        results[f"grpc_{key}_8"] = statistics.median(turn[key] for turn in turns["grpc"])
        results[f"grpc_over_json_{key}_8"] = ratio(turns["grpc"], turns["json"], key)
    return results


def beside(folder: Path, results: dict[str, float], args: argparse.Namespace) -> dict[str, float]:
    """Results of another checkout's benchmark, run now, and ours divided by them."""
    words = [sys.executable, folder / "jobs" / "bench" / "serving.py", "--json"]
    words += ["--seconds", str(args.seconds), "--turns", str(args.turns), "--port", str(args.port + 200)]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    theirs = json.loads(done.stdout.splitlines()[-1])
    shares = {f"{k}_over_theirs": results[k] / v for k, v in theirs.items() if v and k in results}
    return {f"their_{k}": v for k, v in theirs.items()} | shares


def two_versions(exported: Path, root: Path) -> dict[str, list[float]]:
    """Makes two versions with different tables; returns the scores of each."""
    expected = {}
    for name in ("v1", "v2"):
        folder = shutil.copytree(exported, root / name)
        raw = json.loads((folder / "export.json").read_text())
        raw["version"] = name
        if name == "v2":  # swap in the bytes of the second table
            data = bytearray((folder / "tables.bin").read_bytes())
            first, second = raw["places"][0], raw["places"][1]
            size = first["rows"] * first["row_bytes"]
            data[first["begin"] : first["begin"] + size] = data[second["begin"] : second["begin"] + size]
            (folder / "tables.bin").write_bytes(data)
            raw["files"]["tables.bin"][1] = checksum(folder / "tables.bin")
        (folder / "export.json").write_text(json.dumps(raw))
        scores = Service([ModelSpec(name="ctr", path=folder)]).score(body(), "application/json").scores["label"]
        expected[name] = scores.astype(float).tolist()
    (root / "current").write_text("v1")
    return expected


def swaps(root: Path, count: int, port: int) -> None:
    """Swaps versions `count` times, each time after the last one answers."""
    for number in range(count):
        wanted = ("v2", "v1")[number % 2]
        (root / "current").write_text(wanted)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/healthz")
            found = json.loads(connection.getresponse().read())["models"][0]["version"]
            connection.close()
            if found == wanted:
                break
            time.sleep(0.02)
        else:
            raise RuntimeError(f"version {wanted} did not take over")


class Servers:
    """Bare uvicorn with a replica's application on three ports: batched requests, single requests, two cores."""

    def __init__(self, model: Path, port: int) -> None:
        self.plain, self.alone, self.two = port, port + 1, port + 2
        kinds = {self.plain: ("1", "True"), self.alone: ("1", "False"), self.two: ("2", "True")}
        self._started = [
            subprocess.Popen([sys.executable, "-c", UVICORN, str(model), str(at), *kind]) for at, kind in kinds.items()
        ]
        for at in kinds:
            until(lambda at=at: Load(at, 1).run(0.2)["rps"])  # type: ignore[misc]

    def close(self) -> None:
        for process in self._started:
            process.terminate()
            process.wait()


def until(ready: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            ready()
            return
        except (OSError, statistics.StatisticsError):  # no answer yet
            if time.monotonic() > deadline:
                raise


def loads_in_turns(
    loads: dict[str, Callable[[], Load]], turns: int, seconds: float
) -> dict[str, list[dict[str, float]]]:
    """Results of each load, turn by turn, so that other work on the machine affects all of them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    for load in loads.values():
        load().run(1)
    for _ in range(turns):
        for name, load in loads.items():
            found[name].append(load().run(seconds / turns))
    return found


def ratio(turns: list[dict[str, float]], base: list[dict[str, float]], key: str) -> float:
    """The median of the ratios of one value within the turns."""
    return paired_ratio([turn[key] for turn in turns], [turn[key] for turn in base])


def beside_uvicorn(port: int, bare: int, sound: Callable[[dict[str, Any]], bool], args: argparse.Namespace) -> Any:
    results: dict[str, float] = {}
    for clients in (1, 8):
        loads = {"uvicorn_": lambda n=clients: Load(bare, n, sound), "": lambda n=clients: Load(port, n, sound)}
        found = loads_in_turns(loads, args.turns, args.seconds)
        for name, turns in found.items():
            for key in ("p50", "p99", "rps"):
                results[f"{name}{key}_{clients}"] = statistics.median(turn[key] for turn in turns)
        results[f"rps_over_uvicorn_{clients}"] = ratio(found[""], found["uvicorn_"], "rps")
    return results


def of_uvicorn(servers: Servers, args: argparse.Namespace) -> dict[str, float]:
    """The gain of batching requests with 1 and 100 candidates, and of a second core for 1000."""
    results = {}
    for count in (1, CANDIDATES):
        sent = body(count)
        loads = {
            "together": lambda sent=sent: Load(servers.plain, 8, sent=sent),
            "alone": lambda sent=sent: Load(servers.alone, 8, sent=sent),
        }
        found = loads_in_turns(loads, args.turns, args.seconds)
        results[f"together_over_alone_rps_8_rows_{count}"] = ratio(found["together"], found["alone"], "rps")
    sent = body(1000)
    cores = {"one": lambda: Load(servers.plain, 1, sent=sent), "two": lambda: Load(servers.two, 1, sent=sent)}
    found = loads_in_turns(cores, args.turns, args.seconds)
    results |= {f"p50_1000_{name}_core": statistics.median(turn["p50"] for turn in found[name]) for name in cores}
    return results | {"two_cores_over_one_p50_1000": ratio(found["two"], found["one"], "p50")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--port", type=int, default=18200)
    parser.add_argument("--beside", type=Path, help="checkout whose benchmark runs as well, for ratios")
    args = parser.parse_args()
    require(shutil.which("g++"), "needs a C++ compiler to export with target aoti: apt-get install g++")
    print(machine(), flush=True)
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        root.mkdir()
        exported = make_export(Path(folder) / "export")
        expected = two_versions(exported, root)
        assert Model(root / "v1").target == "aoti"

        def sound(answer: dict[str, Any]) -> bool:
            return bool(np.allclose(answer["scores"]["label"], expected[answer["version"]], rtol=0, atol=1e-6))

        servers = Servers(root / "v1", args.port + 50)
        try:
            results |= of_uvicorn(servers, args)
            spec = ModelSpec(name="ctr", path=root)
            ports = {"json": args.port, "grpc": args.port + 10}
            config = ServeConfig(
                models=(spec,), port=args.port, grpc_port=ports["grpc"], direct=True, watch_s=0.1, cpus=1
            )
            with serving(config):
                results |= beside_uvicorn(args.port, servers.plain, sound, args)
                results |= grpc_over_json(ports, sound, args)
                steady = Load(args.port, 2, sound).run(args.seconds)
                load = Load(args.port, 2, sound)
                swapped = load.run(0, lambda: swaps(root, SWAPS, args.port))
            results |= {"swaps": SWAPS, "swap_failed": load.failed, "swap_mixed": load.mixed}
            results |= {"swap_requests": len(load.times), "steady_p99_2": steady["p99"]}
            results["swap_p99_ratio"] = swapped["p99"] / steady["p99"]
        finally:
            servers.close()
    if args.beside is not None:
        print(json.dumps(results), file=sys.stderr)
        results |= beside(args.beside, results, args)
    for name, value in results.items():
        print(f"{name:34} {value:,.4g}")
    print_json(args, results)


if __name__ == "__main__":
    main()
