"""Times a training step of sharded embeddings on the CPU: forward, backward and update on two gloo ranks.

    python jobs/bench/embedding.py                                # rayrec alone
    pip install --target /tmp/peer --no-deps torchrec==1.8.0 \\
        iopath pyre-extensions typing-inspect tensordict portalocker pyvers orjson
    PYTHONPATH=/tmp/peer python jobs/bench/embedding.py --against torchrec [--ids power-law]

Both packages get the same tables, plans, optimizer and batches, in the same processes, in turns. The result is the
median of the ratios within the rounds. `--no-deps` keeps pip from replacing this environment's fbgemm.
`--instructions avx2` turns AVX512 off for both.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import arguments, in_turns, machine, medians, paired_ratio, print_json
from packages import Tables, sharded

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel import EmbOptimType, FusedKernel, LocalTable, Lookups, OptimizerSpec
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding, ShardingType, Span
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor

WORLD = 2
TW, CW, RW, DP = "table_wise", "column_wise", "row_wise", "data_parallel"
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01, "eps": 1e-8}
AVX2 = {  # read when a process starts: by torch, fbgemm, MKL, numba and the C library
    "ATEN_CPU_CAPABILITY": "avx2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW",
}
Step = Callable[[int], None]
Work = Callable[[int, argparse.Namespace, Any], None]


@dataclass(frozen=True)
class Case:
    """One comparison: `kinds` are the tables' sharding types, `bag` the mean ids a bag (1 means exactly one)."""

    name: str
    batch: int
    bag: int
    kinds: tuple[str, ...]
    rows: int = 100_000
    dim: int = 64
    goal: float | None = None
    goal_overhead: float | None = None  # of the time above the floor
    pooled: bool = True  # else a vector an id
    ids: str = "uniform"


MIXED = (TW,) * 9 + (CW,) * 9 + (RW,) * 8
CASES = [
    Case("table-wise, batch 1024", 1024, 1, (TW,) * 26, goal=0.38),
    Case("column-wise, batch 1024", 1024, 1, (CW,) * 26, goal=0.50),
    Case("row-wise, batch 1024", 1024, 1, (RW,) * 26, goal=0.40),
    Case("table-wise, batch 16", 16, 1, (TW,) * 26, goal=0.32),
    Case("mixed TW+CW+RW, batch 1024", 1024, 1, MIXED, goal=0.50),
    Case("20 TW + 6 DP, batch 1024", 1024, 1, (TW,) * 20 + (DP,) * 6, goal=0.18),
    Case("1000 features, batch 64", 64, 1, (TW,) * 1000, rows=1000, dim=8, goal=0.70, goal_overhead=0.50),
    *(
        Case(f"{name}, batch 1024, ~{bag} ids a bag", 1024, bag, kinds, goal=0.60)
        for bag in (10, 20)
        for name, kinds in (("table-wise", (TW,) * 26), ("row-wise", (RW,) * 26), ("mixed TW+CW+RW", MIXED))
    ),
    Case("sequences, table-wise, batch 1024", 1024, 1, (TW,) * 26, pooled=False, goal=0.35),
    Case("sequences, row-wise, batch 1024", 1024, 1, (RW,) * 26, pooled=False, goal=0.35),
]


POWER_LAW = 1.05  # exponent of the ids' frequencies by rank, as in logs of clicks


def names(case: Case) -> list[tuple[str, str, str]]:
    return [(f"t{n}", f"f{n}", kind) for n, kind in enumerate(case.kinds)]


def draw_ids(rows: int, count: int, ids: str, generator: torch.Generator) -> torch.Tensor:
    """Ids of one table: all equally likely, or by a power law whose frequent ids lie anywhere in the table."""
    if ids == "uniform":
        return torch.randint(0, rows, (count,), generator=generator)
    cumulated = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-POWER_LAW).cumsum_(0)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64) * cumulated[-1]
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    return places[torch.searchsorted(cumulated, drawn).clamp_(max=rows - 1)]


