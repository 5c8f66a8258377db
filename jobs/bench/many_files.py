"""Times data sets of many files: index and plan, a restart over a million files, `rayrec data check` of 100 GB.

    python jobs/bench/many_files.py [--only index restart check] [--files 100000] [--ranks 8] [--json]

`index`: tiny files (hard links to a few templates) in which each row group is a window, so that the plan is as long as
that of as many row groups of a million rows:

    files, row_groups   what was made
    index_s             `rayrec data index` of all files, on Ray
    plan_s              listing, index, manifest, order, and the first sample ranges of all ranks
    worker_bytes        growth of a worker that goes through its whole share of the epoch
    driver_peak_bytes   peak memory of the planning process
    bytes_per_row_group bytes of the manifest, in memory or sent, whichever is larger
    part_bytes          bytes sent to a rank over the epoch; `manifest_bytes`: the manifest's own

`restart`: seconds of the driver for a million files of 1.5 windows each and 1,000 ranks: the first epoch, an epoch read
to a third on as many ranks, and on a tenth fewer. No file is read.

`check`: `rayrec data check --rows` of 1,000 hard links to one file of 100 MB. The page cache holds that file, so the
time leaves out the disk.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from harness import arguments, machine, print_json

from rayrec.data import Cursor, FooterIndex, FooterReading, Manifest, Schema
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering, RankShare
from rayrec.data.source.file_table import COLUMNS, FileTable
from rayrec.data.source.footer_index import index_file
from rayrec.data.source.footers import write_index
from rayrec.data.source.windows import WINDOW_BYTES, WINDOW_ROWS, Windows
from rayrec.data.stream.reading import window_shares
from rayrec.data.stream.shared_manifest import SharedManifest, shared

SCHEMA = Schema.model_validate(
    {
        "label": {"column": "label"},
        "dense": [{"name": "price"}],
        "sparse": [{"name": "user", "mapping": {"kind": "hash"}}],
    }
)
FILTERS = [("day", ">=", 3)]
TEMPLATES, LINKS, ROWS = 8, 30_000, 3


def make(folder: Path, files: int, groups: int) -> None:
    """So many files of so many row groups of `ROWS` rows, in folders of a thousand."""
    rng = np.random.default_rng(0)
    template = folder / "_templates"
    template.mkdir(parents=True)
    sources = [template / str(number) for number in range(max(TEMPLATES, -(-files // LINKS)))]
    for number, source in enumerate(sources):
        rows = ROWS * groups
        columns = {
            "label": rng.integers(0, 2, rows),
            "price": rng.normal(size=rows),
            "user": rng.integers(0, 1000, rows),
            "day": np.repeat(np.arange(groups), ROWS) + 4 * (number % 2),
        }
        pq.write_table(pa.table(columns), source, row_group_size=ROWS)
    for number in range(files):
        part = folder / f"part={number // 1000:03d}"
        if number % 1000 == 0:
            part.mkdir()
        os.link(sources[number % len(sources)], part / f"clicks-{number:06d}-of-{files:06d}.parquet")


def read(folder: str) -> Manifest:
    """The manifest by the index, every row group a window."""
    index = FooterIndex.open(None, [index_file(folder)])
    return Manifest.read(folder, SCHEMA, filters=FILTERS, window_rows=ROWS, reading=FooterReading(index))


def grown(manifest: SharedManifest, rank: int, world_size: int) -> dict[str, int]:
    """In a worker: by how much it grows over its whole part, and how many pieces, rows and bytes that has."""
    begin = _peak_bytes()
    part = manifest.open(Cursor.start(0), Ordering(seed=0), rank, world_size)
    pieces = rows = sent = 0
    while rows < part.rows:
        found = manifest.next_blocks(part, rows)
        rows, pieces, sent = rows + found.rows, pieces + len(found.group), sent + len(pickle.dumps(found))
    assert sum(piece.rows for piece in window_shares(manifest, part)) == part.rows
    return {"bytes": _peak_bytes() - begin, "pieces": pieces, "rows": rows, "sent": sent}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan(folder: str, ranks: int, cpus: int) -> dict[str, Any]:
    """Everything that is measured after indexing."""
    import ray

    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR)
    begin = time.perf_counter()
    manifest = read(folder)
    with shared(manifest, sent_whole=0) as (held,):
        parts = [held.open(Cursor.start(0), Ordering(seed=0), rank, ranks) for rank in range(ranks)]
        for part in parts:
            held.next_blocks(part, 0)
        plan_s = time.perf_counter() - begin
        assert sum(part.rows for part in parts) == manifest.rows
        worker: Any = ray.remote(num_cpus=1)(grown)
        found = ray.get(worker.remote(held, 0, ranks))
    sent = len(pickle.dumps(manifest))
    ray.shutdown()
    return {
        "plan_s": plan_s,
        "worker_bytes": found["bytes"],
        "driver_peak_bytes": _peak_bytes(),
        "bytes_per_row_group": max(manifest.nbytes, sent) / len(manifest.files.group_rows),
        "part_bytes": found["sent"],
        "manifest_bytes": sent,
        "windows": len(manifest.windows),
    }


def index(folder: str, cpus: int) -> dict[str, Any]:
    """How long the index takes."""
    import ray

    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.ERROR)
    begin = time.perf_counter()
    done = write_index([folder])
    took = time.perf_counter() - begin
    ray.shutdown()
    return {"files": done.files, "row_groups": done.row_groups, "rows": done.rows, "index_s": took}


def measure(folder: Path, files: int, groups: int, ranks: int, cpus: int) -> dict[str, Any]:
    """Makes the files and measures, each step in a process of its own."""
    make(folder, files, groups)
    print(f"made {files:,} files", flush=True)
    found: dict[str, Any] = {}
    for step in ("index", "plan"):
        command = [sys.executable, __file__, "--step", step, "--folder", str(folder)]
        command += ["--ranks", str(ranks), "--cpus", str(cpus)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found | {"index_bytes": Path(index_file(str(folder))).stat().st_size}


LARGE_ROWS = 2_600_000  # five columns of 8 bytes that do not compress: about 100 MB
CONFIG = {
    "name": "scale",
    "schema": {
        "label": {"column": "label"},
        "dense": [{"name": "price"}],
        "sparse": [{"name": name, "mapping": {"kind": "hash"}} for name in "abcd"],
    },
    "tables": [{"name": name, "rows": 100_000, "dim": 8, "features": [name]} for name in "abcd"],
    "model": {"name": "dlrm", "args": {"dense_arch": [16, 8], "over_arch": [16, 1]}},
    "trainer": {"num_workers": 0, "batch_size": 1024, "epochs": 1},
}


def make_large(folder: Path, files: int) -> int:
    """Makes one file and hard links to it; returns the bytes of all names together."""
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 1 << 62, LARGE_ROWS) for name in "abcd"}
    columns |= {"price": rng.random(LARGE_ROWS), "label": rng.integers(0, 2, LARGE_ROWS)}
    folder.mkdir()
    source = folder / "0.parquet"
    pq.write_table(pa.table(columns), source, row_group_size=131_072, use_dictionary=False, compression="none")
    for number in range(1, files):
        os.link(source, folder / f"{number}.parquet")
    return files * source.stat().st_size


def check(files: int, rows: int) -> dict[str, float]:
    """Seconds of `rayrec data check --rows`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_large(folder / "data", files)
        config = {**CONFIG, "data": {"train": str(folder / "data")}, "storage": {"path": str(folder / "runs")}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-c", "import sys; from rayrec.cli import run; sys.exit(run(sys.argv[1:]))"]
        begin = time.perf_counter()
        words = ["data", "check", str(folder / "config.yaml"), "--rows", str(rows), "--json"]
        done = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        return {"gigabytes": size / 1e9, "files": files, "rows": json.loads(done.stdout)["rows"], "s": seconds}


def restart(ranks: int, files: int = 1_000_000) -> dict[str, float]:
    """Seconds that the driver takes to deal an epoch, and a third-read epoch, to the ranks and to a tenth fewer."""
    groups = np.arange(files) % 2 + 1
    offsets = np.concatenate([[0], np.cumsum(groups)])
    names = pa.array([f"part-{number:07}.parquet" for number in range(files)])
    numbers = pa.array(np.full(files, 1 << 20))
    columns = {"folder": pa.array(np.arange(files) % 1000, pa.int32()), "name": names, "size_bytes": numbers}
    columns |= {"changed_ns": numbers, "footer": numbers, "etag": numbers}
    columns |= {"row_bytes": pa.array(np.full(files, 8.0), pa.float32())}
    columns |= {name: pa.nulls(files, COLUMNS.field(name).type) for name in ("deleted", "names")}
    folders = tuple((f"s3://clicks/hour={number}/", (("hour", number),)) for number in range(1000))
    rows = np.full(int(offsets[-1]), WINDOW_ROWS)
    batch = pa.RecordBatch.from_pydict(columns, schema=COLUMNS)
    table = FileTable(folders, batch, offsets, rows, np.zeros(len(rows), np.bool_))
    manifest = Manifest(table, Windows.of(table, WINDOW_ROWS, WINDOW_BYTES), (("label", pa.int64()),))
    fewer, order = ranks - ranks // 10, Ordering(seed=0)

    def deal(cursor: Cursor, world: int) -> tuple[float, list[RankShare]]:
        begin = time.perf_counter()
        planner = EpochPlanner(manifest)
        parts = [planner.open(cursor, order, rank, world) for rank in range(world)]
        for part in parts:
            planner.next_blocks(part, 0)
        return time.perf_counter() - begin, parts

    first_s, parts = deal(Cursor.start(0), ranks)
    cursor = Cursor.merge(part.cursor(part.rows // 3) for part in parts)
    same_s, _ = deal(cursor, ranks)
    fewer_s, _ = deal(cursor, fewer)
    return {"windows": len(manifest.windows), "first_s": first_s, "as_many_s": same_s, f"on_{fewer}_s": fewer_s}


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = arguments(__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=10, help="row groups of a file")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray is started with")
    parser.add_argument(
        "--only", choices=["index", "restart", "check"], nargs="+", help="some measurements instead of all"
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows that `rayrec data check` reads")
    parser.add_argument("--step", choices=["index", "plan"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        done = index(args.folder, args.cpus) if args.step == "index" else plan(args.folder, args.ranks, args.cpus)
        print(json.dumps(done))
        return
    print(machine())
    results: dict[str, Any] = {}
    for name in args.only or ("index", "restart", "check"):
        if name == "restart":
            results[name] = restart(1000)
        elif name == "check":
            results[name] = check(1000, args.rows)
        else:
            with tempfile.TemporaryDirectory() as temporary:
                results[name] = measure(Path(temporary) / "set", args.files, args.groups, args.ranks, args.cpus)
        print(f"{name}: {results[name]}", flush=True)
    print_json(args, results)


if __name__ == "__main__":
    main()
