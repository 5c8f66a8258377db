"""What a service costs: latency and requests a second of one replica beside bare uvicorn, and 60 swaps under load.

    python jobs/bench_serving.py --json

The load comes from this machine: a request is one context and 100 candidates of 26 features, as JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
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
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bench_inference import DENSE, Weights, batch_of

from rayrec.inference import Model, Trained, Wanted, export
from rayrec.inference.artifact import checksum
from rayrec.inference.graph import Inputs
from rayrec.models import DLRM
from rayrec.modules import EmbeddingBagConfig
from rayrec.serve.on_ray import Settings, start, stop
from rayrec.serve.service import ModelSpec, Service

ROWS, CONTEXT, CANDIDATES = 10_000, 13, 100
UVICORN = (
    "import sys, uvicorn; from pathlib import Path; from rayrec.serve.service import ModelSpec; "
    "from rayrec.serve.on_ray import Settings, application; "
    "app = application(Settings(models=(ModelSpec(name='ctr', path=Path(sys.argv[1])),), watch_s=0)); "
    "uvicorn.run(app, port=int(sys.argv[2]), log_level='error')"
)


def make_export(folder: Path) -> Path:
    keys = [f"f{i}" for i in range(26)]
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=64, feature_names=[key])
        for i, key in enumerate(keys)
    ]

    def make(device: str = "meta") -> DLRM:
        over = [512, 512, 256, 1]
        return DLRM(tables, DENSE, dense_arch=[512, 256, 64], over_arch=over, tables_device=device, seed=1)

    torch.manual_seed(0)
    schema = {"dense": [{"name": f"d{i}"} for i in range(DENSE)], "sparse": [{"name": key} for key in keys]}
    trained = Trained(
        make_model=make,
        weights=Weights(make("cpu").eval()),  # type: ignore[arg-type]
        inputs=Inputs(tuple(keys), DENSE, None, False),
        mapping={"schema": schema, "tables": [{"rows": ROWS, "features": [key]} for key in keys]},
        rows_of=dict.fromkeys(keys, ROWS),
        batches=lambda: [batch_of(keys, ROWS, 500, 1, seed) for seed in range(2)],
    )
    return export(trained, folder, Wanted(tables="int8", target="aoti", force=True)).folder


def body() -> bytes:
    drawn = np.random.default_rng(0)
    context: dict[str, Any] = {f"f{i}": int(drawn.integers(ROWS)) for i in range(CONTEXT)}
    context |= {f"d{i}": float(drawn.normal()) for i in range(DENSE)}
    candidates = {f"f{i}": drawn.integers(ROWS, size=CANDIDATES).tolist() for i in range(CONTEXT, 26)}
    return json.dumps({"context": context, "candidates": candidates}).encode()


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, port: int, clients: int, check: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        self._port, self._clients, self._check = port, clients, check
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
        sent, connection = body(), http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._stop.is_set():
            begin = time.perf_counter()
            try:
                connection.request("POST", "/score", sent, {"content-type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                self.times.append(time.perf_counter() - begin)
                self.failed += response.status != 200
                self.mixed += response.status == 200 and not self._check(answer)
            except (OSError, http.client.HTTPException):
                self.failed += 1
                connection.close()
                time.sleep(0.02)


def two_versions(exported: Path, root: Path) -> dict[str, list[float]]:
    """Copies with different tables, and the scores of each."""
    expected = {}
    for name in ("v1", "v2"):
        folder = shutil.copytree(exported, root / name)
        raw = json.loads((folder / "export.json").read_text())
        raw["version"] = name
        if name == "v2":  # the first table's bytes are the second's
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
    """So many, each as soon as the one before answers."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--port", type=int, default=18200)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        root.mkdir()
        exported = make_export(Path(folder) / "export")
        expected = two_versions(exported, root)
        assert Model(root / "v1").target == "aoti"

        def sound(answer: dict[str, Any]) -> bool:
            return bool(np.allclose(answer["scores"]["label"], expected[answer["version"]], rtol=0, atol=1e-6))

        bare = subprocess.Popen([sys.executable, "-c", UVICORN, str(root / "v1"), str(args.port + 50)])
        spec = ModelSpec(name="ctr", path=root)
        start(Settings(models=(spec,), port=args.port, direct=True, watch_s=0.1))
        try:
            for clients in (1, 8):
                Load(args.port + 50, clients).run(1)
                Load(args.port, clients).run(1)
                turns: dict[str, list[dict[str, float]]] = {"uvicorn_": [], "": []}
                for _ in range(args.turns):  # in turns, so that what else the machine does falls on both
                    for name, port in (("uvicorn_", args.port + 50), ("", args.port)):
                        turns[name].append(Load(port, clients, sound).run(args.seconds / args.turns))
                for name, found in turns.items():
                    for key in ("p50", "p99", "rps"):
                        figures[f"{name}{key}_{clients}"] = statistics.median(turn[key] for turn in found)
                pairs = zip(turns[""], turns["uvicorn_"], strict=True)
                figures[f"rps_over_uvicorn_{clients}"] = statistics.median(a["rps"] / b["rps"] for a, b in pairs)
            steady = Load(args.port, 2, sound).run(args.seconds)
            load = Load(args.port, 2, sound)
            swapped = load.run(0, lambda: swaps(root, 60, args.port))
            figures |= {"swap_failed": load.failed, "swap_mixed": load.mixed, "swap_requests": len(load.times)}
            figures |= {"steady_p99_2": steady["p99"], "swap_p99_ratio": swapped["p99"] / steady["p99"]}
        finally:
            stop()
            bare.terminate()
            bare.wait()
    print(json.dumps(figures) if args.json else "\n".join(f"{k:18} {v:,.4g}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