def make_batches(case: Case, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(values, lengths) of a few batches."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(4):
        count = len(case.kinds) * case.batch
        lengths = torch.ones(count, dtype=torch.int64)
        if case.bag > 1:
            lengths = torch.randint(0, 2 * case.bag + 1, (count,), generator=generator)
        values = draw_ids(case.rows, int(lengths.sum()), case.ids, generator)
        batches.append((values, lengths))
    return batches


def stepper(sharded: Any, kjts: list[Any], case: Case) -> Step:
    if not case.pooled:
        return sequence_stepper(sharded, kjts, case)
    grad = torch.randn(case.batch, case.dim * len(case.kinds)) / 1000

    def step(number: int) -> None:
        sharded(kjts[number % len(kjts)]).wait().values().backward(grad)

    return step


def sequence_stepper(sharded: Any, kjts: list[Any], case: Case) -> Step:
    keys = [feature for _, feature, _ in names(case)]
    sizes = [kjt.lengths().view(len(keys), -1).sum(1).tolist() for kjt in kjts]
    grads = [[torch.randn(size, case.dim) / 1000 for size in of_keys] for of_keys in sizes]

    def step(number: int) -> None:
        out = sharded(kjts[number % len(kjts)]).wait()
        torch.autograd.backward([out[key].values() for key in keys], grads[number % len(kjts)])

    return step


def rayrec_step(case: Case, rank: int) -> Step:
    sharded = rayrec_sharded(case)
    keys = [feature for _, feature, _ in names(case)]
    kjts = [KeyedJaggedTensor(keys, values, lengths=lengths) for values, lengths in make_batches(case, rank)]
    return stepper(sharded, kjts, case)


def rayrec_sharded(case: Case) -> Any:
    ranks = {TW: lambda n: [n % WORLD], CW: lambda n: [0, 1], RW: lambda n: [0, 1], DP: lambda n: [0, 1]}
    config = EmbeddingBagConfig if case.pooled else EmbeddingConfig
    tables: list[Any] = []
    plan = {}
    for number, (table, feature, kind) in enumerate(names(case)):
        tables.append(config(name=table, num_embeddings=case.rows, embedding_dim=case.dim, feature_names=[feature]))
        shards = CUTS[ShardingType(kind)](table, case.rows, case.dim, ranks[kind](number))
        plan[table] = ParameterSharding(sharding_type=kind, compute_kernel="fused", shards=shards)
    assert dist.group.WORLD is not None
    env, cpu = ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    if case.pooled:
        return EmbeddingBagCollectionSharder(FUSED).shard(EmbeddingBagCollection(tables, device="meta"), plan, env, cpu)
    return EmbeddingCollectionSharder(FUSED).shard(EmbeddingCollection(tables, device="meta"), plan, env, cpu)


def torchrec_step(case: Case, rank: int) -> Step:
    tables = Tables(case.kinds, case.rows, case.dim, case.pooled)
    kjt_class = importlib.import_module("torchrec").KeyedJaggedTensor
    kjts = [kjt_class(keys=tables.keys, values=values, lengths=lengths) for values, lengths in make_batches(case, rank)]
    return stepper(sharded("torchrec", tables), kjts, case)


def floor_step(case: Case, rank: int) -> Step:
    """The floor of a table-wise step: its lookups in one kernel, and bare exchanges of the same bytes."""
    mine = [n for n in range(len(case.kinds)) if n % WORLD == rank]
    spec = OptimizerSpec.from_fused_params(FUSED)
    local = [
        LocalTable(
            config=EmbeddingBagConfig(
                name=f"t{n}", num_embeddings=case.rows, embedding_dim=case.dim, feature_names=[f"f{n}"]
            ),
            rows=Span(0, case.rows),
            cols=Span(0, case.dim),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=spec,
        )
        for n in mine
    ]
    kernel = FusedKernel(local, range(len(mine)), torch.device("cpu"))
    values, lengths = make_batches(replace(case, kinds=(TW,) * len(mine), batch=case.batch * WORLD), rank)[0]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([values, lengths])
    received = torch.empty_like(ids)
    half = ids.numel() // WORLD
    grad = torch.randn(case.batch * WORLD, case.dim * len(mine)) / 1000
    arrived = torch.empty_like(grad)

    def exchange(output: torch.Tensor, inputs: torch.Tensor) -> None:
        comm.all_to_all(output, inputs, None, None, dist.group.WORLD)()

    def step(number: int) -> None:
        exchange(received[: half * WORLD], ids[: half * WORLD])
        pooled = kernel.lookup(Lookups(values, offsets, None))
        exchange(arrived, pooled.detach())
        exchange(arrived, grad)
        pooled.backward(grad)

    return step


def timed(step: Step, count: int) -> float:
    """Milliseconds a step, of the slower rank."""
    dist.barrier()
    start = time.perf_counter()
    for number in range(count):
        step(number)
    spent = torch.tensor((time.perf_counter() - start) / count * 1e3)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def compare(case: Case, rank: int, peer: str | None, rounds: int) -> dict[str, Any]:
    sides = {"rayrec": rayrec_step(case, rank)} | ({peer: torchrec_step(case, rank)} if peer else {})
    overhead = case.goal_overhead is not None and peer is not None
    if overhead:
        sides["floor"] = floor_step(case, rank)
    warm = torch.tensor(max(timed(side, 40) for side in sides.values()))  # after 40 steps, layouts are chosen
    count = max(3, min(100, int(300 / float(warm))))
    times = in_turns({name: partial(timed, side, count) for name, side in sides.items()}, rounds)
    row = {"case": case.name, "ids": case.ids, "goal": case.goal}
    row |= {f"{name}_ms": ms for name, ms in medians(times).items()}
    if peer:
        row["ratio"] = paired_ratio(times["rayrec"], times[peer])
    if overhead and peer:
        floors = times["floor"]
        above = [[ms - floor for ms, floor in zip(times[side], floors, strict=True)] for side in ("rayrec", peer)]
        row |= {"goal_overhead": case.goal_overhead, "overhead_ratio": paired_ratio(*above)}
    return row


MEMORY = Case("memory: 20 tables × 500k × 64, table-wise and row-wise", 1024, 1, (TW, RW) * 10, rows=500_000)


def memory(rank: int) -> dict[str, Any]:
    """Peak memory of a rank, from sharding on the meta device to trained steps, against the bytes that it must hold."""
    case, kib = MEMORY, 1024
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    sharded = rayrec_sharded(case)
    keys = [feature for _, feature, _ in names(case)]
    kjts = [KeyedJaggedTensor(keys, values, lengths=lengths) for values, lengths in make_batches(case, rank)]
    step = stepper(sharded, kjts, case)
    for number in range(5):
        step(number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib - before
    rows = sum(item.shard.rows.size for table in sharded.tables().values() for item in table.local)
    shards, state = rows * case.dim * 4, rows * 4
    vectors = case.batch * case.dim * 4 * len(case.kinds)
    needed = shards + state + 2 * vectors
    return {"case": case.name, "peak_bytes": peak, "needed_bytes": needed, "ratio": peak / needed, "goal": 1.1}


def on_ranks(work: Work, args: argparse.Namespace) -> None:
    """Calls `work(rank, args, results)` on gloo ranks of one thread. Rank 0 appends rows to `results`."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(_rank, (work, os.path.join(folder, "store"), args, results), nprocs=WORLD)
        print_json(args, {"rows": list(results)})


def _rank(rank: int, work: Work, store: str, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    work(rank, args, results)
    comm.barrier(dist.group.WORLD)
    comm.leave()


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    if args.memory:
        row = memory(rank)
        if rank == 0:
            print(
                f"{row['case']}: peak {row['peak_bytes'] / 2**20:.0f} MiB above the start, {row['ratio']:.2f} × "
                f"(shards + optimizer state + two batches: {row['needed_bytes'] / 2**20:.0f} MiB; goal ≤ {row['goal']})"
            )
            results.append(row)
        return
    for case in (replace(case, ids=args.ids) for case in CASES):
        if args.only and args.only not in case.name:
            continue
        row = compare(case, rank, args.against, args.rounds)
        if rank == 0:
            ratio = f"{row['ratio']:.2f} ×" if args.against else ""
            ratio += f" (goal ≤ {case.goal:.2f})" if case.goal and args.against else ""
            if "overhead_ratio" in row:
                ratio += f", above the floor of {row['floor_ms']:.2f} ms {row['overhead_ratio']:.2f} ×"
                ratio += f" (goal ≤ {case.goal_overhead:.2f})"
            peer = f"{args.against} {row[f'{args.against}_ms']:9.2f} ms" if args.against else ""
            print(f"{case.name:40s} rayrec {row['rayrec_ms']:9.2f} ms  {peer}  {ratio}", flush=True)
            results.append(row)


def main() -> None:
    cli = arguments(__doc__)
    cli.add_argument("--against", choices=["torchrec"], help="also time this package in the same run")
    cli.add_argument("--rounds", type=int, default=15, help="timed rounds (default 15)")
    cli.add_argument("--only", help="only the cases whose names contain this")
    cli.add_argument(
        "--ids", choices=["uniform", "power-law"], default="uniform", help="distribution of the ids (default uniform)"
    )
    cli.add_argument("--instructions", choices=["avx2"], help="avx2: do not use AVX512")
    cli.add_argument("--memory", action="store_true", help="measure the peak memory of a rank instead of times")
    args = cli.parse_args()
    print(
        f"{machine()}, {WORLD} gloo ranks of 1 thread; ms per step (forward, backward, update), "
        f"median of {args.rounds} rounds, {args.ids} ids, {args.instructions or 'all'} instructions"
    )
    if args.instructions:
        os.environ |= AVX2  # the ranks are new processes
    on_ranks(work, args)


if __name__ == "__main__":
    main()
