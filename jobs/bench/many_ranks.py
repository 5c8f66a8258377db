"""Measures what grows with the number of ranks: planning a save, commit and restore on object storage, the mailbox, and
the exchange before each step.

    python jobs/bench/many_ranks.py --ranks 64 1000 --only plan storage mailbox
    python jobs/bench/many_ranks.py --ranks 64 --only exchange

Plan, storage and mailbox simulate the ranks in this process; the times of plans are CPU times. `exchange` starts a
process for each rank, on one host, and makes them exchange over gloo's sockets as ranks of several hosts do. The
storage is moto's S3 server in a process of its own, which waits 50 ms before it answers a request; it gets objects from
files.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import arguments, in_turns, machine, medians, milliseconds, print_json

from rayrec.checkpoint import CheckpointStore
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.ownership import folder_name
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.save_plan import SavePlan, Work, divide, items_of, regions_of
from rayrec.checkpoint.saving import Save
from rayrec.checkpoint.writer import Item, Throttle
from rayrec.distributed import comm
from rayrec.distributed.comm import collectives
from rayrec.storage.folder import open_folder

TABLES, ROWS, DIM, LAYERS = 26, 4000, 128, 60  # rows of a rank
CALL_S = 0.05
GOALS = {"later_plan_ms": "goal ≤ 50, with 3 exchanges", "commit_s": "goal ≤ 10", "restore_s": "goal ≤ 10"}
_S3 = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


def plan(ranks: int) -> dict[str, float]:
    """A save's plan: row-wise tables with an accumulator per row, dense tensors with two moments, random states."""
    sent = [pickle.dumps(regions_of(items_of(_state(rank, ranks)))) for rank in range(ranks)]
    start = time.process_time()
    answers = divide([pickle.loads(data) for data in sent])
    pickled = [pickle.dumps(answer) for answer in answers]
    first_s = time.process_time() - start

    whole, rank = _state(0, 1), SavePlan()
    rank.renew(items_of(whole), None)

    def again() -> float:
        """A rank's own work of a later save."""
        start = time.process_time()
        items = items_of(whole)
        assert rank.fits(items) and rank.work(items).items
        return (time.process_time() - start) * 1e3

    return {
        "first_plan_s": first_s,
        "received_by_rank_0_mb": sum(map(len, sent)) / 1e6,
        "received_by_others_kb": max(map(len, pickled)) / 1e3,
        "later_plan_ms": statistics.median(again() for _ in range(20)),
    }


def _state(rank: int, ranks: int) -> dict[str, Rectangles]:
    offset, total = rank * ROWS, ranks * ROWS
    state = {}
    for t in range(TABLES):
        state[f"table/ebc.t{t}"] = Rectangles((total, DIM), [Rectangle((offset, 0), _meta(ROWS, DIM))])
        state[f"table_state/ebc.t{t}/sum"] = Rectangles((total, 1), [Rectangle((offset, 0), _meta(ROWS, 1))])
    for layer, kind in itertools.product(
        range(LAYERS), ("dense/x", "dense_state/x/exp_avg", "dense_state/x/exp_avg_sq")
    ):
        state[f"{kind}{layer}"] = Rectangles.whole(_meta(512, 512))
    for kind in ("torch", "python", "numpy"):
        state[f"rng/{rank:05d}/{kind}"] = Rectangles.whole(_meta(8192))
    return state


@functools.cache
def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def storage(ranks: int) -> dict[str, float]:
    """Rank 0's commit after all ranks have written their part; one process then reads a tensor of each data file."""
    with tempfile.TemporaryDirectory(prefix="rayrec-parts-") as folder:
        for rank in range(1, ranks):
            _save(open_folder(folder), rank, ranks).run(Throttle())
        with _slow_s3(folder) as options:
            return _commit_and_restore(open_folder(f"s3://bench{options}"), ranks)


def _commit_and_restore(root: Any, ranks: int) -> dict[str, float]:
    save = _save(root, 0, ranks)
    commit_s = milliseconds(lambda: save.run(Throttle())) / 1e3
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None

    def restore() -> None:
        with store.reader(checkpoint) as reader:
            reader.fill({f"dense/{rank}": Rectangles.whole(torch.empty(256)) for rank in range(ranks)})

    return {"commit_s": commit_s, "restore_s": milliseconds(restore) / 1e3}


def _save(root: Any, rank: int, ranks: int) -> Save:
    keys = frozenset(f"dense/{other}" for other in range(ranks)) if rank == 0 else frozenset[str]()
    return Save(
        folder=root.sub(folder_name(1, 1)),
        rank=rank,
        work=Work([Item(f"dense/{rank}", (256,), (0,), torch.full((256,), float(rank)))], keys),
        manifest=Manifest(step=1, attempt=1, time=0.0, world_size=ranks, iteration=0, plan={}, mapping=None, extra={}),
        may_commit=lambda: None,
        committed=lambda: None,
    )


