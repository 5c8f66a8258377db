"""Counts the lookups of each rank for ids in the order of a vocabulary, in random order, and spread as runs do.

    python jobs/bench/skew.py [--rows 10000000] [--json]
    python jobs/bench/skew.py --steps [--rounds 15]        # times steps of two ranks as well

Ids follow Zipf's law, and the table is cut into equal blocks of rows. The load is that of the busiest rank over the
mean, without the hottest id, which is on one rank in every order. "at best" is the load of a rank with the second id
alone. "distinct" is the load in the order of runs if each rank sends its distinct ids once (`sharding.dedup`), of
20,480 ids a rank, with the hottest id.
"counts" cuts by counts instead: every rank has equally many lookups, and the figure is the largest number of rows over
the mean.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from embedding import RW, Case, names, on_ranks, rayrec_sharded, stepper, timed
from harness import arguments, in_turns, machine, medians, paired_ratio, print_json

from rayrec.data import Vocabulary
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.sparse import KeyedJaggedTensor

EXPONENTS, RANKS = (0.75, 1.05), (8, 64)
IDS_PER_RANK = 20_480  # 1,024 examples of 20 ids


def orders(rows: int) -> dict[str, Any]:
    """The row of each id, the most frequent id first."""
    return {
        "vocabulary": np.arange(rows),
        "random": np.random.default_rng(0).permutation(rows),
        "spread": vocabulary_rows(np.arange(rows), Vocabulary(path="", oov_rows=0, spread_over=rows)),
    }


def counted(rows: int, exponent: float, ranks: int) -> dict[str, Any]:
    share = np.arange(1, rows + 1.0) ** -exponent
    share /= share.sum()
    cuts = np.searchsorted(share.cumsum(), np.arange(1, ranks) / ranks)
    largest = np.diff([0, *cuts, rows]).max() * ranks / rows
    in_batch = -np.expm1(IDS_PER_RANK * np.log1p(-share))  # probability that a rank's batch has the id
    share[0] = 0
    block, by_order = -(-rows // ranks), orders(rows)
    loads = {
        name: float(np.bincount(row // block, share, minlength=ranks).max() * ranks) for name, row in by_order.items()
    }
    distinct = np.bincount(by_order["spread"] // block, in_batch, minlength=ranks)
    loads |= {"best": max(1.0, share[1] * ranks), "distinct": float(distinct.max() * ranks / distinct.sum())}
    return {"exponent": exponent, "ranks": ranks, **loads, "counts": float(largest)}


TIMED = Case("4 tables × 400k × 64, row-wise, 1,024 × ~20 ids", 1024, 20, (RW,) * 4, rows=400_000)


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    keys = [feature for _, feature, _ in names(TIMED)]
    for exponent in EXPONENTS:
        share = torch.arange(1, TIMED.rows + 1, dtype=torch.float64).pow_(-exponent).cumsum_(0)
        sides = {}
        for name, row in orders(TIMED.rows).items():
            generator = torch.Generator().manual_seed(rank)
            kjts = []
            for _ in range(4):
                lengths = torch.randint(0, 2 * TIMED.bag + 1, (len(keys) * TIMED.batch,), generator=generator)
                drawn = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64) * share[-1]
                position = torch.searchsorted(share, drawn).clamp_(max=TIMED.rows - 1)
                kjts.append(KeyedJaggedTensor(keys, torch.from_numpy(row)[position], lengths=lengths))
            sides[name] = stepper(rayrec_sharded(TIMED), kjts, TIMED)
        for step in sides.values():
            timed(step, 10)
        times = in_turns({name: partial(timed, step, 5) for name, step in sides.items()}, args.rounds)
        if rank == 0:
            ratios = {name: paired_ratio(times["vocabulary"], times[name]) for name in ("random", "spread")}
            ms = medians(times)
            results.append({"exponent": exponent, **ms, "ratios": ratios})
            print(
                f"{TIMED.name}, Zipf {exponent}: {ms['vocabulary']:.1f} ms a step in the vocabulary's order, "
                f"{ms['spread']:.1f} ms spread: {ratios['spread']:.2f} × ({ratios['random']:.2f} × random order)",
                flush=True,
            )


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--rows", type=int, default=10_000_000, help="rows of the table (default 10 million)")
    cli.add_argument("--steps", action="store_true", help="time steps of two ranks")
    cli.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    args = cli.parse_args()
    if args.steps:
        print(f"{machine()}, 2 gloo ranks of 1 thread, median of {args.rounds} rounds")
        on_ranks(work, args)
        return
    rows = [counted(args.rows, exponent, ranks) for exponent in EXPONENTS for ranks in RANKS]
    for row in rows:
        print(
            f"Zipf {row['exponent']}, {row['ranks']:2d} ranks: vocabulary's order {row['vocabulary']:.2f}, random "
            f"{row['random']:.2f}, spread {row['spread']:.2f}, at best {row['best']:.2f}, distinct "
            f"{row['distinct']:.2f}; counts: {row['counts']:.2f}"
        )
    print_json(args, {"rows": rows})


if __name__ == "__main__":
    main()
