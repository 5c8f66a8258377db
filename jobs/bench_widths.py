"""Times sharded embeddings of any width against those of the next multiple of 4, which every kernel likes.

    python jobs/bench_widths.py [--ids power-law]

The steps of `bench_embedding.py`, two gloo ranks on this machine's CPU; the widths take turns in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_embedding import TW, WORLD, Case, rayrec_step, timed

from rayrec.distributed import comm

WIDTHS = (1, 3, 5, 10, 50)
GOAL = 1.1


def case_of(dim: int, ids: str) -> Case:
    return Case(f"table-wise, 26 tables, width {dim}", 1024, 1, (TW,) * 26, dim=dim, ids=ids)


def work(rank: int, store: str, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    dims = sorted({dim for width in WIDTHS for dim in (width, next_of_4(width))})
    steps = {dim: rayrec_step(case_of(dim, args.ids), rank) for dim in dims}
    for step in steps.values():
        timed(step, 40)  # by then layouts are chosen
    rounds = [{dim: timed(step, 10) for dim, step in steps.items()} for _ in range(args.rounds)]
    for width in WIDTHS:
        wider = next_of_4(width)
        row = {
            "width": width,
            "ms": statistics.median(times[width] for times in rounds),
            "wider": wider,
            "wider_ms": statistics.median(times[wider] for times in rounds),
            "ratio": statistics.median(times[width] / times[wider] for times in rounds),
            "goal": GOAL,
        }
        if rank == 0:
            print(
                f"width {width:3d} {row['ms']:7.2f} ms   {wider:3d} {row['wider_ms']:7.2f} ms   "
                f"{row['ratio']:.2f} × (goal ≤ {GOAL})",
                flush=True,
            )
            results.append(row)
    comm.leave()


def next_of_4(width: int) -> int:
    return -(-width // 4) * 4


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rounds", type=int, default=31, help="timed rounds of each width (default 31)")
    cli.add_argument("--ids", choices=["uniform", "power-law"], default="uniform", help="how ids are drawn")
    cli.add_argument("--json", action="store_true", help="one object with all rows as the last line")
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(work, (os.path.join(folder, "store"), args, results), nprocs=WORLD)
        if args.json:
            print(json.dumps({"rows": list(results)}))


if __name__ == "__main__":
    main()
