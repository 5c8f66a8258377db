"""Measures a GPU: lookup bandwidth against the copy rate, steps of tables and of DLRM, kernel launches, host waits.

    python jobs/bench/gpu.py [--ranks 1 2 8] [--against torchrec]

Each rank is a process. Ranks share a GPU, and communicate with gloo, if there are more ranks than GPUs. `--against
torchrec` (install it as embedding.py says) runs the same code on both packages in turns, if every rank has a GPU of its
own. Use `--device cpu` to check that the program runs. It prints a Markdown table.
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
from harness import arguments, in_turns, machine, medians, paired_ratio, print_json, require
from packages import Arrays, Tables, batches, dlrm, dlrm_step, sharded

from rayrec.distributed import comm

Row = tuple[str, str]
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
DENSE = 13
BAG_SIZE = 20


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192, help="samples per rank")
    parser.add_argument("--steps", type=int, default=30)
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
    measurements = [partial(bandwidth, device, options)] if world == 1 else []
    measurements += [partial(steps, kind, device, options) for kind in KINDS]
    for measure in measurements:
        measured = measure()
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
