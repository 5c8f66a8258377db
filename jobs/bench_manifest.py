"""Many files: how long their index takes, how long the plan of an epoch, and what it costs a worker and the driver.

    python jobs/bench_manifest.py [--files 100000] [--groups 10] [--ranks 8] [--json]

The files are tiny and made for it (hard links of a few templates), every row group is a window of its own, so that the
plan is as long as that of as many row groups of a million rows. With --json the last line is one object:

    files, row_groups   what was made
    index_s             `rayrec data index` of all of them, on Ray
    plan_s              after that, of an epoch: listing, index, manifest, order, deal, the parts of all ranks begun
    worker_bytes        by how much a worker grows that goes through its whole part, piece by piece
    driver_peak_bytes   the most memory that the planning process had
    bytes_per_row_group of the manifest, in memory and as it is sent
    part_bytes          what a rank is sent, all pieces together; the manifest's own: `manifest_bytes`
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
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import Cursor, FooterIndex, FooterReading, Manifest, Schema
from rayrec.data.order.epoch_planner import Ordering
from rayrec.data.source.footer_index import index_file
from rayrec.data.source.footers import write_index
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


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--groups", type=int, default=10, help="row groups of a file")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that Ray is started with")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--step", choices=["index", "plan"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.step:
        done = index(args.folder, args.cpus) if args.step == "index" else plan(args.folder, args.ranks, args.cpus)
        print(json.dumps(done))
        return
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary) / "set", args.files, args.groups, args.ranks, args.cpus)
    print(f"{date.today()}  {found['files']:,} files, {found['row_groups']:,} row groups, {args.ranks} ranks")
    print(f"index {found['index_s']:.1f} s ({found['index_bytes'] / 2**20:,.0f} MiB), plan {found['plan_s']:.1f} s")
    print(
        f"manifest {found['bytes_per_row_group']:.0f} bytes a row group; a worker grows by "
        f"{found['worker_bytes'] / 2**20:.0f} MiB; the driver's peak is {found['driver_peak_bytes'] / 2**20:.0f} MiB"
    )
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
