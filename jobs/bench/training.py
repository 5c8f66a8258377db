"""Times the training of a DLRM on the CPU: two gloo ranks, batches from memory and from Parquet.

    python jobs/bench/training.py --json                          # rayrec alone
    pip install --target /tmp/peer --no-deps torchrec==1.8.0 \\
        iopath pyre-extensions typing-inspect tensordict portalocker pyvers orjson
    PYTHONPATH=/tmp/peer python jobs/bench/training.py --against torchrec --json

26 tables of 100,000 × 64, MLPs 512-256-64 and 512-512-256-1. A step is forward, loss, backward with the update of the
tables, and the dense optimizer. Both packages run the same code with the same weights and batches, in the same
processes, in turns. `--json` adds, for rayrec alone:

    parquet_ratio       samples/s with batches read from Parquet during training, over samples/s from memory
    data_wait_fraction  share of the time that training waits for such a batch
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from embedding import TW, WORLD, Case, make_batches, on_ranks
from harness import arguments, in_turns, machine, medians, paired_ratio
from packages import Arrays, Tables, dlrm, dlrm_step

from rayrec.data import BatchStream, Cursor, Manifest, ReadOptions, Schema
from rayrec.distributed import comm

TABLES, DIM, DENSE = 26, 64, 13
BOTTOM, TOP = [512, 256, DIM], [512, 512, 256, 1]
KEYS = [f"f{n}" for n in range(TABLES)]
SCHEMA = Schema.model_validate(
    {
        "label": {"column": "label"},
        "dense": [{"name": f"d{n}"} for n in range(DENSE)],
        "sparse": [{"name": key, "mapping": {"kind": "identity"}} for key in KEYS],
    }
)
Step = Callable[[Arrays], None]


CASES = [
    Case("batch 1024", 1024, 1, (TW,) * TABLES, goal=0.65, ids="power-law"),
    Case("batch 256", 256, 1, (TW,) * TABLES, ids="power-law"),
    Case("batch 1024, ~10 ids a bag", 1024, 10, (TW,) * TABLES, goal=0.62, ids="power-law"),
]


def drawn(case: Case, seed: int) -> list[Arrays]:
    """A few batches of a rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(case.batch, DENSE, generator=generator),
            ids,
            lengths,
            torch.randint(2, (case.batch,), generator=generator).float(),
        )
        for ids, lengths in make_batches(case, seed)
    ]


def stepper(package: str, case: Case) -> Step:
    """A training step of a DLRM with table-wise sharding, by "rayrec.torchrec" or "torchrec"."""
    tables = Tables((TW,) * TABLES, case.rows, DIM)
    return dlrm_step(package, *dlrm(package, tables, DENSE, BOTTOM, TOP), tables)


def timed(step: Step, batches: Iterator[Arrays], count: int) -> tuple[float, float]:
    """Milliseconds per step of the slower rank, and the fraction of them spent waiting for batches."""
    comm.barrier(dist.group.WORLD)
    start, waited = time.perf_counter(), 0.0
    for _ in range(count):
        before = time.perf_counter()
        arrays = next(batches)
        waited += time.perf_counter() - before
        step(arrays)
    spent = torch.tensor([time.perf_counter() - start, waited], dtype=torch.float64) / count * 1e3
    comm.all_reduce(spent, dist.group.WORLD, dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1] / spent[0])


def compare(case: Case, rank: int, peer: str | None, rounds: int) -> dict[str, Any]:
    """Both packages in turns, from memory."""
    batches = drawn(case, rank)
    sides = {"rayrec": stepper("rayrec.torchrec", case)} | ({peer: stepper(peer, case)} if peer else {})
    warm_ms = max(timed(side, cycle(batches), 20)[0] for side in sides.values())  # after 20 steps, layouts are chosen
    count = max(3, min(50, int(500 / warm_ms)))
    timers = {name: lambda side=side: timed(side, cycle(batches), count)[0] for name, side in sides.items()}
    times = in_turns(timers, rounds)
    row = {"case": case.name, "goal": case.goal} | {f"{name}_ms": ms for name, ms in medians(times).items()}
    if peer:
        row[f"ratio_to_{peer}"] = paired_ratio(times["rayrec"], times[peer])
    return row


def write_rows(folder: Path, case: Case, rows: int) -> None:
    """Writes four files with one id per feature."""
    for file, (dense, ids, _, label) in enumerate(drawn(replace(case, batch=rows // 4), WORLD)):
        columns: dict[str, Any] = {"label": label.numpy().astype(np.int8)}
        columns |= {f"d{n}": dense[:, n].numpy() for n in range(DENSE)}
        columns |= dict(zip(KEYS, ids.view(TABLES, -1).numpy(), strict=True))
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=65_536)


def from_parquet(folder: Path, case: Case, rank: int, rounds: int) -> dict[str, Any]:
    """Rounds from memory and from Parquet in turns, with one model."""
    step, memory = stepper("rayrec.torchrec", case), cycle(drawn(case, rank))
    manifest = Manifest.read(str(folder), SCHEMA)
    count = 20

    def read() -> Iterator[Arrays]:
        for epoch in range(1_000_000):
            with BatchStream(
                manifest,
                SCHEMA,
                dict.fromkeys(KEYS, case.rows),
                batch_rows=case.batch,
                rank=rank,
                world_size=WORLD,
                cursor=Cursor.start(epoch),
                seed=0,
                options=ReadOptions(reader="local"),
            ) as stream:
                for batch, _ in stream:
                    assert batch.dense is not None
                    if batch.rows == case.batch:
                        yield batch.dense, batch.sparse.values(), batch.sparse.lengths(), batch.label.view(-1)

    stored = read()
    timed(step, memory, 20)
    timed(step, stored, 10)
    times = [(timed(step, memory, count)[0], *timed(step, stored, count)) for _ in range(rounds)]
    return {
        "parquet_ratio": statistics.median(t[0] / t[1] for t in times),
        "data_wait_fraction": statistics.median(t[2] for t in times),
    }


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    for case in CASES:
        if args.only and args.only not in case.name:
            continue
        row = compare(case, rank, args.against, args.rounds)
        if rank == 0:
            ratio = f"{args.against} {row[f'{args.against}_ms']:8.1f} ms" if args.against else ""
            ratio += f"  {row[f'ratio_to_{args.against}']:.2f} ×" if args.against else ""
            ratio += f" (goal ≤ {case.goal:.2f})" if case.goal and args.against else ""
            print(f"{case.name:28s} rayrec {row['rayrec_ms']:8.1f} ms  {ratio}", flush=True)
            results.append(row)
    if not args.only:
        row = from_parquet(args.folder, CASES[0], rank, max(3, args.rounds // 2))
        if rank == 0:
            print(
                f"from Parquet {row['parquet_ratio']:.3f} × the rate from memory (goal ≥ 0.95), waiting for data "
                f"{row['data_wait_fraction']:.1%} of the time"
            )
            results.append({"case": CASES[0].name, **row})


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--against", choices=["torchrec"], help="also time this package in the same run")
    cli.add_argument("--rounds", type=int, default=11, help="timed rounds (default 11)")
    cli.add_argument("--only", help="only the cases whose names contain this")
    args = cli.parse_args()
    print(f"{machine()}, {WORLD} gloo ranks of 1 thread; ms a step, median of {args.rounds} rounds, power-law ids")
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        if not args.only:
            write_rows(args.folder, CASES[0], 1 << 18)
        on_ranks(work, args)


if __name__ == "__main__":
    main()
