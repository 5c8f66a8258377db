"""Measures increments on two gloo ranks: their bytes, the pause of a step, and loading a chain.

    python jobs/bench/increments.py --gb 1 --json

Each round trains steps that together touch 1 % of the rows, then saves an increment. A chain of as many increments as a
run has before the next full checkpoint is loaded in turns with a full checkpoint of the same state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import RANKS, TABLES, _drop, _model, _together
from harness import arguments, machine, print_json

from rayrec.checkpoint import CheckpointStore, Saving, Started
from rayrec.distributed import comm
from rayrec.sparse import KeyedJaggedTensor

SHARE, IDS, MANY_IDS = 0.01, 512, 8192
GOALS = {
    "increment_share_of_full_bytes": "goal ≤ 0.03",
    "idle_increment_mb": "goal < 1",
    "chain_load_ratio_to_full": "goal ≤ 1.5",
    "increment_pause_ms": "goal ≤ 50",
    "step_ratio_with_marks": "goal ≤ 1.02",
}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """All results, from two new processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="rayrec-increments-", dir=args.folder) as folder:
        processes = [context.Process(target=_rank, args=(rank, folder, args, answers)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")
        results: dict[str, float] = answers.get()
    return results


def _rank(rank: int, folder: str, args: argparse.Namespace, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    model, other = _model(group, int(args.gb * 1e9)), _model(group, int(args.gb * 1e9))
    rows = next(iter(model.tables().values())).config.num_embeddings
    store, results = CheckpointStore(Path(folder) / "chain"), dict[str, float]()
    store.track_changes(model)
    generator = torch.Generator().manual_seed(rank)
    ratios = []
    for _ in range(args.rounds):  # the two models, in turns
        batches = [_batch(rows, generator, MANY_IDS) for _ in range(10)]
        seconds = [_together(group, partial(_steps, one, batches)) for one in (model, other, other, model)]
        ratios.append((seconds[0] + seconds[3]) / (seconds[1] + seconds[2]))
    full = store.save(0, model, group=group)
    full_bytes, pauses, shares, step = _bytes(full.path), [], [], 0
    while True:
        step += 1
        for _ in range(max(1, round(SHARE * rows / (RANKS * IDS)))):
            _steps(model, [_batch(rows, generator)])
        dist.barrier(group)
        start = time.perf_counter()
        started = store.save_increment(step, model, None, Saving(), group)
        pauses.append(time.perf_counter() - start)
        store.finish(group)
        if started is Started.FULL_IS_DUE:
            break
        newest = store.latest()
        assert newest is not None
        shares.append(_bytes(newest.path) / full_bytes)
    pauses.pop()
    chain = store.latest()
    assert chain is not None
    same = CheckpointStore(Path(folder) / "full").save(step, model, group=group)
    loads: dict[str, list[float]] = {"chain": [], "full": []}
    for _ in range(args.rounds):
        for name, checkpoint in (("full", same), ("chain", chain)):
            for path in Path(checkpoint.path).parent.glob("step_*/*"):
                _drop(path)
            own = CheckpointStore(Path(checkpoint.path).parent)
            loads[name].append(_together(group, partial(own.load, checkpoint, other, group=group)))
    store.save(step, model, group=group)
    store.save_increment(step + 1, model, None, Saving(), group)
    store.finish(group)
    idle = store.latest()
    assert idle is not None
    results["increment_share_of_full_bytes"] = statistics.median(shares)
    results["idle_increment_mb"] = _bytes(idle.path) / 1e6
    results["increments_in_chain"] = len(shares)
    results["chain_load_ratio_to_full"] = statistics.median(loads["chain"]) / statistics.median(loads["full"])
    results["increment_pause_ms"] = 1e3 * statistics.median(pauses)
    results["step_ratio_with_marks"] = statistics.median(ratios)
    if rank == 0:
        answers.put(results)
    comm.leave()


def _batch(rows: int, generator: torch.Generator, ids: int = IDS) -> KeyedJaggedTensor:
    """Bags of one id for each table."""
    values = torch.randint(0, rows, (TABLES * ids,), generator=generator)
    keys, lengths = [f"f{i}" for i in range(TABLES)], torch.ones(TABLES * ids, dtype=torch.int32)
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)


def _steps(model: Any, batches: list[KeyedJaggedTensor]) -> None:
    for batch in batches:
        model(batch).wait().values().sum().backward()


def _bytes(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).iterdir())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the tables over both ranks")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side of a ratio")
    parser.add_argument("--folder", help="folder for the files; default: a temporary folder")
    args = parser.parse_args()
    print(machine(), flush=True)
    results = measure(args)
    for name, value in results.items():
        print(f"{name:30} {value:>12,.4f}  {GOALS.get(name, '')}")
    print_json(args, results)


if __name__ == "__main__":
    main()
