"""Measures `POST /retrieve` over HTTP: latency over many items with several clients, exact and approximate; and what it
costs to exclude items, in turns with requests that exclude none, over HTTP and inside the process.

    python jobs/bench/retrieval.py --items 1000000 --clients 8 --seconds 20

One process serves, another sends requests: each client waits for an answer, then sends the next request. Queries are
vectors, so that only the search is measured. A search has to pass the best items if these are excluded, so inside the
process it is also compared with one for as many items more.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from harness import arguments, in_turns, machine, paired_ratio, print_json

from rayrec.inference import ItemIndex, Search, write_index
from rayrec.train.after.export import export_run
from tests.inference.runs import train

MEDIAN, P99 = 50, 99
TURNS = 8


def latencies_ms(
    port: int,
    clients: int,
    seconds: float,
    queries: list[list[float]],
    rate: float,
    excluded: list[list[int]] | None = None,
) -> list[float]:
    """Milliseconds of each answer.

    Args:
        rate: Requests per second of all clients; 0: without a pause.
        excluded: Ids that each query excludes.
    """

    async def client(number: int, end: float, latencies: list[float]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        pause = clients / rate if rate else 0.0
        due = time.perf_counter() + pause * number / clients
        count = number
        while time.perf_counter() < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked: dict[str, Any] = {"vector": queries[count % len(queries)]}
            if excluded is not None:
                asked["exclude"] = excluded[count % len(queries)]
            body = json.dumps({"queries": [asked], "k": 100}).encode()
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
            latencies.append((time.perf_counter() - begin) * 1e3)
            due += pause
        writer.close()

    async def all_clients() -> list[float]:
        latencies: list[float] = []
        end = time.perf_counter() + seconds
        await asyncio.gather(*(client(number, end, latencies) for number in range(clients)))
        return latencies

    return asyncio.run(all_clients())


def exclusion(
    port: int, seconds: float, queries: list[list[float]], excluded: dict[str, list[list[int]]]
) -> dict[str, float]:
    """The median latency of one client that excludes items, divided by that of one that excludes none."""
    sides: dict[str, Any] = {"none": None, **excluded}
    turns = in_turns(
        {
            name: lambda ids=ids: statistics.median(latencies_ms(port, 1, seconds / TURNS, queries, 0.0, ids))
            for name, ids in sides.items()
        },
        TURNS,
        warmup=1,
    )
    return {name: paired_ratio(turns[name], turns["none"]) for name in excluded}


def exclusion_inside(index: ItemIndex, queries: torch.Tensor, excluded: dict[str, list[list[int]]]) -> dict[str, float]:
    """As `exclusion`, without HTTP; and "for more", a search that excludes none, for as many items more."""
    import faiss

    faiss.omp_set_num_threads(1)  # threads that wait for each other measure the machine's other load
    torch.set_num_threads(1)
    k, more = 100, len(next(iter(excluded.values()))[0])

    def search(wanted: int, banned: list[list[int]] | None) -> float:
        begin = time.perf_counter()
        for number in range(len(queries)):
            index.search(queries[number : number + 1], wanted, None if banned is None else [banned[number]])
        return time.perf_counter() - begin

    sides = {"none": partial(search, k, None), "for more": partial(search, k + more, None)}
    sides |= {name: partial(search, k, ids) for name, ids in excluded.items()}
    turns = in_turns(sides, TURNS, warmup=1)
    return {name: paired_ratio(turns[name], turns["none"]) for name in sides if name != "none"}


def serve(folder: str, model: str, port_to: Any, threads: int) -> None:
    """Serves one index and a small model over HTTP until the process is terminated."""
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
    parser = arguments(__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0], help="requests per second; 0: without a pause")
    parser.add_argument("--search", nargs="+", default=["exact", "ivf"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recall", type=float, default=0.98)
    parser.add_argument("--excluded", type=int, default=200, help="items that a query excludes")
    args = parser.parse_args()
    print(machine(), flush=True)
    results: dict[str, dict[str, float]] = {}
    random = np.random.default_rng(0)
    centres = random.normal(size=(2000, args.dim)).astype(np.float32)  # trained items form clusters
    vectors = centres[random.integers(0, 2000, args.items)]
    vectors += 0.5 * random.standard_normal(vectors.shape, dtype=np.float32)
    normalized = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    queries = normalized[:: max(1, args.items // 1000)]
    context = multiprocessing.get_context("spawn")
    for kind in args.search:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "index"
            model = export_run(train(Path(root)), Path(root) / "model").folder
            items = pa.table({"item": np.arange(args.items)})
            wanted = Search(kind=kind, recall=args.recall)
            report = write_index(folder, normalized, items, search=wanted, queries=queries[:256]).item_index(folder)
            ours, theirs = context.Pipe()
            server = context.Process(target=serve, args=(str(folder), str(model), theirs, args.threads), daemon=True)
            server.start()
            try:
                port = ours.recv()
                time.sleep(2)
                latencies_ms(port, args.clients, 2, queries.tolist(), 0.0)
                index = ItemIndex(folder, checksums=False)
                asked, random_ids = queries[:100], random.integers(0, args.items, (100, args.excluded))
                nearest = index.search(asked, args.excluded)[1]
                sets = {"random": random_ids.tolist(), "nearest": nearest.tolist()}
                ratios = exclusion(port, args.seconds, asked.tolist(), sets)
                results[f"{kind} without {args.excluded}"] = ratios
                text = ", ".join(f"{name} ones {ratio:.2f}" for name, ratio in ratios.items())
                print(f"{kind}: median latency with {args.excluded} excluded items over none: {text}", flush=True)
                inside = exclusion_inside(index, asked, sets)
                results[f"{kind} without {args.excluded}, inside"] = inside
                text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in inside.items())
                print(f"{kind}: time of a search with {args.excluded} excluded items over none: {text}", flush=True)
                for rate in args.rates:
                    latencies = latencies_ms(port, args.clients, args.seconds, queries.tolist(), rate)
                    median, p99 = np.percentile(latencies, [MEDIAN, P99])
                    rps = len(latencies) / args.seconds
                    results[f"{kind} at {rate:g}/s"] = {"p50_ms": median, "p99_ms": p99, "rps": rps}
                    print(
                        f"{kind}: {args.items:,} items, recall@100 {report.recall or 1.0}, {args.clients} clients, "
                        f"{rps:.0f} requests/s: median {median:.1f} ms, p99 {p99:.1f} ms",
                        flush=True,
                    )
            finally:
                server.terminate()
                server.join()
    print_json(args, results)


if __name__ == "__main__":
    main()
