"""Measures a GPU: lookup bandwidth against the copy rate, steps of tables and of DLRM, kernel launches, host waits.

    python jobs/bench/gpu.py [--ranks 1 2 8] [--against torchrec] [--only PART]

Each rank is a process. Ranks share a GPU, and communicate with gloo, if there are more ranks than GPUs. `--against
torchrec` (install it as embedding.py says) runs the same code on both packages in turns, if every rank has a GPU of its
own. `--only` measures some parts, such as `hstu`. Use `--device cpu` to check that the program runs. It prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dynamic_ids import dlrm as dynamic_dlrm
from harness import arguments, in_turns, machine, medians, paired_ratio, print_json, require
from hstu_ranker import forms
from packages import Arrays, Tables, batches, dlrm, dlrm_step, sharded

from rayrec.distributed import EmbeddingBagCollectionSharder, ParameterSharding, ShardingEnv, ShardingType, comm
from rayrec.distributed.plan.cuts import CUTS
from rayrec.dynamic_ids import DeviceIdMap, DynamicIds, Evict, IdMap
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig

Row = tuple[str, str]
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
DENSE = 13
BAG_SIZE = 20
FORMATS = (("fp32", "FP32", True), ("bf16", "BF16", True), ("ordered", "FP32", False))  # number format, permuted ids


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192, help="samples per rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=[*PARTS, *KINDS], nargs="+", help="parts to measure, default: all")
    parser.add_argument("--against", choices=["torchrec"], help="also time this package in the same run")
    options = parser.parse_args()
    require(
        options.device == "cpu" or torch.cuda.is_available(), "no GPU found; --device cpu checks that the program runs"
    )
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU"
    print(f"{name}, {options.tables} tables × {options.dim}; {machine()}\n")
    print("| measured | value |\n|---|---|", flush=True)
    rows: list[Row] = []
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (world, folder, options), nprocs=world)
            rows += torch.load(f"{folder}/rows.pt")
    print_json(options, {"device": name, "rows": rows})


def run(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank; rank 0 saves the rows of the table."""
    shared = options.device == "cpu" or torch.cuda.device_count() < world
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if shared else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows: list[Row] = []
    parts: dict[str, Callable[[], list[Row]]] = {kind: partial(steps, kind, device, options) for kind in KINDS}
    if world == 1:
        parts |= {name: partial(part, device, options) for name, part in PARTS.items()}
    for name in options.only or ("bandwidth", *KINDS, *PARTS):
        if name not in parts:  # measured, or not of many ranks
            continue
        measured = parts.pop(name)()
        # Models hold cycles; without this the tables of one sharding type are still allocated beside the next one's.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        rows += measured
        for label, value in measured if rank == 0 else ():
            print(f"| {label} | {value} |", flush=True)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    comm.leave()


