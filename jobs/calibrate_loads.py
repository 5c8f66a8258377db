"""What `calibrate.py` measures: lookups of one rank, exchanges, and whole steps, each for loads of many shapes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
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
