"""Runs plans of one model on gloo ranks of this machine and sets measured time and memory beside the estimates.

For `bench_planner.py --reality`; the figures of the machine come from `calibrate.py`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calibrate_loads import configs_of
from step_time import step_on

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.distributed.planner import ParameterConstraints, PlanResult, Topology, plan_tables
from rayrec.distributed.planner.cost.estimate import evaluate
from rayrec.distributed.planner.cost.memory import reserve_bytes
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor

BATCH = 512
WARM, STEPS = 2, 7  # of one visit to a plan
PASSES = 3  # visits to every plan, each time in another order
TABLES = (
    # rows, dim, ids a bag; no two of one width, as neighbours of one width share a kernel's table, a matter of the plan
    (1_000_000, 32, 1),
    (700_000, 64, 1),
    (400_000, 128, 2),
    (300_000, 72, 10),
    (200_000, 40, 20),
    (150_000, 16, 5),
    (100_000, 80, 20),
    (50_000, 112, 10),
    (20_000, 48, 3),
    (5_000, 24, 10),
    (2_000, 56, 1),
    (500, 20, 2),
)
SHAPES = [(rows, dim) for rows, dim, _ in TABLES]
LARGE = 4  # tables that are never replicated
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
TW, RW, CW, DP = "table_wise", "row_wise", "column_wise", "data_parallel"


@dataclass(frozen=True)
class Measured:
    """A plan's prediction and what came of it; bytes are of the fullest rank."""

    name: str
    predicted_s: float
    passes_s: tuple[float, ...]
    predicted_bytes: float
    measured_bytes: float

    @property
    def measured_s(self) -> float:
        """Of the quickest visit; other work on the machine only ever adds."""
        return min(self.passes_s)


def make_plans(result: PlanResult, world: int) -> dict[str, ShardingPlan]:
    """Twenty plans, good and bad: the planner's, even ones, lopsided ones, and mixtures drawn to differ widely."""
    everyone = list(range(world))
    turns = [n % world for n in range(len(TABLES))]
    plans = {
        "planner's": result.plan,
        "table-wise in turn": _plan([(TW, [rank]) for rank in turns]),
        "table-wise on rank 0": _plan([(TW, [0])] * len(TABLES)),
        "row-wise": _plan([(RW, everyone)] * len(TABLES)),
        "column-wise": _plan([(CW, everyone)] * len(TABLES)),
        "half replicated": _plan([(DP, everyone) if n > 5 else (TW, [r]) for n, r in enumerate(turns)]),
        "long bags on rank 0": _plan([(TW, [0 if TABLES[n][2] >= 10 else r]) for n, r in enumerate(turns)]),
        "long bags by columns": _plan(
            [(CW, everyone) if TABLES[n][2] >= 10 else (TW, [r]) for n, r in enumerate(turns)]
        ),
    }
    return plans | {f"drawn {seed}": _drawn(seed, world) for seed in range(20 - len(plans))}


def _drawn(seed: int, world: int) -> ShardingPlan:
    """Draws how often each sharding type comes and how often rank 0 gets a whole table, then the tables."""
    rng = np.random.default_rng(seed)
    often, skew = rng.dirichlet([0.5] * 4), rng.uniform()
    cuts: list[tuple[str, list[int]]] = []
    for number in range(len(TABLES)):
        kind = (TW, RW, CW, DP)[int(rng.choice(4, p=often))]
        rank = 0 if rng.uniform() < skew else int(rng.integers(world))
        if kind == DP and number < LARGE:  # nobody would replicate these
            kind = TW
        cuts.append((kind, [rank] if kind == TW else list(range(world))))
    return _plan(cuts)


def _plan(cuts: list[tuple[str, list[int]]]) -> ShardingPlan:
    tables = {
        config.name: ParameterSharding(
            sharding_type=kind,
            compute_kernel="fused",
            shards=CUTS[ShardingType(kind)](config.name, config.num_embeddings, config.embedding_dim, ranks),
        )
        for config, (kind, ranks) in zip(configs_of(SHAPES), cuts, strict=True)
    }
    return ShardingPlan({"": tables})


