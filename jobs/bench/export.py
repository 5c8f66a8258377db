"""Measures the export of a sharded checkpoint: seconds, peak memory, peak disk space, bytes read, and its rates against
the write rate of the same disk.

    python jobs/bench/export.py --tables 4 --rows 19531250 --format int8 --folder /somewhere/large
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import arguments, machine, print_json

from rayrec.checkpoint import CheckpointStore
from rayrec.checkpoint.format import INDEX, Index
from rayrec.checkpoint.manifest import MANIFEST, Manifest, sha256
from rayrec.checkpoint.store import folder_name
from rayrec.checkpoint.weights import CheckpointWeights
from rayrec.checkpoint.writer import Item, write
from rayrec.distributed.plan.cuts import by_cols, by_rows, whole
from rayrec.distributed.plan.shards import Shard
from rayrec.inference import ExportOptions, Trained, export
from rayrec.inference.graph import Inputs
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

CUTS = ("table_wise", "row_wise", "column_wise")
BATCH = 1024
WRITTEN = 4 << 30  # bytes written to measure the disk, at most


def model_of(args: argparse.Namespace) -> DLRM:
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=args.rows,
            embedding_dim=args.dim,
            feature_names=[f"f{i}"],
            init_fn=lambda block: block.uniform_(-0.1, 0.1),
        )
        for i in range(args.tables)
    ]
    return DLRM(tables, 2, dense_arch=[16, args.dim], over_arch=[16, 1], seed=1)


def shards_of(args: argparse.Namespace) -> dict[str, tuple[Shard, ...]]:
    """The shards of each table; the kinds of cut take turns."""
    cuts, ranks, made = args.cut.split(","), list(range(args.ranks)), {}
    for i in range(args.tables):
        kind, name = cuts[i % len(cuts)], f"t{i}"
        if kind == "table_wise":
            made[name] = whole(name, args.rows, args.dim, [i % args.ranks])
        else:
            made[name] = (by_rows if kind == "row_wise" else by_cols)(name, args.rows, args.dim, ranks)
    return made


def save(root: Path, args: argparse.Namespace) -> None:
    """Writes a checkpoint as `args.ranks` ranks do.

    Row `i` of a table is numbers `i` to `i + dim` of one random sequence: all rows differ, and memory holds one number
    per row.
    """
    folder = CheckpointStore(root / "checkpoints").root.sub(folder_name(1, 1))
    dense = {name: value for name, value in model_of(args).state_dict().items() if not name.startswith("embedding")}
    items: list[list[Item]] = [[] for _ in range(args.ranks)]
    items[0] += [Item(f"dense/{name}", tuple(value.shape), (0,) * value.dim(), value) for name, value in dense.items()]
    for name, shards in shards_of(args).items():
        numbers = torch.rand(args.rows + args.dim, generator=torch.Generator().manual_seed(int(name[1:]))) - 0.5
        rows = numbers.as_strided((args.rows, args.dim), (1, 1))
        for s in shards:
            part = rows[s.rows.start : s.rows.stop, s.cols.start : s.cols.stop]
            key = f"table/embedding_bags.embedding_bags.{name}"
            items[s.rank].append(Item(key, tuple(rows.shape), (s.rows.start, s.cols.start), part))
    data = Index.joined([write(folder, rank, held) for rank, held in enumerate(items)]).to_json()
    folder.write(INDEX, data)
    facts = Manifest(
        step=1, attempt=1, time=time.time(), world_size=args.ranks, iteration=1, plan={}, mapping=None, extra={}
    )
    folder.write(MANIFEST, replace(facts, index_size=len(data), index_sha256=sha256(data)).to_json())


class Memory:
    """Peaks of this process's anonymous memory, of that and its mapped files, and of the disk space of a folder."""

    def __init__(self, folder: Path) -> None:
        self.own = self.all = self.disk = 0
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._before = _resident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            own, mapped = (now - before for now, before in zip(_resident(), self._before, strict=True))
            self.own, self.all = max(self.own, own), max(self.all, own + mapped)
            self.disk = max(self.disk, on_disk(self._folder))


