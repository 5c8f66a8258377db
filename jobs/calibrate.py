"""Measures lookup, memory and exchange speed on the machine at hand and writes them to a file that `Topology` reads.

    python jobs/calibrate.py --out calibration.json                 # two ranks on this host
    python jobs/calibrate.py --ranks 8 --out calibration.json       # GPUs and NCCL where there are GPUs, else gloo
    torchrun --nnodes 2 --nproc-per-node 8 jobs/calibrate.py --out calibration.json   # between hosts as well

then `Topology.from_calibration("calibration.json", world_size=8)`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayrec.distributed import comm
from rayrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.planner import ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.cost import COLLECTIVES, ID_COLLECTIVES, distinct
from rayrec.distributed.planner.evaluate import evaluate
from rayrec.distributed.planner.topology import CALIBRATION_VERSION
from rayrec.distributed.sharding.cuts import CUTS
from rayrec.distributed.types import ModuleSharding, ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

ROWS = 300_000
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
    (ShardingType.DATA_PARALLEL, 64, 256, 5),
    (ShardingType.DATA_PARALLEL, 128, 256, 5),
)
PASSES = 3  # over all steps; other work on the machine only ever adds
FUSED = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}


@dataclass(frozen=True)
class Load:
    """One lookup measurement: `tables` of width `dim`, `batch` bags of `bag` ids each."""

    tables: int
    dim: int
    batch: int
    bag: int


LOADS = [
    Load(*facts)
    for facts in (
        (8, 16, 2048, 4),
        (8, 128, 2048, 4),
        (8, 16, 512, 30),
        (8, 64, 512, 30),
        (8, 128, 4096, 1),
        (64, 16, 64, 1),
        (2, 16, 64, 1),
    )
]


def seconds_of(work: Callable[[], None], device: torch.device, rounds: int = 15) -> float:
    """The lower quartile of the durations of `work`, after three rounds to warm up."""
    times = []
    for number in range(rounds + 3):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= 3:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4]  # other work on the machine only ever adds


def lookup_seconds(load: Load, device: torch.device) -> float:
    """Forward, backward and update of one rank's tables, nothing exchanged."""
    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=load.dim, feature_names=[f"f{n}"])
        for n in range(load.tables)
    ]
    plan = plan_of(ShardingType.TABLE_WISE, configs, [0], device.type)
    collection = EmbeddingBagCollection(tables=configs, device="meta")
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(collection, plan, ShardingEnv.from_local(1, 0), device)
    count = load.tables * load.batch
    ids = torch.randint(0, ROWS, (count * load.bag,), generator=torch.Generator().manual_seed(0)).to(device)
    kjt = KeyedJaggedTensor(
        [f"f{n}" for n in range(load.tables)], ids, lengths=torch.full((count,), load.bag).to(device)
    )
    grad = torch.full((load.batch, load.tables * load.dim), 1e-3, device=device)
    return seconds_of(lambda: sharded(kjt).wait().values().backward(grad), device)


def fit_lookups(device: torch.device) -> dict[str, float]:
    """Least squares for what an id, a byte and a table cost, over loads that differ in each."""
    rows, times = [], []
    for load in LOADS:
        bags, ids = load.tables * load.batch, load.tables * load.batch * load.bag
        distinct = load.tables * -ROWS * np.expm1(-load.batch * load.bag / ROWS)
        width = max(load.dim * 4, 64)
        moved = ids * width + 2 * bags * load.dim * 4 + 2 * distinct * (width + 4)
        rows.append((2.0 * ids, moved, float(load.tables), 1.0))
        times.append(lookup_seconds(load, device))
    weights = 1 / np.array(times)  # relative errors count, not absolute ones
    answer = _least_squares(np.array(rows) * weights[:, None], np.ones(len(times)))
    id_s, byte_s, table_s = (float(x) for x in answer[:3])
    return {"id_s": max(id_s, 1e-12), "memory_bw": 1 / max(byte_s, 1e-14), "table_s": max(table_s, 1e-8)}


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


