"""Times the update of CPU tables in backward: the compiled loop, and in turns fbgemm's kernel or torch's operators.

    python jobs/bench_update.py                      # ~1, 5, 10 and 20 uniform ids a bag, fp32
    python jobs/bench_update.py --dtype fp16         # or bf16, which fbgemm does not train on a CPU
    python jobs/bench_update.py --optimizer adam     # or another that fbgemm does not have on a CPU: torch's operators
    python jobs/bench_update.py --pages small        # tables on pages of 4 KiB

Of what fbgemm does not train on a CPU (bfloat16, Adam) the other is torch's operators. The floor reads and writes the
rows that the batch touched, in order, and does nothing else. One thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from rayrec._runtime.numba_loops import compiled
from rayrec.distributed.kernel import FusedKernel, LocalTable, Lookups, OptimizerSpec, tbe
from rayrec.distributed.kernel.choice import make_pooling_kernel
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Span
from rayrec.modules import DataType, EmbeddingBagConfig

TABLES, ROWS, DIM, BAGS, BATCHES = 13, 100_000, 64, 2048, 8
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}


def local_tables(dtype: str, optimizer: str) -> list[LocalTable]:
    spec = OptimizerSpec.from_fused_params({"optimizer": optimizer, "learning_rate": 0.01})
    return [
        LocalTable(
            config=EmbeddingBagConfig(
                name=f"t{n}",
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=[f"f{n}"],
                data_type=TYPES[dtype],
            ),
            rows=Span(0, ROWS),
            cols=Span(0, DIM),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=spec,
        )
        for n in range(TABLES)
    ]


def make_batches(bag: int) -> list[Lookups]:
    generator, batches = torch.Generator().manual_seed(0), []
    for _ in range(BATCHES):
        lengths = torch.ones(TABLES * BAGS, dtype=torch.int64)
        if bag > 1:
            lengths = torch.randint(0, 2 * bag + 1, (TABLES * BAGS,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        batches.append(Lookups(ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), None))
    return batches


def touched_rows(batch: Lookups) -> np.ndarray:
    """Row numbers that a batch reads, of all tables one below the other, ascending."""
    table = torch.arange(TABLES).repeat_interleave(batch.offsets[::BAGS].diff())
    return torch.unique(batch.ids + table * ROWS).numpy().view(np.uint64)


def read_and_write(rows, weights, dim):
    """What no update can do without; compiled in `main`."""
    for number in range(rows.size):
        first = rows[number] * dim
        for col in range(dim):
            weights[first + col] += np.float32(1e-9)


FLOOR_TYPES = {"rows": "uint64[::1]", "weights": "float32[::1]", "dim": "uint64"}


def milliseconds(work: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    work(*args)
    return (time.perf_counter() - start) * 1e3


def measure(
    bag: int, dtype: str, optimizer: str, rounds: int, floor_loop: Callable[..., None]
) -> dict[str, list[float]]:
    kernel, other = (
        make_pooling_kernel(local_tables(dtype, optimizer), range(TABLES), torch.device("cpu")) for _ in range(2)
    )
    for weight in (*kernel.weights(), *other.weights()):
        weight.uniform_(-1, 1)
    fused = isinstance(kernel, FusedKernel)
    loop = kernel._compiled if fused else kernel.compiled
    if not fused:
        other.compiled = None
    batches, grad = make_batches(bag), torch.randn(BAGS, TABLES * DIM) / 1000
    rows, floor = [touched_rows(batch) for batch in batches], torch.zeros(TABLES * ROWS * DIM)
    tbe.use_large_pages(floor)
    took: dict[str, list[float]] = {"other": [], "loop": [], "floor": []}
    for number in range(rounds + 2):  # two to warm up
        batch = batches[number % BATCHES]
        bags = other._tbe(batch.ids, batch.offsets, None) if fused else other.pooled(batch)
        spent = {"other": milliseconds(bags.backward, grad)}
        spent["loop"] = milliseconds(loop.train, batches[(number + BATCHES // 2) % BATCHES], grad, 0.01)
        spent["floor"] = milliseconds(floor_loop, rows[(number + 1) % BATCHES], floor.numpy(), DIM)
        for name, ms in spent.items() if number > 1 else ():
            took[name].append(ms)
    return took


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--dtype", choices=list(TYPES), default="fp32")
    cli.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad")
    cli.add_argument("--pages", choices=["large", "small"], default="large")
    cli.add_argument("--rounds", type=int, default=24)
    cli.add_argument("--bags", type=int, nargs="+", default=[1, 5, 10, 20], help="mean ids a bag")
    args = cli.parse_args()
    torch.set_num_threads(1)
    if args.pages == "small":
        tbe.use_large_pages = lambda _: None
    print(
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; "
        f"{TABLES} tables of {ROWS:,} × {DIM} {args.dtype}, {BAGS} bags, uniform ids, {args.optimizer}, "
        f"{args.pages} pages; median ms"
    )
    floor_loop = compiled(FLOOR_TYPES)(read_and_write)
    for bag in args.bags:
        took = measure(bag, args.dtype, args.optimizer, args.rounds, floor_loop)
        found = {name: statistics.median(ms) for name, ms in took.items()}
        shown = "  ".join(f"{name} {ms:6.2f}" for name, ms in found.items())
        ratio = statistics.median(a / b for a, b in zip(took["loop"], took["other"], strict=True))
        print(f"~{bag:2d} ids a bag  {shown}  loop / other {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
