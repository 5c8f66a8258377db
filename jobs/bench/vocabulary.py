"""Measures vocabularies: counting one, the index that the processes of a node share, and looking ids up.

    python jobs/bench/vocabulary.py                   # 100M integers, 10M strings, in a temporary folder
    python jobs/bench/vocabulary.py --ids 1000000 --json

Ids are drawn uniformly, so that hardly one is in a processor cache: the slowest case. One core, median of five. `count`
reads as many rows as there are ids, from a Zipf distribution, in four files, and 1,000 rows in each of `--files`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import arguments, machine, print_json

from rayrec.data.arrays.hashing import mix64_array
from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.data.tools.vocabulary import count_column

_CHUNK = 1 << 20
_ASKED = 1 << 22
_REPEATS = 5


def ids_at(places: Any, text: bool) -> Any:
    """The ids at some places of the benchmark's vocabulary: scattered numbers, or those as text."""
    numbers = mix64_array(np.asarray(places, dtype=np.int64), 1).view(np.int64)
    return pa.array(numbers).cast(pa.string()) if text else numbers


def write(path: Path, ids: int, text: bool) -> None:
    """The vocabulary as a Parquet file."""
    with pq.ParquetWriter(path, pa.schema([("id", pa.string() if text else pa.int64())])) as writer:
        for first in range(0, ids, _CHUNK):
            writer.write_table(pa.table({"id": ids_at(range(first, min(ids, first + _CHUNK)), text)}))


def count(folder: Path, rows: int, files: int = 4) -> dict[str, float]:
    """Counts a column of rows in some files."""
    data, rng = folder / f"rows-{files}", np.random.default_rng(0)
    data.mkdir()
    for number in range(files):
        with pq.ParquetWriter(data / f"{number}.parquet", pa.schema([("x", pa.int64())])) as writer:
            for first in range(0, rows // files, _CHUNK):
                size = min(rows // files - first, _CHUNK)
                writer.write_table(pa.table({"x": rng.zipf(1.1, size).astype(np.int64)}))
    begin = time.perf_counter()
    found = count_column(str(data), "x", folder / "counted.parquet")
    return {"count_s": time.perf_counter() - begin, "counted_rows": rows // files * files, "counted_ids": found.seen}


def look_up(path: Path, ids: int, text: bool) -> dict[str, float]:
    """Makes the index of a vocabulary, looks up known and unknown ids."""
    begin = time.perf_counter()
    lookup = load_vocabulary(str(path))
    build_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    places = np.random.default_rng(0).integers(0, ids, _ASKED)
    rates = {}
    for name, asked, wanted in (("known", places, places), ("unknown", places + ids, np.full(_ASKED, -1))):
        query, took = ids_at(asked, text), []
        for _ in range(_REPEATS):
            begin = time.thread_time()
            found = lookup.find(query)
            took.append(time.thread_time() - begin)
            if not np.array_equal(found, wanted):
                raise ValueError("a place is wrong")
        rates[f"{name}_per_s"] = _ASKED / statistics.median(took)
    return {"build_s": build_s, "bytes": lookup.hashes.nbytes + lookup.positions.nbytes, "peak_rss_bytes": peak} | rates


def measure(folder: Path, ids: int, text_ids: int, files: int) -> dict[str, Any]:
    """Every measurement; the index is kept in `folder`."""
    found: dict[str, Any] = {}
    for name, size, text in (("integers", ids, False), ("strings", text_ids, True)):
        path = folder / f"{name}.parquet"
        write(path, size, text)
        command = [sys.executable, __file__, "--look-up", str(path), "--ids", str(size), *(["--text"] if text else [])]
        environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        again = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        found[name] = {"ids": size} | json.loads(out) | {"open_s": json.loads(again)["build_s"]}
    return found | count(folder, ids) | {"files": {"files": files} | count(folder, 1000 * files, files)}


def show(found: dict[str, Any]) -> str:
    """The measurements as a dated table."""
    lines = []
    for name in ("integers", "strings"):
        one = found[name]
        size, peak = one["bytes"], one["peak_rss_bytes"] / 2**20
        lines.append(f"{one['ids']:,} {name}: {size / 1e9:.2f} GB a node, {size / one['ids']:.1f} bytes an id")
        lines.append(f"  made in {one['build_s']:.1f} s with {peak:,.0f} MiB, opened again in {one['open_s']:.3f} s")
        rates = f"{one['known_per_s'] / 1e6:.1f}M known, {one['unknown_per_s'] / 1e6:.1f}M unknown"
        lines.append(f"  lookups a second of one core: {rates}")
    for one, files in ((found, 4), (found["files"], found["files"]["files"])):
        what = f"{one['counted_ids']:,} ids of {one['counted_rows']:,} rows in {files:,} files"
        lines.append(f"{what} counted in {one['count_s']:.1f} s")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, measures, prints."""
    parser = arguments(__doc__)
    parser.add_argument("--ids", type=int, default=100_000_000)
    parser.add_argument("--text-ids", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument(
        "--folder", type=Path, help="folder for the files, with 5 GB of room; default: a temporary folder"
    )
    parser.add_argument("--look-up", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.look_up is not None:
        print(json.dumps(look_up(args.look_up, args.ids, args.text)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        found = measure(Path(temporary), args.ids, args.text_ids, args.files)
    print(machine())
    print(show(found))
    print_json(args, found)


if __name__ == "__main__":
    main()