def exchange_seconds(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
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

    return seconds_of(work, device)


def fit_exchange(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """(seconds a collective, bytes per second that leave a rank for others)."""
    world = group.size()
    times = np.array([exchange_seconds(size, group, device) for size in MESSAGE_BYTES])
    sent = np.array(MESSAGE_BYTES) * (world - 1) / world
    answer = _least_squares(np.stack([np.ones(len(sent)), sent], axis=1) / times[:, None], np.ones(len(sent)))
    return max(float(answer[0]), 1e-7), 1 / max(float(answer[1]), 1e-14)


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
    """A whole training step of `STEP_TABLES` tables."""
    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f{n}"])
        for n in range(STEP_TABLES)
    ]
    plan = plan_of(kind, configs, list(range(group.size())), device.type)
    collection = EmbeddingBagCollection(tables=configs, device="meta")
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(
        collection, plan, ShardingEnv.from_process_group(group), device
    )
    count = STEP_TABLES * batch
    ids = torch.randint(0, ROWS, (count * bag,), generator=torch.Generator().manual_seed(group.rank())).to(device)
    kjt = KeyedJaggedTensor([f"f{n}" for n in range(STEP_TABLES)], ids, lengths=torch.full((count,), bag).to(device))
    grad = torch.full((batch, STEP_TABLES * dim), 1e-3, device=device)
    return seconds_of(lambda: sharded(kjt).wait().values().backward(grad), device)


def fit_steps(group: dist.ProcessGroup, device: torch.device, known: dict[str, float]) -> dict[str, float]:
    """What routing an id, finding its row block, and sorting replicas' rows cost: whole steps less what is known."""
    world = group.size()
    unknown = {"route_s": 0.0, "cut_s": 0.0, "partial_s": 0.0, "sort_s": 0.0, "replica_bw": 1e18}
    plain = Topology(world, device.type)
    topology = plain.with_device(replace(plain.device, **known, **unknown))
    rows, left, times = [], [], []
    passes = [[step_seconds(*step, group, device) for step in STEPS] for _ in range(PASSES)]
    for number, (kind, dim, batch, bag) in enumerate(STEPS):
        told = {f"t{n}": ParameterConstraints(pooling_factors=[bag]) for n in range(STEP_TABLES)}
        configs = [
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=dim, feature_names=[f"f{n}"])
            for n in range(STEP_TABLES)
        ]
        sharder = EmbeddingBagCollectionSharder(FUSED)
        tables = plan_tables(configs, topology, told, batch_size=batch, sharder=sharder).tables
        plan = ShardingPlan({"": plan_of(kind, configs, list(range(world)), device.type)})
        seconds = min(each[number] for each in passes)
        bags, ids = float(STEP_TABLES * batch), float(STEP_TABLES * batch * bag)
        copies = {ShardingType.COLUMN_WISE: world, ShardingType.DATA_PARALLEL: 0}.get(kind, 1)
        touched = STEP_TABLES * distinct(batch * bag, ROWS) * world
        sorted_rows = ids + touched if kind is ShardingType.DATA_PARALLEL else 0.0
        cut, partial = (ids, bags * (world - 1)) if kind is ShardingType.ROW_WISE else (0.0, 0.0)
        rows.append((1.0, ids * copies, cut, partial, sorted_rows, sorted_rows * dim * 4))
        left.append(max(0.0, seconds - evaluate(plan, tables, topology).step_s))
        times.append(seconds)
    weights = 1 / np.array(times)
    answer = _least_squares(np.array(rows) * weights[:, None], np.array(left) * weights)
    step_s, route_s, cut_s, partial_s, sort_s, byte_s = (float(x) for x in answer)
    collectives = ID_COLLECTIVES + COLLECTIVES["flat"]
    return {
        "collective_s": known["collective_s"] + step_s / collectives,
        "route_s": max(route_s, 1e-12),
        "cut_s": max(cut_s, 1e-12),
        "partial_s": max(partial_s, 1e-12),
        "sort_s": max(sort_s, 1e-12),
        "replica_bw": 1 / max(byte_s, 1e-14),
    }


def measure(group: dist.ProcessGroup, device: torch.device, local: int) -> dict[str, float]:
    """Everything, on all ranks at once, as in training; each figure is the mean over ranks."""
    found = fit_lookups(device)
    own = dist.get_rank() // local
    groups = [dist.new_group(list(range(i, min(i + local, group.size())))) for i in range(0, group.size(), local)]
    inside = groups[own]
    if local > 1:
        found["collective_s"], found["intra_host_bw"] = fit_exchange(inside, device)
    if group.size() > local:
        found["collective_s"], found["inter_host_bw"] = fit_exchange(group, device)
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
    dist.destroy_process_group()


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
        shown = f"{value / 1e9:8.3f} GB/s" if name.endswith("_bw") else f"{value * 1e9:10.1f} ns"
        print(f"{name:16} {shown}")
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
