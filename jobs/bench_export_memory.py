"""What an export of a sharded checkpoint takes: the peak of its process's memory above where it began, the peak of its
files on the disk, how often it reads a table, and its rate beside that of copying the tables.

python jobs/bench_export_memory.py --tables 1 --rows 34000000 --cut row_wise --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from rayrec.checkpoint import CheckpointStore
from rayrec.checkpoint.weights import CheckpointWeights
from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, ShardingPlan, comm
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import by_cols, by_rows, whole
from rayrec.distributed.plan.shards import ParameterSharding, Shard
from rayrec.inference import Trained, Wanted, export
from rayrec.inference.graph import Inputs
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor

CUTS = ("table_wise", "row_wise", "column_wise")
ALLOWED = 512 << 20  # beyond the largest shard


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
    """Each table's, by the kinds of cut in turns."""
    cuts, ranks, made = args.cut.split(","), list(range(args.ranks)), {}
    for i in range(args.tables):
        kind, name = cuts[i % len(cuts)], f"t{i}"
        if kind == "table_wise":
            made[name] = whole(name, args.rows, args.dim, [i % args.ranks])
        else:
            made[name] = (by_rows if kind == "row_wise" else by_cols)(name, args.rows, args.dim, ranks)
    return made


def save(rank: int, root: str, args: argparse.Namespace) -> None:
    """On every rank: the sharded model's checkpoint, its tables drawn at random."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=args.ranks)
    cuts = args.cut.split(",")
    plan = {
        name: ParameterSharding(sharding_type=cuts[i % len(cuts)], compute_kernel="fused", shards=shards)
        for i, (name, shards) in enumerate(shards_of(args).items())
    }
    model = DistributedModelParallel(
        model_of(args),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embedding_bags": plan}),
        sharders=[
            EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
        ],
    )
    CheckpointStore(f"{root}/checkpoints").save(1, model, group=dist.group.WORLD)
    del model
    comm.leave()


class Memory:
    """Watches what this process holds for itself, what of files it has mapped, which the system may take back, and what
    files below a folder take of the disk."""

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
    """Bytes of all files below a folder."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            size += 512 * path.stat().st_blocks if path.is_file() else 0
    return size


class Counted:
    """A checkpoint's tables, and how many bytes of them are read."""

    def __init__(self, weights: CheckpointWeights) -> None:
        self._weights, self.read = weights, 0

    def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
        rows = self._weights.read_rows(table, start, stop)
        self.read += 4 * rows.numel()
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)


def copied_s(source: Path, target: Path) -> float:
    """Seconds to write the same bytes to the disk."""
    begin = time.perf_counter()
    with open(source, "rb") as file, open(target, "wb") as out:
        while chunk := file.read(16 << 20):
            out.write(chunk)
        os.fsync(out.fileno())
    target.unlink()
    return time.perf_counter() - begin


def _resident() -> tuple[int, int]:
    """Bytes: anonymous, and of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, mapped = (int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return anonymous, mapped


def measure(root: str, args: argparse.Namespace) -> dict[str, Any]:
    """Exports the checkpoint in this process."""
    torch.set_num_threads(1)
    if args.cgroup is not None:
        (args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    keys = tuple(f"f{i}" for i in range(args.tables))

    def batches() -> list[Batch]:
        made = []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(args.rows, (len(keys) * 256,), generator=generator)
            sparse = KeyedJaggedTensor(list(keys), ids, lengths=torch.ones(len(ids), dtype=torch.int64))
            label = torch.randint(2, (256,), generator=generator).float()
            made.append(Batch(torch.randn(256, 2, generator=generator), sparse, label))
        return made

    checkpoint = CheckpointStore(f"{root}/checkpoints").latest()
    assert checkpoint is not None
    weights, folder = Counted(CheckpointWeights(checkpoint.path)), Path(root) / "exported"
    trained = Trained(
        make_model=lambda: model_of(args),
        weights=weights,  # type: ignore[arg-type]
        inputs=Inputs(keys, 2, None, False),
        mapping={"schema": {}, "tables": []},
        rows_of=dict.fromkeys(keys, args.rows),
        batches=batches,
    )
    begin = time.perf_counter()
    with Memory(folder) as memory:
        made = export(trained, folder / "export", Wanted(tables=args.format, force=True))
    took, size = time.perf_counter() - begin, on_disk(made.folder)
    copy_s = copied_s(made.folder / "tables.bin", folder / "copy")
    largest = max(4 * s.rows.size * s.cols.size for shards in shards_of(args).values() for s in shards)
    return {
        "cut": args.cut,
        "numbers": args.tables * args.rows * args.dim,
        "largest_shard_bytes": largest,
        "own_bytes": memory.own,
        "resident_bytes": memory.all,
        "allowed_bytes": largest + ALLOWED,
        "disk_bytes": memory.disk,
        "disk_over_export": memory.disk / size,
        "reads_of_a_table": weights.read / (4 * args.tables * args.rows * args.dim),
        "export_s": took,
        "copy_s": copy_s,
        "logit_max": made.parity.logit_max,
        "auc_difference": abs(made.parity.exported["auc"] - made.parity.trained["auc"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tables", type=int, default=6)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cut", default=",".join(CUTS), help="of the tables in turns: " + ", ".join(CUTS))
    parser.add_argument("--format", default="int8")
    parser.add_argument("--folder", help="where there is room; default: the temporary folder")
    parser.add_argument(
        "--cgroup", type=Path, help="a memory cgroup for the export's process to join: its limit is kept"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        multiprocessing.spawn(save, (root, args), args.ranks)  # type: ignore[no-untyped-call]
        again = [sys.executable, __file__, *sys.argv[1:], "--measure", root]
        told = subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ}).stdout
    figures = json.loads(told.splitlines()[-1])
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {f'{value / 2**20:,.0f} MiB' if name.endswith('_bytes') else value}")


if __name__ == "__main__":
    main()
