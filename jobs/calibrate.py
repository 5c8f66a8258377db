"""Measures lookup, memory and exchange speed on the machine at hand and writes them to a file that `Topology` reads.

    python jobs/calibrate.py --out calibration.json                 # two ranks on this host
    python jobs/calibrate.py --ranks 8 --out calibration.json       # GPUs and NCCL where there are GPUs, else gloo
    torchrun --nnodes 2 --nproc-per-node 8 jobs/calibrate.py --out calibration.json   # between hosts as well

then `Topology.from_calibration("calibration.json", world_size=8)`.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.sharding_plan import ModuleSharding, ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.distributed.planner import ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.cost.estimate import Estimate, evaluate
from rayrec.distributed.planner.cost.seconds import COLLECTIVES, ID_COLLECTIVES, distinct
from rayrec.distributed.planner.machine.calibration import CALIBRATION_VERSION
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

ROWS = 100_000
MESSAGE_BYTES = (1 << 12, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
STEP_TABLES = 8
STEPS = (  # sharding type, width, examples a rank, ids a bag
    (ShardingType.TABLE_WISE, 64, 32, 1),
    (ShardingType.TABLE_WISE, 64, 512, 1),
    (ShardingType.TABLE_WISE, 64, 512, 10),
    (ShardingType.COLUMN_WISE, 64, 512, 1),
    (ShardingType.COLUMN_WISE, 64, 512, 10),
    (ShardingType.ROW_WISE, 64, 512, 1),
    (ShardingType.ROW_WISE, 64, 512, 10),
    (ShardingType.DATA_PARALLEL, 16, 256, 5),
    (ShardingType.DATA_PARALLEL, 16, 256, 20),
    (ShardingType.DATA_PARALLEL, 64, 256, 5),
    (ShardingType.DATA_PARALLEL, 96, 256, 5),
)
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}


@dataclass(frozen=True)
class Load:
    """One lookup measurement: `tables` of widths from `dim`, `batch` bags of `bag` ids each."""

    tables: int
    rows: int
    dim: int
    batch: int
    bag: int


LOADS = [
    Load(*facts)
    for facts in (
        (8, ROWS, 16, 512, 4),
        (8, ROWS, 128, 512, 4),
        (8, ROWS, 16, 256, 30),
        (8, ROWS, 64, 256, 30),
        (8, ROWS, 128, 2048, 1),
        (8, 1000, 64, 256, 30),
        (8, 3000, 16, 512, 10),
        (64, ROWS // 10, 16, 64, 1),
        (2, ROWS // 10, 16, 64, 1),
    )
]

BATCHES = 4  # unlike ones that are looked up in turn
ALONE = 3  # the load that is measured on one rank alone as well


def seconds_of(
    work: Callable[[], None], device: torch.device, clock: Callable[[], float] = time.perf_counter, rounds: int = 9
) -> float:
    """The lower quartile of the durations of `work`, after three rounds to warm up."""
    times = []
    for number in range(rounds + 3):
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 3:
            times.append(clock() - start)
    return sorted(times)[len(times) // 4]  # other work on the machine only ever adds


def busy_clock(device: torch.device) -> Callable[[], float]:
    """What tells how long a rank itself works: on CPUs its thread's time, which stands still while the rank waits for
    others, or for a processor that it shares with them; `step_time.step_on` puts that waiting back."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def configs_of(shapes: Iterable[tuple[int, int]]) -> list[EmbeddingBagConfig]:
    """Tables t0, t1, … of the given rows and widths, of one feature each.

    Their weights are all alike; random ones take longer to make than to measure.
    """
    return [
        EmbeddingBagConfig(
            name=f"t{n}",
            num_embeddings=rows,
            embedding_dim=width,
            feature_names=[f"f{n}"],
            init_fn=torch.nn.init.zeros_,  # type: ignore[arg-type]
        )
        for n, (rows, width) in enumerate(shapes)
    ]