def bandwidth(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Bytes per second that a lookup reads, against those that a copy on the device reads and writes.

    Bags have `BAG_SIZE` ids, so that the kernel takes much longer than its launch.
    """
    source = torch.zeros(1 << 24 if device.type == "cpu" else 1 << 28, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device, options.steps)
    shape = Tables(("table_wise",) * options.tables, options.rows, options.dim, device=device)
    tables = sharded("rayrec.torchrec", shape)
    kjt = batches("rayrec.torchrec", shape)(make_batch(0, options, BAG_SIZE)).to(device).sparse_features
    ids = tables.input_dist(kjt).wait()
    read = kjt.values().numel() * options.dim * 4
    with torch.no_grad():
        looked_up = read / seconds(lambda: tables.lookup(ids), device, options.steps)
    return [
        ("copy on the device", f"{copied / 1e9:.0f} GB/s"),
        (
            f"lookup of bags of {BAG_SIZE} ids, rows read",
            f"{looked_up / 1e9:.0f} GB/s, {looked_up / copied:.2f} of the copy rate",
        ),
    ]


def formats(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Steps of bf16 tables / of fp32 ones, and of ids in a vocabulary's order / in another one."""
    rows: list[Row] = []
    for name in ("row_wise", "data_parallel"):
        made = {label: bags_step(name, device, options, data_type, permuted) for label, data_type, permuted in FORMATS}
        times = in_turns({label: partial(seconds, step, device, 5) for label, step in made.items()}, 7)
        for label, against in (("bf16", "fp32"), ("ordered", "fp32")):
            rows.append((f"bags of {BAG_SIZE} ids, {name}, {label} / {against}", ratio_of(times, label, against)))
    return rows


def bags_step(
    kind: str, device: torch.device, options: argparse.Namespace, data_type: str, permuted: bool
) -> Callable[[], Any]:
    """A step of tables alone: bags of `BAG_SIZE` ids, which are on the device, in an eighth of the batch."""
    shape = Tables((kind,) * options.tables, options.rows, options.dim, device=device)
    configs = [
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=options.rows,
            embedding_dim=options.dim,
            feature_names=[key],
            data_type=DataType(data_type),
        )
        for number, key in enumerate(shape.keys)
    ]
    plan = {table.name: whole(kind, table) for table in configs}
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.01})
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    collection = sharder.shard(EmbeddingBagCollection(configs, device="meta"), plan, env, device)
    few = argparse.Namespace(**vars(options) | {"batch": max(1, options.batch // 8)})
    order = torch.randperm(options.rows, generator=torch.Generator().manual_seed(0))
    made = []
    for number in range(4):
        dense, ids, lengths, label = make_batch(number, few, BAG_SIZE)
        made.append(batches("rayrec.torchrec", shape)((dense, order[ids] if permuted else ids, lengths, label)))
    kjts = cycle([batch.to(device).sparse_features for batch in made])
    grad = torch.randn(few.batch, options.tables * options.dim, device=device) / 1000
    return lambda: collection(next(kjts)).wait().values().backward(grad)


def whole(kind: str, table: EmbeddingBagConfig) -> ParameterSharding:
    shards = CUTS[ShardingType(kind)](table.name, table.num_embeddings, table.embedding_dim, [0])
    return ParameterSharding(sharding_type=kind, compute_kernel="fused", shards=shards)


def hstu(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Steps of the dense part of `hstu_ranker` without padding / padded, alone and with 8 candidates of a history."""
    rows: list[Row] = []
    for candidates, length in ((1, 256), (8, 256), (1, 1024)):
        size = max(8, min(options.batch // 16, 512 * 256 // length) // 8 * 8)
        sizes = argparse.Namespace(length=length, rows=size, candidates=candidates, dim=options.dim, blocks=2)
        made = forms(sizes, device)

        def step(forward: Callable[[], torch.Tensor], encoder: torch.nn.Module = made.encoder) -> None:
            encoder.zero_grad()
            forward().square().mean().backward()

        with torch.no_grad():
            torch.testing.assert_close(made.jagged(), made.padded(), rtol=1e-3, atol=1e-4)
        acts = {"jagged": partial(step, made.jagged), "padded": partial(step, made.padded)}
        times = in_turns({name: partial(seconds, act, device, 5) for name, act in acts.items()}, 5)
        label = f"hstu_ranker, histories to {length}, {size} rows, {candidates} candidates a request, jagged / padded"
        rows.append((label, ratio_of(times, "jagged", "padded")))
    return rows


def dynamic(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Steps of a run with dynamic ids / with hashed ones, mapped on the host; and the map's own step on the device."""
    rows: list[Row] = []
    table_rows = min(options.rows, 200_000)
    for ids in (1, 20):
        batch = max(16, options.batch // (4 * ids))
        case = dynamic_dlrm(ids, table_rows, batch)
        made = {kind: case.steps(kind, str(device)) for kind in ("dynamic", "hash")}
        times = in_turns({kind: partial(seconds, step, device, 4) for kind, step in made.items()}, 5, warmup=2)
        label = f"step of 26 tables, {ids} ids a bag, batch {batch}, dynamic / hashed"
        rows.append((label, ratio_of(times, "dynamic", "hash")))
    for evict in (Evict.LFU, Evict.LRU):
        own = DeviceIdMap(IdMap(DynamicIds(rows=options.rows, evict=evict)), device)
        ids_of = [torch.from_numpy(_zipf(options, number)).to(device) for number in range(4)]
        given = cycle(ids_of)
        took = seconds(lambda own=own, given=given: own.step(next(given), own.clock + 1), device, 20)
        rate = len(ids_of[0]) / took / 1e6
        rows.append(
            (
                f"map of {options.rows:,} rows on the device, {evict.name.lower()}, a step",
                f"{1000 * took:.2f} ms, {rate:.0f}M ids/s",
            )
        )
    return rows


def _zipf(options: argparse.Namespace, number: int) -> Any:
    return make_batch(number, argparse.Namespace(**vars(options) | {"rows": 2 * options.rows}))[1].numpy()


def host(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """How long the host takes to issue a step, of how long the step takes: below 1, the host is ahead of the device."""
    rows: list[Row] = []
    for kind in KINDS:
        for name, step in sides(
            "rayrec.torchrec", Tables((kind,) * options.tables, options.rows, options.dim, device=device), options
        ).items():
            for _ in range(5):
                step()
            issued, done = [], []
            for _ in range(5):
                synchronize(device)
                start = time.perf_counter()
                for _ in range(5):
                    step()
                issued.append((time.perf_counter() - start) / 5)
                synchronize(device)
                done.append((time.perf_counter() - start) / 5)
            took, of = statistics.median(issued), statistics.median(done)
            rows.append(
                (f"{name}, {kind}: the host / the step", f"{1000 * took:.2f} / {1000 * of:.2f} ms, {took / of:.2f}")
            )
        gc.collect()
    return rows


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio_of(times: dict[str, list[float]], one: str, other: str) -> str:
    of = medians(times)
    return f"{1000 * of[one]:.2f} / {1000 * of[other]:.2f} ms, {paired_ratio(times[one], times[other]):.2f}"


PARTS: dict[str, Callable[[torch.device, argparse.Namespace], list[Row]]] = {
    "bandwidth": bandwidth,
    "host": host,
    "dynamic": dynamic,
    "hstu": hstu,
    "formats": formats,
}


def steps(kind: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Steps of the tables alone and of DLRM, without and with the pipeline; with CUDA also launches and waits."""
    world = dist.get_world_size()
    tables = Tables((kind,) * options.tables, options.rows, options.dim, device=device)
    own_device = device.type == "cpu" or torch.cuda.device_count() >= world
    packages = ["rayrec.torchrec", *([options.against] if options.against and own_device else [])]
    steps_of = {package: sides(package, tables, options) for package in packages}
    rows: list[Row] = []
    for name, step in steps_of["rayrec.torchrec"].items():
        label = f"{name}, {kind}, {world} ranks × {options.batch}"
        timers = {package: partial(seconds, acts[name], device, 5) for package, acts in steps_of.items()}
        times = in_turns(timers, max(3, options.steps // 5))
        value = f"{1000 * medians(times)['rayrec.torchrec']:.2f} ms"
        if len(times) > 1:
            value += f", {paired_ratio(*times.values()):.2f} × {options.against}"
        rows.append((label, value))
        if device.type == "cuda":
            rows += counted(label, step)
    return rows


def sides(package: str, tables: Tables, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The steps of a package, by name."""
    device = tables.device
    arrays = [make_batch(number, options) for number in range(4)]
    collection = sharded(package, tables)
    grad = torch.randn(options.batch, options.tables * options.dim, device=device) / 1000
    host_batches = [batches(package, tables)(arrays_of_batch) for arrays_of_batch in arrays]
    if device.type == "cuda":
        host_batches = [batch.pin_memory() for batch in host_batches]
    source, kjts = cycle(host_batches), cycle([batch.to(device).sparse_features for batch in host_batches])
    model, optimizer = dlrm(package, tables, DENSE, [512, 256, options.dim], [1024, 1024, 512, 256, 1])
    step, next_arrays = dlrm_step(package, model, optimizer, tables), cycle(arrays)
    pipeline_class = importlib.import_module(f"{package}.distributed.train_pipeline").TrainPipelineSparseDist
    piped_model, piped_optimizer = dlrm(package, tables, DENSE, [512, 256, options.dim], [1024, 1024, 512, 256, 1])
    pipeline = pipeline_class(piped_model, piped_optimizer, device)
    return {
        "bags": lambda: collection(next(kjts)).wait().values().backward(grad),
        "DLRM": lambda: step(next(next_arrays)),
        "DLRM in the pipeline": lambda: pipeline.progress(source),
    }


def counted(label: str, step: Callable[[], Any]) -> list[Row]:
    """Kernel launches and waits of the host in one step, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profiler.key_averages()}
    launches = sum(count for key, count in counts.items() if key.startswith("cudaLaunchKernel"))
    waits = sum(counts.get(key, 0) for key in ("cudaStreamSynchronize", "cudaEventSynchronize"))
    return [(f"{label}: launches, waits of the host", f"{launches}, {waits}")]


def seconds(act: Callable[[], Any], device: torch.device, times: int) -> float:
    """The median time of a call, the device's work included."""
    times_s = []
    for _ in range(times + 3):
        start = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[3:])


def make_batch(number: int, options: argparse.Namespace, bag_size: int = 1) -> Arrays:
    """Ids from a power law, `bag_size` per feature, different on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    num_bags = options.tables * options.batch
    ids = (options.rows ** torch.rand(bag_size * num_bags, generator=generator, dtype=torch.float64) - 1).long()
    label = (torch.rand(options.batch, generator=generator) > 0.5).float()
    return torch.rand(options.batch, DENSE, generator=generator), ids, torch.full((num_bags,), bag_size), label


if __name__ == "__main__":
    main()
