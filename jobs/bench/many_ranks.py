"""Measures what grows with the number of ranks: planning a save, the pause of training for it, commit and restore on
object storage, the mailbox.

    python jobs/bench/many_ranks.py --ranks 64 1000

The ranks are simulated in this process; the times of plans are CPU times. The pause is a rank's own work and the
exchanges of a save with a kept plan, without the copy of the state to host memory. Messages go along a tree of the
ranks, so those of W ranks take log2(W) times as long as those of two, which are measured between two gloo processes,
with the sizes that they have at W. `--only groups` measures whole groups of 2 to 32 processes, which share the cores.
The storage is moto's S3 server in a process of its own, which waits 50 ms before it answers a request. It reads objects
from files, because moto is slow.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import arguments, machine, milliseconds, print_json

from rayrec.checkpoint import CheckpointStore
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.ownership import folder_name
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.save_plan import SavePlan, Work, divide, items_of, regions_of
from rayrec.checkpoint.saving import BackgroundSave, Save
from rayrec.checkpoint.writer import Item, Throttle
from rayrec.data import Cursor
from rayrec.data.order.cursor import Progress
from rayrec.distributed import comm
from rayrec.storage.folder import open_folder
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.position import START
from rayrec.train.worker.window import Window
from tests.ranks import Ranks

TABLES, ROWS, DIM, LAYERS = 26, 4000, 128, 60  # rows of a rank
CALL_S = 0.05
LAN_MS = 0.05  # a message takes so much longer between hosts than between processes of one
GOALS = {"pause_ms": "goal ≤ 50", "pause_lan_ms": "goal ≤ 50", "commit_s": "goal ≤ 10", "restore_s": "goal ≤ 10"}
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


def pause(ranks: int) -> dict[str, float]:
    """The whole time in which a save with a kept plan stops the steps, but for the copy of the state."""
    own_ms = plan(ranks)["later_plan_ms"]
    levels = math.ceil(math.log2(ranks))
    pool = Ranks(2)
    try:
        level_ms, counted = max(pool.run(_exchanges_of_save, ranks, timeout_s=600))
    finally:
        pool.close()
    # Of each level of the tree: up and down; with the size of a message before it; up only.
    in_a_row = {"combine": 2, "combine_objects": 4, "sum_on_rank_0": 1}
    messages = levels * sum(in_a_row[name] * times for name, times in counted.items())
    pause_ms = own_ms + levels * level_ms
    return {
        "exchanges": counted.total(),
        "messages_in_a_row": messages,
        "exchanges_of_2_ms": level_ms,
        "pause_ms": pause_ms,
        "pause_lan_ms": pause_ms + messages * LAN_MS,
    }


def _exchanges_of_save(group: Any, simulated: int, rounds: int = 100) -> tuple[float, Counter[str]]:
    """(milliseconds of the exchanges of a save, their numbers), with messages as large as those of so many ranks.

    The sum of the shortest times: other load on the machine only adds to them.
    """
    torch.set_num_threads(1)  # on a busy machine, threads of a rank wait for each other
    rank = group.rank()
    control = Control(rank, group.size(), group)
    window = Window(torch.device("cpu"), control, group)
    each = simulated // group.size()
    rows = tuple((rank * each + other, 12_345) for other in range(each))
    progress = Progress(data="d" * 64, world_size=simulated, total=1 << 40, rows=rows, step_rows=65_536)
    position = replace(START, cursor=Cursor(epoch=0, parts=(progress,)))
    counts, demands = torch.zeros(2 + TABLES, dtype=torch.int64), torch.zeros(3 * simulated, dtype=torch.int64)
    idle = BackgroundSave()
    exchanges: list[Callable[[], object]] = [
        lambda: position.merged(control),
        lambda: window.state(1),
        lambda: idle.wait(group),
        lambda: comm.combine(counts, group, lambda ranks: ranks.amax(0)),  # as in CheckpointStore.save_in_background
        lambda: comm.combine(demands, group, lambda ranks: ranks.sum(0)),
    ]
    shortest = [math.inf] * len(exchanges)
    with mock.patch.object(comm.collectives, "link_of", lambda *_: None):  # as between hosts
        for _ in range(rounds):
            with comm.count_collectives() as counted:
                for number, exchange in enumerate(exchanges):
                    dist.barrier(group)
                    shortest[number] = min(shortest[number], milliseconds(exchange))
    return sum(shortest), counted


def groups(_: int) -> dict[str, float]:
    """The exchanges of a save in groups of real processes on this machine; they share its cores."""
    results = {}
    for size in (2, 4, 8, 16, 32):
        pool = Ranks(size)
        try:
            results[f"exchanges_of_{size}_processes_ms"] = max(ms for ms, _ in pool.run(_exchanges_of_save, size))
        finally:
            pool.close()
    return results


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
        committed=lambda _: None,
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
    """The calls to the mailbox, and the bytes that it sends, while the watches of all ranks wait for one for 30 s."""
    from rayrec.train.run.log import Mailbox
    from rayrec.train.worker.watch import POLL_S, TURN_S, CodeLocation, Watch

    box, calls, sent = Mailbox(), 0, 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls, sent
            result = method(*args)
            calls, sent = calls + 1, sent + len(pickle.dumps(result))
            return result

        return call

    sink: Any = SimpleNamespace(
        report_waiting=counted(box.report_waiting),
        waiting_ranks=counted(box.waiting_ranks),
        stop_requested=counted(box.stop_requested),
    )
    watches = [Watch(sink, rank, ranks, hang_s=1e9, suspicious_s=5.0) for rank in range(ranks)]
    here = CodeLocation("rayrec.train.worker.lockstep._exchange, line 136", ((1, 2),), True)
    for poll in range(1, int(TURN_S / POLL_S) + 1):
        for watch in watches[:-1]:
            watch._check(here, 5.0 + poll * POLL_S)
    return {"mailbox_calls_per_s": calls / TURN_S, "mailbox_sends_kb_per_s": sent / TURN_S / 1e3}


SECTIONS = {"plan": plan, "pause": pause, "groups": groups, "storage": storage, "mailbox": mailbox}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=["plan", "pause", "storage", "mailbox"])
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
