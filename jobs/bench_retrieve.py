"""`POST /retrieve` over HTTP: latency of many items at once, with several clients, exact and approximate.

    python jobs/bench_retrieve.py --items 1000000 --clients 8 --seconds 20

One process serves, another asks: each client waits for an answer, then asks anew. Queries are vectors, so that the
search is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rayrec.inference.index import Search, write_index
from rayrec.train.after.export import export_run
from tests.inference.runs import train

MEDIAN, P99 = 50, 99


def asked(port: int, clients: int, seconds: float, queries: list[list[float]], rate: float) -> list[float]:
    """Milliseconds of each answer; `rate` requests a second over all clients, 0: as fast as they are answered."""

    async def client(number: int, end: float, found: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        pause = clients / rate if rate else 0.0
        due = time.perf_counter() + pause * number / clients
        count = number
        while time.perf_counter() < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            body = json.dumps({"queries": [{"vector": queries[count % len(queries)]}], "k": 100}).encode()
            count += clients
            begin = due if pause else time.perf_counter()
            head = f"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in answer.lower().split(b"\r\n") if b"content-length" in line
            )
            await reader.readexactly(length)
            assert b" 200 " in answer.split(b"\r\n", 1)[0], answer
            found.append((time.perf_counter() - begin) * 1e3)
            due += pause
        writer.close()

    async def all_clients() -> list[float]:
        found: list[float] = []
        end = time.perf_counter() + seconds
        await asyncio.gather(*(client(number, end, found) for number in range(clients)))
        return found

    return asyncio.run(all_clients())


def serve(folder: str, model: str, port_to: Any, threads: int) -> None:
    """An HTTP server of one index, beside a small model, until its process is ended."""
    import socket

    import uvicorn

    from rayrec.serve import ModelSpec, Service
    from rayrec.serve.http import App
    from rayrec.serve.retrieval import Retrieval

    torch.set_num_threads(threads)
    sock = socket.create_server(("127.0.0.1", 0))
    app = App(Service([ModelSpec(name="small", path=Path(model))]), retrieval=Retrieval(Path(folder)))
    port_to.send(sock.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([sock])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.0], help="requests a second; 0: as fast as answered"
    )
    parser.add_argument("--search", nargs="+", default=["exact", "ivf"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recall", type=float, default=0.98)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    centres = random.normal(size=(2000, given.dim)).astype(np.float32)  # as of trained items, which lie in groups
    vectors = centres[random.integers(0, 2000, given.items)]
    vectors += 0.5 * random.standard_normal(vectors.shape, dtype=np.float32)
    held = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    queries = held[:: max(1, given.items // 1000)]
    context = multiprocessing.get_context("spawn")
    for kind in given.search:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "index"
            model = export_run(train(Path(root)), Path(root) / "model").folder
            items = pa.table({"item": np.arange(given.items)})
            wanted = Search(kind=kind, recall=given.recall)
            report = write_index(folder, held, items, search=wanted, queries=queries[:256])
            ours, theirs = context.Pipe()
            server = context.Process(target=serve, args=(str(folder), str(model), theirs, given.threads), daemon=True)
            server.start()
            try:
                port = ours.recv()
                time.sleep(2)
                asked(port, given.clients, 2, queries.tolist(), 0.0)
                for rate in given.rates:
                    found = asked(port, given.clients, given.seconds, queries.tolist(), rate)
                    median, p99 = np.percentile(found, [MEDIAN, P99])
                    print(
                        f"{kind}: {given.items:,} items, recall@100 {report.recall or 1.0}, {given.clients} clients, "
                        f"{len(found) / given.seconds:.0f} requests/s: median {median:.1f} ms, p99 {p99:.1f} ms",
                        flush=True,
                    )
            finally:
                server.terminate()
                server.join()


if __name__ == "__main__":
    main()
