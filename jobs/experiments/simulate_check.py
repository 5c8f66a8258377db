"""Predicted against measured steps on the ranks at hand, for `simulate.py --check`: calibrated here, planned, run.

A step is what the planner speaks of: ids there, lookups, vectors back, gradients there, updates; no dense part.
"""

from __future__ import annotations

import datetime
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step_time import step_on

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.planner import ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.machine.calibration import Calibration
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor

sys.path.append(str(Path(__file__).resolve().parents[1]))
import calibrate
from calibrate import FUSED, configs_of

WITHIN = 0.2
BATCH = 512  # of a rank
TABLES = (  # rows, dim, ids a bag
    (400_000, 64, 1),
    (200_000, 128, 2),
    (200_000, 72, 10),
    (100_000, 40, 20),
    (50_000, 16, 5),
    (20_000, 48, 3),
    (500, 24, 2),
)
WARM, STEPS, VISITS = 3, 24, 4


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One world.

    Args:
        world: `HOSTSxRANKS`.
        predicted_s: by the planner, for the plan that it chose.
        measured_s: a step's lower quartile, as all that is calibrated; the median of several visits.
        visits_s: that of each.
        sharding: the plan's sharding types, table by table.
    """

    world: str
    predicted_s: float
    measured_s: float
    visits_s: tuple[float, ...]
    sharding: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error, "good": abs(self.error) <= WITHIN}


def check_here(ranks: Sequence[int], cpus: int) -> list[Checked]:
    """Each number of ranks, on this host; or the ranks that torchrun has started, on however many hosts they are.

    Under torchrun every rank gets the answer.

    Args:
        cpus: of a host.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return [_join(rank, world, local, cpus, "env://", None)]
    found = []
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "checked.pt"
            mp.spawn(_on_rank, (world, cpus, f"file://{folder}/store", out), nprocs=world)
            found.append(torch.load(out, weights_only=False))
    return found


def _on_rank(rank: int, world: int, cpus: int, store: str, out: Path) -> None:
    _join(rank, world, world, cpus, store, out)


def _join(rank: int, world: int, local: int, cpus: int, method: str, out: Path | None) -> Checked:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300)
    )
    group = dist.group.WORLD
    assert group is not None
    checked = check(group, local, cpus)
    if rank == 0 and out is not None:
        torch.save(checked, out)
    comm.barrier(group)
    comm.leave()
    return checked


def check(group: dist.ProcessGroup, local: int, cpus: int) -> Checked:
    """Calibrates, plans and runs on CPU ranks, `local` of them on a host of `cpus`; a collective."""
    device, world = torch.device("cpu"), group.size()
    first = calibrate.measure(group, device, local)
    visits = [_steps(group, local, first)]
    second = calibrate.measure(group, device, local)  # the machine's speed changes while it is measured
    speeds = {name: (first[name] + second[name]) / 2 for name in first}
    visits += [_steps(group, local, speeds) for _ in range(VISITS - 1)]
    topology, result = _planned(world, local, speeds)
    processors = min(world, cpus * (world // local))
    predicted = step_on(result.estimate, processors, topology.device.alone)
    kinds = tuple(sharding.sharding_type for sharding in result.plan.plan[""].values())
    visits_s = tuple(comm.broadcast_object(visits, group))
    hosts = len(topology.hosts)
    return Checked(
        world=f"{hosts}x{local}",
        predicted_s=comm.broadcast_object(predicted, group),
        measured_s=statistics.median(visits_s),
        visits_s=visits_s,
        sharding=kinds,
    )


def _planned(world: int, local: int, speeds: dict[str, float]) -> Any:
    topology = Topology(world, "cpu", local_world_size=local)
    topology = topology.with_calibration(Calibration(path="measured here", kind="cpu", speeds=speeds))
    told = {f"t{n}": ParameterConstraints(pooling_factors=[bag]) for n, (_, _, bag) in enumerate(TABLES)}
    sharder = EmbeddingBagCollectionSharder(FUSED)
    configs = configs_of((rows, dim) for rows, dim, _ in TABLES)
    return topology, plan_tables(configs, topology, told, batch_size=BATCH, sharder=sharder)


def _steps(group: dist.ProcessGroup, local: int, speeds: dict[str, float]) -> float:
    """Seconds of a step of the slowest rank: the lower quartile, as of what is calibrated."""
    gc.collect()  # the tables of the visit before
    _, result = _planned(group.size(), local, speeds)
    configs = configs_of((rows, dim) for rows, dim, _ in TABLES)
    collection = EmbeddingBagCollection(tables=configs, device="meta")
    env = ShardingEnv.from_process_group(group, local)
    sharded = EmbeddingBagCollectionSharder(FUSED).shard(collection, result.plan.plan[""], env, torch.device("cpu"))
    generator = torch.Generator().manual_seed(group.rank())
    kjts = []
    for _ in range(4):
        lengths = torch.cat([torch.full((BATCH,), bag) for _, _, bag in TABLES])
        values = [torch.randint(0, rows, (BATCH * bag,), generator=generator) for rows, _, bag in TABLES]
        kjts.append(KeyedJaggedTensor([f"f{n}" for n in range(len(TABLES))], torch.cat(values), lengths=lengths))
    grad = torch.full((BATCH, sum(dim for _, dim, _ in TABLES)), 1e-4)
    comm.barrier(group)
    times = []
    for number in range(WARM + STEPS):
        start = time.perf_counter()
        sharded(kjts[number % len(kjts)]).wait().values().backward(grad)
        times.append(time.perf_counter() - start)
    return max(comm.all_gather_object(sorted(times[WARM:])[STEPS // 4], group))
