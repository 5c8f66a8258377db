"""Data at scale: a restart on other ranks of a data set of a million files, and `rayrec data check --rows` of 100 GB.

    python jobs/bench_data_scale.py [--files 1000] [--rows 1000000] [--ranks 1000] [--only check,restart] [--json]

The restart: a million files of 1.5 windows each, read to a third by so many ranks and dealt anew to a tenth fewer; what
the driver's process computes for all of them until each has its first pieces. Files are names here, none is read.

The check: one file of about 100 MB, and so many hard links to it. The folder has that many files of that size by name,
of which the disk, and its cache, hold one; reading from a disk is not in the figure.
"""

from __future__ import annotations

import argparse
import json
import os
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

from rayrec.data import Cursor, Manifest
from rayrec.data.order.epoch_planner import EpochPlanner, Ordering, RankShare
from rayrec.data.source.file_table import COLUMNS, FileTable
from rayrec.data.source.windows import WINDOW_BYTES, WINDOW_ROWS, Windows

ROWS = 2_600_000  # of five columns of 8 bytes that do not compress
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


def make(folder: Path, files: int) -> int:
    """Bytes of the folder, by the names in it."""
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 1 << 62, ROWS) for name in "abcd"}
    columns |= {"price": rng.random(ROWS), "label": rng.integers(0, 2, ROWS)}
    folder.mkdir()
    first = folder / "0.parquet"
    pq.write_table(pa.table(columns), first, row_group_size=131_072, use_dictionary=False, compression="none")
    for number in range(1, files):
        os.link(first, folder / f"{number}.parquet")
    return files * first.stat().st_size


def check(files: int, rows: int) -> dict[str, float]:
    """Seconds of `rayrec data check --rows`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make(folder / "data", files)
        config = {**CONFIG, "data": {"train": str(folder / "data")}, "storage": {"path": str(folder / "runs")}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-c", "import sys; from rayrec.cli import run; sys.exit(run(sys.argv[1:]))"]
        began = time.perf_counter()
        words = ["data", "check", str(folder / "config.yaml"), "--rows", str(rows), "--json"]
        done = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        return {"gigabytes": size / 1e9, "files": files, "rows": json.loads(done.stdout)["rows"], "s": seconds}


def restart(ranks: int, files: int = 1_000_000) -> dict[str, float]:
    """Seconds of the driver from a cursor of so many ranks to the first pieces of a tenth fewer."""
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

    def start(cursor: Cursor, world: int) -> tuple[float, list[RankShare]]:
        began = time.perf_counter()
        planner = EpochPlanner(manifest)
        parts = [planner.open(cursor, order, rank, world) for rank in range(world)]
        for part in parts:
            planner.next_blocks(part, 0)
        return time.perf_counter() - began, parts

    first_s, parts = start(Cursor.start(0), ranks)
    cursor = Cursor.merge(part.cursor(part.rows // 3) for part in parts)
    same_s, _ = start(cursor, ranks)
    fewer_s, _ = start(cursor, fewer)
    return {"windows": len(manifest.windows), "first_s": first_s, "as_many_s": same_s, f"on_{fewer}_s": fewer_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--only", default="check,restart")
    parser.add_argument("--json", action="store_true", help="print one object")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    if "restart" in given.only:
        found["restart"] = restart(given.ranks)
    if "check" in given.only:
        found["check"] = check(given.files, given.rows)
    print(json.dumps(found) if given.json else found)


if __name__ == "__main__":
    main()
