"""Times training of a whole DLRM on this machine's CPU: two gloo ranks, batches from memory and from Parquet.

    python jobs/bench_train.py --json                             # rayrec alone
    pip install --target /tmp/peer --no-deps torchrec==1.8.0 \\
        iopath pyre-extensions typing-inspect tensordict portalocker pyvers orjson
    PYTHONPATH=/tmp/peer python jobs/bench_train.py --against torchrec --json

26 tables of 100,000 × 64, MLPs 512-256-64 and 512-512-256-1. A step is forward, loss, backward with the tables' update,
and the dense optimizer. Both sides run the same lines with the same weights and batches, the package's name is all that
differs; in the same processes, in turns; what counts is the median of the ratios of neighbouring rounds.

With --json the last line is one object: for each case `ratio_to_torchrec`, and of rayrec alone

    parquet_ratio       samples/s with batches that are read from Parquet beside training, over those from memory
    data_wait_fraction  of the time that training waits for such a batch
"""

from __future__ import annotations

import argparse
import os
import platform
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
from bench_embedding import TW, WORLD, Case, make_batches, on_ranks
from both_packages import Given, Tables, dlrm, dlrm_step

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
Step = Callable[[Given], None]


CASES = [
    Case("batch 1024", 1024, 1, (TW,) * TABLES, goal=0.65, ids="power-law"),
    Case("batch 256", 256, 1, (TW,) * TABLES, ids="power-law"),
    Case("batch 1024, ~10 ids a bag", 1024, 10, (TW,) * TABLES, goal=0.62, ids="power-law"),
]


def drawn(case: Case, seed: int) -> list[Given]:
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
    """A DLRM training step by `package`, "rayrec.torchrec" or "torchrec": table-wise, tables assigned in turn."""
    tables = Tables(TABLES, case.rows, DIM)
    return dlrm_step(package, *dlrm(package, tables, DENSE, BOTTOM, TOP), tables)


def timed(step: Step, batches: Iterator[Given], count: int) -> tuple[float, float]:
    """Milliseconds a step of the slower rank, and the part of them that was spent waiting for batches."""
    comm.barrier(dist.group.WORLD)
    start, waited = time.perf_counter(), 0.0
    for _ in range(count):
        before = time.perf_counter()
        given = next(batches)
        waited += time.perf_counter() - before
        step(given)
    spent = torch.tensor([time.perf_counter() - start, waited], dtype=torch.float64) / count * 1e3
    comm.all_reduce(spent, dist.group.WORLD, dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1] / spent[0])


def compare(case: Case, rank: int, peer: str | None, rounds: int) -> dict[str, Any]:
    """Both sides in turns, from memory."""
    batches = drawn(case, rank)
    sides = [stepper(package, case) for package in ("rayrec.torchrec", peer) if package]
    first = max(timed(side, cycle(batches), 20)[0] for side in sides)  # by then layouts are chosen
    count = max(3, min(50, int(500 / first)))
    times = [[timed(side, cycle(batches), count)[0] for side in sides] for _ in range(rounds)]
    row = {"case": case.name, "rayrec_ms": statistics.median(t[0] for t in times), "goal": case.goal}
    if peer:
        row[f"{peer}_ms"] = statistics.median(t[1] for t in times)
        row[f"ratio_to_{peer}"] = statistics.median(t[0] / t[1] for t in times)
    return row


def write_rows(folder: Path, case: Case, rows: int) -> None:
    """Four files of one id a feature."""
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

    def read() -> Iterator[Given]:
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
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--against", choices=["torchrec"], help="a peer that is installed, timed in the same run")
    cli.add_argument("--rounds", type=int, default=11, help="timed rounds of each side (default 11)")
    cli.add_argument("--only", help="cases whose name contains this")
    cli.add_argument("--json", action="store_true", help="one object with all rows as the last line")
    args = cli.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{WORLD} gloo ranks of 1 thread; ms a step, median of {args.rounds} rounds, power-law ids"
    )
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        if not args.only:
            write_rows(args.folder, CASES[0], 1 << 18)
        on_ranks(work, args)


if __name__ == "__main__":
    main()