def measure_plans(calibration: str, ranks: int) -> list[Measured]:
    """Every plan's predicted and measured seconds a step and bytes, in the order of the plans."""
    topology = Topology.from_calibration(calibration, ranks)
    told = {f"t{n}": ParameterConstraints(pooling_factors=[bag]) for n, (_, _, bag) in enumerate(TABLES)}
    sharder = EmbeddingBagCollectionSharder(FUSED)
    result = plan_tables(configs_of(SHAPES), topology, told, batch_size=BATCH, sharder=sharder)
    plans = make_plans(result, ranks)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (ranks, folder, plans), nprocs=ranks)
        real = torch.load(Path(folder) / "measured.pt")
    reserve_R = np.full(ranks, reserve_bytes(result.tables, 0, 0, ranks))
    processors = min(ranks, os.cpu_count() or ranks)
    out = []
    for (name, plan), (passes_s, peaks) in zip(plans.items(), real, strict=True):
        estimate = evaluate(plan, result.tables, topology, reserve_R)
        fullest = int(np.argmax(peaks))
        step_s = step_on(estimate, processors, topology.device.alone)
        held = float(estimate.device_bytes_R[fullest])
        out.append(Measured(name, step_s, tuple(passes_s), held, peaks[fullest]))
    return out


def _run_rank(rank: int, world: int, folder: str, plans: dict[str, ShardingPlan]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    kjts = _batches(rank)
    grad = torch.full((BATCH, sum(dim for _, dim, _ in TABLES)), 1e-4)
    _run(plans["half replicated"], kjts, grad)  # libraries warm up outside the figures
    found: list[list[tuple[float, float]]] = [[] for _ in plans]
    for number in range(PASSES):
        for place in np.random.default_rng(number).permutation(len(plans)):
            found[place].append(_run(list(plans.values())[place], kjts, grad))
    gathered = comm.all_gather_object(found, dist.group.WORLD)
    if rank == 0:
        torch.save([_over_ranks([each[n] for each in gathered]) for n in range(len(plans))], f"{folder}/measured.pt")
    comm.barrier(dist.group.WORLD)
    comm.leave()


def _over_ranks(visits: list[list[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """(seconds of the slowest rank in each pass, peak bytes of each rank) of one plan's visits, by rank and pass."""
    return [max(s for s, _ in each) for each in zip(*visits, strict=True)], [max(b for _, b in v) for v in visits]


def _batches(rank: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(rank)
    kjts = []
    for _ in range(4):
        lengths = torch.cat([torch.full((BATCH,), bag) for _, _, bag in TABLES])
        values = [torch.randint(0, rows, (BATCH * bag,), generator=generator) for rows, _, bag in TABLES]
        kjts.append(KeyedJaggedTensor([f"f{n}" for n in range(len(TABLES))], torch.cat(values), lengths=lengths))
    return kjts


def _run(plan: ShardingPlan, kjts: list[KeyedJaggedTensor], grad: torch.Tensor) -> tuple[float, float]:
    """(seconds a step, bytes at the peak above what was there before) of this rank."""
    group = dist.group.WORLD
    assert group is not None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _forget_peak()
    collection = EmbeddingBagCollection(tables=configs_of(SHAPES), device="meta")
    env = ShardingEnv.from_process_group(group)
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(collection, plan.plan[""], env, torch.device("cpu"))
    comm.barrier(group)
    times = []
    for number in range(WARM + STEPS):
        start = time.perf_counter()
        sharded(kjts[number % len(kjts)]).wait().values().backward(grad)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:]), float(_status("VmHWM") - before)


def _forget_peak() -> int:
    """Resident bytes now, from which the kernel's record of the peak starts over."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