def widths_of(count: int, dim: int) -> list[int]:
    """Unlike ones from `dim`: neighbours of one width share a kernel's table, which is quicker on CPUs."""
    return [dim + 8 * (n % 8) for n in range(count)]


def batches_of(load: Load, seed: int, device: torch.device) -> Iterator[KeyedJaggedTensor]:
    """Unlike batches over and over, so that few rows are in the caches from the round before, as in training."""
    count, made = load.tables * load.batch, torch.Generator().manual_seed(seed)
    keys, lengths = [f"f{n}" for n in range(load.tables)], torch.full((count,), load.bag).to(device)
    batches = []
    for _ in range(BATCHES):
        ids = torch.randint(0, load.rows, (count * load.bag,), generator=made)
        batches.append(KeyedJaggedTensor(keys, ids.to(device), lengths=lengths))
    return itertools.cycle(batches)


def lookup_seconds(load: Load, device: torch.device) -> float:
    """Forward, backward and update of one rank's tables, nothing exchanged."""
    gc.collect()  # the tables of the load before: they are in reference cycles
    configs = configs_of((load.rows, width) for width in widths_of(load.tables, load.dim))
    plan = plan_of(ShardingType.TABLE_WISE, configs, [0], device.type)
    collection = EmbeddingBagCollection(tables=configs, device="meta")
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(collection, plan, ShardingEnv.from_local(1, 0), device)
    batches = batches_of(load, 0, device)
    grad = torch.full((load.batch, sum(widths_of(load.tables, load.dim))), 1e-3, device=device)
    return seconds_of(lambda: sharded(next(batches)).wait().values().backward(grad), device, busy_clock(device))


