"""What balancing histories of unequal length over ranks would save, before it is built: counts, and a step's time.

    python jobs/bench/lengths.py [--rounds 9] [--json]

Lengths follow Zipf's law up to 1,000. Ranks keep the number of their rows. As dealt: each rank has the rows that it
read. Balanced: the rows of a global batch are dealt by falling length, each to the rank with the smallest sum of
squares that still wants rows. The load is the largest sum of squares of a rank over the mean. The time is that of
forward and backward of a transformer of two blocks × 64 on the rows of each of two ranks, one after the other; the
slower rank counts. It has no exchange of rows between ranks, which balancing needs: a rank reads its own files.
"""

from __future__ import annotations

import heapq
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import arguments, in_turns, machine, medians, milliseconds, paired_ratio, print_json

from rayrec.modules.attention import Layout
from rayrec.modules.encoder import EncoderConfig, TransformerEncoder

LONGEST, DIM = 1000, 64


def draw(rows: int, exponent: float, seed: int) -> Any:
    share = np.arange(1, LONGEST + 1.0) ** -exponent
    return np.random.default_rng(seed).choice(np.arange(1, LONGEST + 1), rows, p=share / share.sum())


def balanced(lengths: Any, ranks: int) -> list[Any]:
    """The lengths of each rank, equally many."""
    heap, dealt = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for length in sorted(lengths.tolist(), reverse=True):
        squares, rank = heapq.heappop(heap)
        dealt[rank].append(length)
        if len(dealt[rank]) < len(lengths) // ranks:
            heapq.heappush(heap, (squares + length**2, rank))
    return [np.array(each) for each in dealt]


def load(dealt: list[Any]) -> float:
    squares = [float((lengths.astype(float) ** 2).sum()) for lengths in dealt]
    return max(squares) * len(squares) / sum(squares)


def counts(exponent: float, ranks: int, rows: int) -> dict[str, Any]:
    batches = [draw(rows * ranks, exponent, seed) for seed in range(20)]
    before = np.mean([load(np.split(batch, ranks)) for batch in batches])
    after = np.mean([load(balanced(batch, ranks)) for batch in batches])
    return {"exponent": exponent, "ranks": ranks, "rows": rows, "before": float(before), "after": float(after)}


def step_ms(encoder: TransformerEncoder, lengths: Any) -> float:
    offsets = F.pad(torch.from_numpy(lengths.astype(np.int64)).cumsum(0), (1, 0))
    values = torch.randn(int(offsets[-1]), DIM, requires_grad=True)
    return milliseconds(lambda: encoder(values, Layout(offsets)).sum().backward())


def timed(encoder: TransformerEncoder, batches: list[list[Any]]) -> float:
    """Milliseconds of the slower rank in each batch, summed."""
    return sum(max(step_ms(encoder, lengths) for lengths in dealt) for dealt in batches)


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--rounds", type=int, default=9, help="timed rounds (default 9)")
    args = cli.parse_args()
    torch.set_num_threads(1)
    print(machine())
    results: dict[str, Any] = {"counts": [], "steps": []}
    for exponent in (0.75, 1.2):
        for ranks in (2, 8, 64):
            row = counts(exponent, ranks, 64)
            results["counts"].append(row)
            print(f"Zipf {exponent}, {ranks:2d} ranks × 64 rows: load {row['before']:.2f}, balanced {row['after']:.2f}")
    encoder = TransformerEncoder(EncoderConfig(dim=DIM))
    for exponent in (0.75, 1.2):
        drawn = [draw(128, exponent, seed) for seed in range(6)]
        sides = {"before": [np.split(each, 2) for each in drawn], "after": [balanced(each, 2) for each in drawn]}
        times = in_turns({name: partial(timed, encoder, each) for name, each in sides.items()}, args.rounds, warmup=1)
        ratio, ms = paired_ratio(times["after"], times["before"]), medians(times)
        results["steps"].append({"exponent": exponent, "ratio": ratio, **ms})
        print(f"Zipf {exponent}, 2 ranks × 64 rows: step of the slower rank, balanced / as dealt {ratio:.2f}")
    print_json(args, results)


if __name__ == "__main__":
    main()
