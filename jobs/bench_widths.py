"""Times sharded embeddings of any width against those of the next multiple of 4, which every kernel likes.

    python jobs/bench_widths.py [--ids power-law]

The steps of `bench_embedding.py`, two gloo ranks on this machine's CPU; the widths take turns in one run.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench_embedding import TW, Case, on_ranks, rayrec_step, timed

WIDTHS = (1, 3, 5, 10, 50)
GOAL = 1.1


def case_of(dim: int, ids: str) -> Case:
    return Case(f"table-wise, 26 tables, width {dim}", 1024, 1, (TW,) * 26, dim=dim, ids=ids)


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
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


def next_of_4(width: int) -> int:
    return -(-width // 4) * 4


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--rounds", type=int, default=31, help="timed rounds of each width (default 31)")
    cli.add_argument("--ids", choices=["uniform", "power-law"], default="uniform", help="how ids are drawn")
    cli.add_argument("--json", action="store_true", help="one object with all rows as the last line")
    args = cli.parse_args()
    on_ranks(work, args)


if __name__ == "__main__":
    main()