def exchange_seconds(
    size: int, group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    """One exchange of `size` bytes from each rank, with its packing and unpacking."""
    world = group.size()
    width = max(1, size // 4 // world)
    mine = torch.ones(world, width, device=device)
    parts = [width] * world

    def work() -> None:
        message = mine.reshape(-1).clone()
        arrived = torch.empty_like(message)
        comm.all_to_all(arrived, message, parts, parts, group)()
        torch.cat(arrived.view(world, width).split(1), dim=1)

    return seconds_of(work, device, clock)


def plan_of(kind: ShardingType, configs: list[EmbeddingBagConfig], ranks: list[int], device: str) -> ModuleSharding:
    """Every table sharded by `kind`: table-wise in turn, or over all ranks."""
    plan = {}
    for number, config in enumerate(configs):
        on = [ranks[number % len(ranks)]] if kind is ShardingType.TABLE_WISE else ranks
        shards = CUTS[kind](config.name, config.num_embeddings, config.embedding_dim, on)
        plan[config.name] = ParameterSharding(
            sharding_type=kind.value, compute_kernel="fused", shards=shards, device=device
        )
    return plan


def step_seconds(
    kind: ShardingType, dim: int, batch: int, bag: int, group: dist.ProcessGroup, device: torch.device
) -> float:
    """What a rank itself works in a whole training step of `STEP_TABLES` tables."""
    gc.collect()
    configs = configs_of((ROWS, width) for width in widths_of(STEP_TABLES, dim))
    plan = plan_of(kind, configs, list(range(group.size())), device.type)
    collection = EmbeddingBagCollection(tables=configs, device="meta")
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(
        collection, plan, ShardingEnv.from_process_group(group), device
    )
    batches = batches_of(Load(STEP_TABLES, ROWS, dim, batch, bag), group.rank(), device)
    grad = torch.full((batch, sum(widths_of(STEP_TABLES, dim))), 1e-3, device=device)
    return seconds_of(lambda: sharded(next(batches)).wait().values().backward(grad), device, busy_clock(device))


def alone_share(group: dist.ProcessGroup, device: torch.device) -> float:
    """What a load takes while the group's other ranks wait, as a share of what it takes on all of them at once."""
    together = lookup_seconds(LOADS[ALONE], device)
    comm.barrier(group)
    alone = lookup_seconds(LOADS[ALONE], device) if group.rank() == 0 else 0.0
    first = comm.broadcast_object((alone, together), group)
    return min(1.0, first[0] / first[1])


def fit_lookups(device: torch.device) -> dict[str, float]:
    """Least squares for what an id, a touched row, a byte, a table and a step cost, over loads that differ in each."""
    rows, times = [], []
    for load in LOADS:
        ids, touched = float(load.batch * load.bag), distinct(load.batch * load.bag, load.rows)
        widths = [4 * width for width in widths_of(load.tables, load.dim)]
        moved = sum(ids * max(w, 64) + 2 * load.batch * w + 2 * touched * (max(w, 64) + 4) for w in widths)
        rows.append((2 * ids * load.tables, touched * load.tables, moved, float(load.tables), 1.0))
        times.append(lookup_seconds(load, device))
    weights = 1 / np.array(times)  # relative errors count, not absolute ones
    answer = _least_squares(np.array(rows) * weights[:, None], np.ones(len(times)))
    id_s, row_s, byte_s, table_s, step_s = (float(x) for x in answer)
    return {
        "id_s": max(id_s, 1e-12),
        "row_s": max(row_s, 1e-12),
        "memory_bw": 1 / max(byte_s, 1e-14),
        "table_s": max(table_s, 1e-8),
        "step_s": max(step_s, 1e-8),
    }


def _least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with no negative answer: the most negative column is left out until none is."""
    kept = list(range(a.shape[1]))
    while True:
        found = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    out = np.zeros(a.shape[1])
    out[kept] = found
    return out


def fit_exchange(
    group: dist.ProcessGroup, device: torch.device, near: int = 1, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """(seconds a collective, bytes per second that leave a rank for others).

    Args:
        near: ranks of the group that are reached another way, the own one among them: those of the host, where the
            link between hosts is measured.
        clock: what the seconds are of.
    """
    world = group.size()
    times = np.array([exchange_seconds(size, group, device, clock) for size in MESSAGE_BYTES])
    sent = np.array(MESSAGE_BYTES) * (world - near) / world
    answer = _least_squares(np.stack([np.ones(len(sent)), sent], axis=1) / times[:, None], np.ones(len(sent)))
    return max(float(answer[0]), 1e-7), 1 / max(float(answer[1]), 1e-14)


def fit_steps(group: dist.ProcessGroup, device: torch.device, known: dict[str, float]) -> dict[str, float]:
    """What routing an id, finding its row block, and sorting replicas' rows cost: whole steps less what is known."""
    world = group.size()
    latency, speed = fit_exchange(group, device, clock=busy_clock(device))  # a rank moves a part of the bytes itself
    busy = {"collective_s": latency, "intra_host_bw": speed, "inter_host_bw": speed}
    unknown = {"begin_s": 0.0, "route_s": 0.0, "cut_s": 0.0, "partial_s": 0.0, "sort_s": 0.0, "replica_bw": 1e18}
    plain = Topology(world, device.type)
    topology = plain.with_device(replace(plain.device, **known | busy | unknown))
    rows, left, times = [], [], []
    for kind, dim, batch, bag in STEPS:
        told = {f"t{n}": ParameterConstraints(pooling_factors=[bag]) for n in range(STEP_TABLES)}
        configs = configs_of((ROWS, width) for width in widths_of(STEP_TABLES, dim))
        sharder = EmbeddingBagCollectionSharder(FUSED)
        tables = plan_tables(configs, topology, told, batch_size=batch, sharder=sharder).tables
        plan = ShardingPlan({"": plan_of(kind, configs, list(range(world)), device.type)})
        seconds = step_seconds(kind, dim, batch, bag, group, device)
        bags, ids = float(STEP_TABLES * batch), float(STEP_TABLES * batch * bag)
        copies = {ShardingType.COLUMN_WISE: world, ShardingType.DATA_PARALLEL: 0}.get(kind, 1)
        touched = STEP_TABLES * distinct(batch * bag, ROWS) * world
        sorted_rows = ids + touched if kind is ShardingType.DATA_PARALLEL else 0.0
        cut, partial = (ids, bags * (world - 1)) if kind is ShardingType.ROW_WISE else (0.0, 0.0)
        width = statistics.fmean(widths_of(STEP_TABLES, dim))
        rows.append((1.0, ids * copies, cut, partial, sorted_rows, sorted_rows * width * 4))
        left.append(max(0.0, seconds - _known_s(evaluate(plan, tables, topology))))
        times.append(seconds)
    weights = 1 / np.array(times)
    answer = _least_squares(np.array(rows) * weights[:, None], np.array(left) * weights)
    begin_s, route_s, cut_s, partial_s, sort_s, byte_s = (float(x) for x in answer)
    collectives = ID_COLLECTIVES[device.type] + COLLECTIVES["sharded"]
    return {
        "begin_s": max(begin_s / collectives, 1e-9),
        "route_s": max(route_s, 1e-12),
        "cut_s": max(cut_s, 1e-12),
        "partial_s": max(partial_s, 1e-12),
        "sort_s": max(sort_s, 1e-12),
        "replica_bw": 1 / max(byte_s, 1e-14),
    }


def _known_s(estimate: Estimate) -> float:
    """What of a step is known already, of the mean rank: `busy_clock` does not count its waiting for others."""
    return float(estimate.cost_RT.sum(axis=1).mean()) + estimate.fixed_s


def measure(group: dist.ProcessGroup, device: torch.device, local: int) -> dict[str, float]:
    """Everything, on all ranks at once, as in training; each figure is the mean over ranks."""
    found = fit_lookups(device)
    own = dist.get_rank() // local
    groups = [dist.new_group(list(range(i, min(i + local, group.size())))) for i in range(0, group.size(), local)]
    inside = groups[own]
    if local > 1:
        found["alone"] = alone_share(inside, device)
        found["collective_s"], found["intra_host_bw"] = fit_exchange(inside, device)
    if group.size() > local:
        found["collective_s"], found["inter_host_bw"] = fit_exchange(group, device, near=local)
    if group.size() > 1:
        known = {"inter_host_bw": found.get("intra_host_bw", 1e9), **found}
        found |= fit_steps(inside if local > 1 else group, device, known)
    everyone = comm.all_gather_object(found, group)
    return {name: statistics.fmean(each[name] for each in everyone) for name in found}


def run_rank(rank: int, world: int, local: int, store: str, out: str) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank % local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    method = {"init_method": f"file://{store}", "rank": rank, "world_size": world} if store else {}
    dist.init_process_group("nccl" if cuda else "gloo", **method)  # type: ignore[arg-type]
    assert dist.group.WORLD is not None
    measured = measure(dist.group.WORLD, device, local)
    if rank == 0:
        write(Path(out), device, world, measured)
    comm.barrier(dist.group.WORLD)
    comm.leave()


def write(out: Path, device: torch.device, world: int, measured: dict[str, float]) -> None:
    data = {
        "version": CALIBRATION_VERSION,
        "compute_device": device.type,
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "ranks": world,
        "measured": measured,
    }
    out.write_text(json.dumps(data, indent=2) + "\n")
    for name, value in measured.items():
        scale, unit = (1e-9, "GB/s") if name.endswith("_bw") else (1e9, "ns") if name.endswith("_s") else (1.0, "")
        print(f"{name:16} {value * scale:12.3f} {unit}")
    print(f"written to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="calibration.json")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start on this host (not under torchrun)")
    args = parser.parse_args()
    if "LOCAL_WORLD_SIZE" in os.environ:
        run_rank(
            int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), "", args.out
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (args.ranks, args.ranks, os.path.join(folder, "store"), args.out), nprocs=args.ranks)


if __name__ == "__main__":
    main()
