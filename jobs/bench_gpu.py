"""What a GPU shows: lookup bandwidth against the device's copy rate, steps of DLRM, waits and launches of a step.

    python jobs/bench_gpu.py [--ranks 1 2 8] [--write]

A process a rank; several share a GPU where there are fewer, and then exchange by gloo. `--write` appends the table to
jobs/RESULTS.md. TorchRec's figures for the same steps come from jobs/bench_embedding.py on the same machine.
`--device cpu` shows that the program runs.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    TrainPipeline,
    comm,
)
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.sharding.cuts import CUTS
from rayrec.distributed.types import ParameterSharding, ShardingType
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

Row = tuple[str, str]
PLANS = [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192, help="examples of a rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="append the table to jobs/RESULTS.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU answers; --device cpu only shows that the program runs")
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    rows: list[Row] = []
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (world, folder, options), nprocs=world)
            rows += torch.load(f"{folder}/rows.pt")
    table = as_table(f"{name}, {datetime.date.today()}, {options.tables} tables × {options.dim}", rows)
    print(table)
    if options.write:
        with (Path(__file__).parent / "RESULTS.md").open("a") as file:
            file.write(f"\n{table}\n")


def as_table(title: str, rows: list[Row]) -> str:
    return "\n".join(
        [f"## On a GPU: {title}", "", "| what | figure |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    )


def run(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank; the first one writes down what it saw."""
    shared = options.device == "cpu" or torch.cuda.device_count() < world
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if shared else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows: list[Row] = []
    if world == 1:
        rows += bandwidth(device, options)
    for plan in PLANS:
        rows += steps(plan, device, options)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    comm.leave()


def bandwidth(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Bytes of rows that a lookup reads a second, beside those that a copy on the device reads and writes."""
    source = torch.zeros(1 << 24 if device.type == "cpu" else 1 << 28, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device, options.steps)
    model, batch = make(ShardingType.TABLE_WISE, device, options), make_batch(0, options)
    tables, kjt = model.module.embedding_bags, batch.sparse.to(device)
    ids = tables.input_dist(kjt).wait()
    read = kjt.values().numel() * options.dim * 4
    with torch.no_grad():
        looked = read / seconds(lambda: tables.lookup(ids), device, options.steps)
    out = [("copy on the device", f"{copied / 1e9:.0f} GB/s")]
    return [*out, ("lookup, rows read", f"{looked / 1e9:.0f} GB/s, {looked / copied:.2f} of the copy rate")]


def steps(plan: ShardingType, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Training steps of DLRM with and without the pipeline, and what a profile counts in one of them."""
    model, world = make(plan, device, options), dist.get_world_size()
    dense = torch.optim.Adagrad(model.other_parameters().values(), lr=0.01)
    batches = [make_batch(number, options) for number in range(4)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]

    def plain() -> None:
        batch = batches[0].to(device, non_blocking=True)
        loss, _ = model(batch)
        dense.zero_grad()
        loss.backward()
        dense.step()

    alone = seconds(plain, device, options.steps)
    pipeline, source = TrainPipeline[Batch](model, dense, device), forever(batches)
    piped = seconds(lambda: pipeline.progress(source), device, options.steps)
    what = f"DLRM, {plan.value}, {world} ranks × {options.batch}"
    rows = [(f"{what}: step", f"{1000 * alone:.2f} ms, in the pipeline {1000 * piped:.2f} ms")]
    return [*rows, *counted(what, plain)] if device.type == "cuda" else rows


def counted(what: str, step: Callable[[], Any]) -> list[Row]:
    """Launches and waits of the host in a step, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    times = {event.key: event.count for event in found.key_averages()}
    launches = sum(count for key, count in times.items() if key.startswith("cudaLaunchKernel"))
    waits = sum(times.get(key, 0) for key in ("cudaStreamSynchronize", "cudaEventSynchronize"))
    return [(f"{what}: launches, waits of the host", f"{launches}, {waits}")]


def seconds(act: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median of some runs, each waited for."""
    found = []
    for _ in range(times + 3):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return sorted(found[3:])[times // 2]


def forever(batches: list[Batch]) -> Any:
    while True:
        yield from batches


def make(plan: ShardingType, device: torch.device, options: argparse.Namespace) -> DistributedModelParallel:
    world = dist.get_world_size()
    configs = [
        EmbeddingBagConfig(
            name=f"t{n}", num_embeddings=options.rows, embedding_dim=options.dim, feature_names=[f"f{n}"]
        )
        for n in range(options.tables)
    ]
    shardings = {}
    for number, config in enumerate(configs):
        ranks = [number % world] if plan is ShardingType.TABLE_WISE else list(range(world))
        shards = CUTS[plan](config.name, options.rows, options.dim, ranks)
        shardings[config.name] = ParameterSharding(
            sharding_type=plan.value, compute_kernel="fused", shards=shards, device=device.type
        )
    torch.manual_seed(0)
    model = DLRM(configs, 13, [512, 256, options.dim], [1024, 1024, 512, 256, 1], device=device)
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01})
    assert dist.group.WORLD is not None
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"embedding_bags": shardings}),
        sharders=[sharder],
    )


def make_batch(number: int, options: argparse.Namespace) -> Batch:
    """One power-law id a feature, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    count = options.tables * options.batch
    ids = (options.rows ** torch.rand(count, generator=generator, dtype=torch.float64) - 1).long()
    keys = [f"f{n}" for n in range(options.tables)]
    kjt = KeyedJaggedTensor(keys, ids, lengths=torch.ones(count, dtype=torch.int64))
    label = (torch.rand(options.batch, generator=generator) > 0.5).float()
    return Batch(torch.rand(options.batch, 13, generator=generator), kjt, label)


if __name__ == "__main__":
    main()