def on_disk(folder: Path) -> int:
    """Disk space of all files in a folder, in bytes."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # the file was removed
            size += 512 * path.stat().st_blocks if path.is_file() else 0
    return size


def write_rate(folder: Path, size: int) -> float:
    """Bytes per second that the disk writes of one file, synced."""
    block, path = os.urandom(16 << 20), folder / "written"
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    took, size = time.perf_counter() - begin, path.stat().st_size
    path.unlink()
    return size / took


def bytes_read() -> int:
    """Bytes that this process has read from files, page cache included."""
    lines = dict(line.split(": ", 1) for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def _resident() -> tuple[int, int]:
    """Resident bytes: anonymous, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return anonymous, mapped


def measure(root: str, args: argparse.Namespace) -> dict[str, Any]:
    """Exports the checkpoint in this process."""
    torch.set_num_threads(1)
    if args.cgroup is not None:
        (args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    keys = tuple(f"f{i}" for i in range(args.tables))

    def batches(rows: int | None = None) -> Iterator[Batch]:
        for seed in range(-(-min(rows or args.eval_rows, args.eval_rows) // BATCH)):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(args.rows, (len(keys) * BATCH,), generator=generator)
            sparse = KeyedJaggedTensor(list(keys), ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            label = torch.randint(2, (BATCH,), generator=generator).float()
            yield Batch(torch.randn(BATCH, 2, generator=generator), sparse, label)

    checkpoint = CheckpointStore(f"{root}/checkpoints").latest()
    assert checkpoint is not None
    folder = Path(root) / "exported"
    folder.mkdir()
    schema = {
        "label": {"column": "label"},
        "sparse": [{"name": key} for key in keys],
        "dense": [{"name": "d0"}, {"name": "d1"}],
    }
    trained = Trained(
        make_model=lambda: model_of(args),
        weights=CheckpointWeights(checkpoint.path),
        inputs=Inputs(keys, 2, None, False),
        mapping={"schema": schema, "tables": []},
        rows_of=dict.fromkeys(keys, args.rows),
        batches=batches,
    )
    tables = 4 * args.tables * args.rows * args.dim
    rates = [write_rate(folder, min(WRITTEN, tables))]
    read, begin = bytes_read(), time.perf_counter()
    parity = None if args.parity == "all" else int(args.parity)
    with Memory(folder) as memory:
        made = export(trained, folder / "export", ExportOptions(tables=args.format, parity=parity, force=True))
    took, size, read = time.perf_counter() - begin, on_disk(made.folder), bytes_read() - read
    shutil.rmtree(made.folder)
    rates.append(write_rate(folder, size))  # of as many bytes: the rate of a disk depends on the size
    return {
        "cut": args.cut,
        "format": args.format,
        "tables_bytes": tables,
        "export_bytes": size,
        "largest_shard_bytes": max(
            4 * s.rows.size * s.cols.size for shards in shards_of(args).values() for s in shards
        ),
        "own_peak_bytes": memory.own,
        "resident_peak_bytes": memory.all,
        "disk_peak_bytes": memory.disk,
        "disk_over_export": memory.disk / size,
        "read_over_tables": read / tables,
        "export_s": took,
        "disk_writes_mb_s": [round(rate / 1e6, 1) for rate in rates],
        "tables_mb_s": tables / took / 1e6,
        "export_mb_s": size / took / 1e6,
        "tables_over_disk": [tables / took / rate for rate in rates],
        "export_over_disk": [size / took / rate for rate in rates],
        "parity_rows": made.parity.rows,
        "logit_max": made.parity.logit_max,
        "auc_difference": abs(made.parity.exported["auc"] - made.parity.trained["auc"]),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--cut", default=",".join(CUTS), help="kinds of cut, which tables take in turns: " + ", ".join(CUTS)
    )
    parser.add_argument("--format", default="int8")
    parser.add_argument("--eval-rows", type=int, default=100_000)
    parser.add_argument("--parity", default="100000", help="rows that the parity check scores, or all")
    parser.add_argument("--folder", help="folder with enough space; default: the temporary folder")
    parser.add_argument("--cgroup", type=Path, help="memory cgroup that the export's process joins")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        save(Path(root), args)
        again = [sys.executable, __file__, *sys.argv[1:], "--measure", root]
        output = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ}).stdout
    results = json.loads(output.splitlines()[-1])
    print(machine())
    for name, value in results.items():
        print(f"{name:24} {f'{value / 2**20:,.0f} MiB' if name.endswith('_bytes') else value}")
    print_json(args, results)


if __name__ == "__main__":
    main()
