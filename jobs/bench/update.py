"""Times the update of CPU tables in backward: the compiled loop, and in turns fbgemm's kernel or torch's operators.

    python jobs/bench/update.py                      # about 1, 5, 10 and 20 uniform ids per bag, fp32
    python jobs/bench/update.py --dtype fp16         # or bf16
    python jobs/bench/update.py --optimizer adam
    python jobs/bench/update.py --pages small        # tables on pages of 4 KiB

fbgemm does not train bfloat16, nor with Adam, on a CPU; there the loop is compared with torch's operators. The floor
reads and writes the rows that the batch touches, in order, and does nothing else. One thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from harness import arguments, machine, medians, milliseconds, paired_ratio, print_json

from rayrec._runtime.numba_loops import compiled
from rayrec.distributed.kernel import FusedKernel, LocalTable, Lookups, OptimizerSpec, make_pooling_kernel, tbe
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
    """Sorted rows that a batch reads, numbered over all tables."""
    table = torch.arange(TABLES).repeat_interleave(batch.offsets[::BAGS].diff())
    return torch.unique(batch.ids + table * ROWS).numpy().view(np.uint64)


def read_and_write(rows, weights, dim):
    """The floor; compiled in `main`."""
    for number in range(rows.size):
        first = rows[number] * dim
        for col in range(dim):
            weights[first + col] += np.float32(1e-9)


FLOOR_TYPES = {"rows": "uint64[::1]", "weights": "float32[::1]", "dim": "uint64"}


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
    times: dict[str, list[float]] = {"other": [], "loop": [], "floor": []}
    for number in range(rounds + 2):  # two to warm up
        batch = batches[number % BATCHES]
        bags = other._tbe(batch.ids, batch.offsets, None) if fused else other.lookup(batch)
        spent = {"other": milliseconds(partial(bags.backward, grad))}
        spent["loop"] = milliseconds(partial(loop.train, batches[(number + BATCHES // 2) % BATCHES], grad, 0.01))
        spent["floor"] = milliseconds(partial(floor_loop, rows[(number + 1) % BATCHES], floor.numpy(), DIM))
        for name, ms in spent.items() if number > 1 else ():
            times[name].append(ms)
    return times


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--dtype", choices=list(TYPES), default="fp32")
    cli.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad")
    cli.add_argument("--pages", choices=["large", "small"], default="large")
    cli.add_argument("--rounds", type=int, default=24)
    cli.add_argument("--bags", type=int, nargs="+", default=[1, 5, 10, 20], help="mean ids per bag")
    args = cli.parse_args()
    torch.set_num_threads(1)
    if args.pages == "small":
        tbe.use_large_pages = lambda _: None
    print(
        f"{machine()}; {TABLES} tables of {ROWS:,} × {DIM} {args.dtype}, {BAGS} bags, uniform ids, {args.optimizer}, "
        f"{args.pages} pages; median ms"
    )
    floor_loop = compiled(FLOOR_TYPES)(read_and_write)
    rows: list[dict[str, float]] = []
    for bag in args.bags:
        times = measure(bag, args.dtype, args.optimizer, args.rounds, floor_loop)
        rows.append({"ids_per_bag": bag, "ratio": paired_ratio(times["loop"], times["other"]), **medians(times)})
        shown = "  ".join(f"{name} {ms:6.2f}" for name, ms in medians(times).items())
        print(f"~{bag:2d} ids per bag  {shown}  loop / other {rows[-1]['ratio']:.2f}", flush=True)
    print_json(args, {"rows": rows})


if __name__ == "__main__":
    main()
