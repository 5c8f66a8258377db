"""What a GPU shows: lookup bandwidth against the device's copy rate, steps of bags and of DLRM, waits and launches.

    python jobs/bench_gpu.py [--ranks 1 2 8] [--write] [--against torchrec]

A process a rank; several share a GPU where there are fewer, and then exchange by gloo. `--write` appends the table to
jobs/RESULTS.md. `--against torchrec`, installed as for jobs/bench_embedding.py, runs the same lines on both in turns;
ranks that share a GPU have no peer. `--device cpu` shows that the program runs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from both_packages import Given, Tables, bags, batches, dlrm, dlrm_step

from rayrec.distributed import comm

Row = tuple[str, str]
KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
DENSE = 13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8192, help="examples of a rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--against", choices=["torchrec"], help="a peer that is installed, timed in the same run")
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
    for kind in KINDS:
        rows += steps(kind, device, options)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    comm.leave()


def bandwidth(device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Bytes of rows that a lookup reads a second, beside those that a copy on the device reads and writes."""
    source = torch.zeros(1 << 24 if device.type == "cpu" else 1 << 28, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device, options.steps)
    shape = Tables(options.tables, options.rows, options.dim, device=device)
    tables, given = bags("rayrec.torchrec", shape), make_batch(0, options)
    kjt = batches("rayrec.torchrec", shape)(given).to(device).sparse_features
    ids = tables.input_dist(kjt).wait()
    read = kjt.values().numel() * options.dim * 4
    with torch.no_grad():
        looked = read / seconds(lambda: tables.lookup(ids), device, options.steps)
    out = [("copy on the device", f"{copied / 1e9:.0f} GB/s")]
    return [*out, ("lookup, rows read", f"{looked / 1e9:.0f} GB/s, {looked / copied:.2f} of the copy rate")]


def steps(kind: str, device: torch.device, options: argparse.Namespace) -> list[Row]:
    """Steps of the tables alone and of DLRM, without and with the pipeline, and what a profile counts in one."""
    world = dist.get_world_size()
    tables = Tables(options.tables, options.rows, options.dim, kind, device)
    alone = device.type == "cpu" or torch.cuda.device_count() >= world
    packages = ["rayrec.torchrec", *([options.against] if options.against and alone else [])]
    ours, *peers = [sides(package, tables, options) for package in packages]
    what, rows = f"{kind}, {world} ranks × {options.batch}", []
    for name, step in ours.items():
        times = [[seconds(side[name], device, 5) for side in (ours, *peers)] for _ in range(max(3, options.steps // 5))]
        figure = f"{1000 * statistics.median(spent[0] for spent in times):.2f} ms"
        if peers:
            ratio = statistics.median(spent[0] / spent[1] for spent in times)
            figure += f", {ratio:.2f} of {options.against}'s"
        rows.append((f"{name}, {what}", figure))
        if device.type == "cuda":
            rows += counted(f"{name}, {what}", step)
    return rows


def sides(package: str, tables: Tables, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """A package's steps, by name."""
    device = tables.device
    given = [make_batch(number, options) for number in range(4)]
    collection = bags(package, tables)
    grad = torch.randn(options.batch, options.tables * options.dim, device=device) / 1000
    ready = [batches(package, tables)(one) for one in given]
    if device.type == "cuda":
        ready = [one.pin_memory() for one in ready]
    source, keyed = cycle(ready), cycle([one.to(device).sparse_features for one in ready])
    model, optimizer = dlrm(package, tables, DENSE, [512, 256, options.dim], [1024, 1024, 512, 256, 1])
    step, drawn = dlrm_step(package, model, optimizer, tables), cycle(given)
    kind = importlib.import_module(f"{package}.distributed.train_pipeline").TrainPipelineSparseDist
    piped_model, piped_optimizer = dlrm(package, tables, DENSE, [512, 256, options.dim], [1024, 1024, 512, 256, 1])
    pipeline = kind(piped_model, piped_optimizer, device)
    return {
        "bags": lambda: collection(next(keyed)).wait().values().backward(grad),
        "DLRM": lambda: step(next(drawn)),
        "DLRM in the pipeline": lambda: pipeline.progress(source),
    }


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


def make_batch(number: int, options: argparse.Namespace) -> Given:
    """One power-law id a feature, other ones on every rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    count = options.tables * options.batch
    ids = (options.rows ** torch.rand(count, generator=generator, dtype=torch.float64) - 1).long()
    label = (torch.rand(options.batch, generator=generator) > 0.5).float()
    return torch.rand(options.batch, DENSE, generator=generator), ids, torch.ones(count, dtype=torch.int64), label


if __name__ == "__main__":
    main()