@contextmanager
def _slow_s3(folder: str) -> Iterator[str]:
    """Options of URIs in the bucket `bench`, which has the files of `folder`. The server answers after 50 ms."""
    context = multiprocessing.get_context("spawn")
    address = context.Queue()
    server = context.Process(target=_serve, args=(folder, address), daemon=True)
    server.start()
    with mock.patch.dict(os.environ, _S3):
        yield f"?endpoint_override=127.0.0.1:{address.get(timeout=300)}&scheme=http&region=us-east-1"
    server.terminate()
    server.join()


def _serve(folder: str, address: Any) -> None:
    import logging

    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket("bench", "us-east-1")
    for path in Path(folder).rglob("*"):
        if path.is_file():
            backend.put_object("bench", str(path.relative_to(folder)), path.read_bytes())
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)

    def slow(environ: Any, start: Any) -> Any:
        time.sleep(CALL_S)
        path = Path(folder, environ["PATH_INFO"].removeprefix("/bench/"))
        if environ["REQUEST_METHOD"] in ("GET", "HEAD") and not environ["QUERY_STRING"] and path.is_file():
            return _answer(path.read_bytes(), environ, start)  # moto needs several ms of CPU time a request
        return application(environ, start)

    server = make_server("127.0.0.1", 0, slow, threaded=True)
    address.put(server.port)
    server.serve_forever()


def _answer(data: bytes, environ: Any, start: Any) -> list[bytes]:
    """An object, or a range of its bytes."""
    status, headers = "200 OK", [("ETag", '"0"'), ("Last-Modified", "Fri, 27 Nov 2026 00:00:00 GMT")]
    if wanted := environ.get("HTTP_RANGE"):
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        headers.append(("Content-Range", f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"))
        status, data = "206 Partial Content", data[first : last + 1]
    start(status, [*headers, ("Content-Length", str(len(data)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [data]


def mailbox(ranks: int) -> dict[str, float]:
    """The mailbox's share of the time while all ranks wait for one: one report of each in 30 s, and two questions a
    second."""
    import ray

    from rayrec.train.run.log import Mailbox
    from rayrec.train.worker.watch import POLL_S, TURN_S

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=0)(Mailbox).remote()
        waiting = (123456, "rayrec.train.worker.lockstep._exchange, line 136 of a model of the usual kind")
        ray.get(actor.waiting_ranks.remote())
        questions = int(TURN_S / POLL_S)
        start = time.perf_counter()
        ray.get([actor.report_waiting.remote(rank, waiting) for rank in range(ranks)])
        for _ in range(questions):
            ray.get(actor.waiting_ranks.remote())
        seconds = time.perf_counter() - start
    finally:
        ray.shutdown()
    return {"mailbox_calls_per_s": (ranks + questions) / TURN_S, "mailbox_busy": seconds / TURN_S}


def exchange(ranks: int) -> dict[str, float]:
    """One exchange of 12 numbers: along a tree, and around gloo's ring as before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "rayrec.distributed.comm"])
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="rayrec-ranks-") as folder:
        processes = [context.Process(target=_exchange_rank, args=(r, ranks, folder, answers)) for r in range(ranks)]
        for process in processes:
            process.start()
        results: dict[str, float] = answers.get(timeout=550)
        for process in processes:
            process.join()
    return results


def _exchange_rank(rank: int, ranks: int, folder: str, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks)
    group, numbers = dist.group.WORLD, torch.zeros(12, dtype=torch.float64)
    merge: Callable[[torch.Tensor], torch.Tensor] = lambda parts: parts.sum(0)  # noqa: E731
    with mock.patch.object(collectives, "link_of", lambda group, tensor: None):  # as between hosts
        times = medians(
            in_turns(
                {
                    "tree_ms": lambda: milliseconds(lambda: comm.combine(numbers, group, merge)),
                    "ring_ms": lambda: milliseconds(lambda: comm.all_gather(numbers, group)),
                },
                rounds=20,
                warmup=3,
            )
        )
    if rank == 0:
        answers.put(times | {"tree_ratio_to_ring": times["tree_ms"] / times["ring_ms"]})
    comm.barrier(group)
    comm.leave()


SECTIONS = {"plan": plan, "storage": storage, "mailbox": mailbox, "exchange": exchange}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=["plan", "storage", "mailbox"])
    args = parser.parse_args()
    print(machine(), flush=True)
    results: dict[str, float] = {}
    for ranks, name in itertools.product(args.ranks, args.only):
        for key, value in SECTIONS[name](ranks).items():
            results[f"{key}_{ranks}"] = value
            print(f"{ranks:5} ranks  {key:24} {value:>12,.3f}  {GOALS.get(key, '')}", flush=True)
    print_json(args, results)


if __name__ == "__main__":
    main()
