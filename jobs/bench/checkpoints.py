"""Measures checkpoints on two gloo ranks: save and load against the disk's raw rate, steps and memory during a save.

    python jobs/bench/checkpoints.py --gb 2 --json

Both sides of a ratio take turns. Raw: each rank writes (and syncs) or reads a file as large as its state, in blocks of
4 MB. Files leave the page cache before they are read.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import arguments, machine, print_json

from rayrec.checkpoint import CheckpointStore, Saving
from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, ShardingPlan, comm
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.plan.shards import ParameterSharding, ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage.folder import LocalFolder

RANKS, TABLES, DIM, BATCH, BAG = 2, 4, 128, 2048, 10
BLOCK = 4 << 20
GOALS = {
    "save_ratio_to_disk": "goal ≥ 0.7",
    "load_ratio_to_disk": "goal ≥ 0.7",
    "step_ratio_during_save": "goal ≤ 1.1",
    "save_peak_over_state_bytes": "goal ≤ 256 MB",
}
TURN = 20  # steps, in which the writer writes several blocks


def measure(args: argparse.Namespace) -> dict[str, float]:
    """All results, from two new processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="rayrec-checkpoints-", dir=args.folder) as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, args.gb, args.rounds, answers)) for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        results: dict[str, float] = answers.get()
    return results


def _rank(rank: int, folder: str, gb: float, rounds: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    assert group is not None
    model = _model(group, int(gb * 1e9))
    disk = _disk(model, group, Path(folder), rounds)
    beside = _beside(model, group, Path(folder), rounds)
    if rank == 0:
        answers.put({**disk, **beside})
    comm.leave()


def _model(group: dist.ProcessGroup, nbytes: int) -> DistributedModelParallel:
    rows = nbytes // (4 * DIM * TABLES)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{i}"])
        for i in range(TABLES)
    ]
    row_wise = ShardingType.ROW_WISE
    cuts = {
        t.name: ParameterSharding(
            sharding_type=row_wise.value, compute_kernel="fused", shards=CUTS[row_wise](t.name, rows, DIM, range(RANKS))
        )
        for t in tables
    }
    return DistributedModelParallel(
        EmbeddingBagCollection(device=torch.device("meta"), tables=tables),
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": cuts}),
        sharders=[
            EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
        ],
    )


def _disk(model: DistributedModelParallel, group: dist.ProcessGroup, folder: Path, rounds: int) -> dict[str, float]:
    """Save and load against raw files of the same bytes, in turns."""
    seconds: dict[str, list[float]] = {"raw_write": [], "save": [], "raw_read": [], "load": []}
    data = torch.cat([item.weight.view(-1) for table in model.tables().values() for item in table.local])
    view, raw = data.view(torch.uint8).numpy().data, folder / f"raw-{group.rank()}"
    store = CheckpointStore(folder / "checkpoints")
    for step in range(rounds):
        seconds["raw_write"].append(_together(group, lambda: _write(raw, view)))
        seconds["save"].append(_together(group, partial(store.save, step, model, group=group)))
        checkpoint = store.latest()
        assert checkpoint is not None
        for path in (raw, *Path(checkpoint.path).iterdir()):
            _drop(path)
        seconds["raw_read"].append(_together(group, lambda: _read(raw)))
        seconds["load"].append(_together(group, partial(store.load, checkpoint, model, group=group)))
        raw.unlink()
        dist.barrier(group)
        if group.rank() == 0:
            shutil.rmtree(checkpoint.path)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    gigabytes = RANKS * len(view) / 1e9
    return {
        "save_ratio_to_disk": median["raw_write"] / median["save"],
        "load_ratio_to_disk": median["raw_read"] / median["load"],
        "save_gb_per_s": gigabytes / median["save"],
        "load_gb_per_s": gigabytes / median["load"],
    }


def _beside(model: DistributedModelParallel, group: dist.ProcessGroup, folder: Path, rounds: int) -> dict[str, float]:
    """Steps while a save writes against steps while it is paused, in turns; memory beyond the copy of the state."""
    disk = _SwitchedFolder(folder / "beside")
    store = CheckpointStore(disk, keep=1)
    ratios, means, steps, stalls, peaks = [], [], [], [], []
    batch = _batch(model)
    for _ in range(3):
        _step(model, batch)
    for number in range(rounds):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        resident_before = _resident()
        with _Peak() as peak:
            start = time.perf_counter()
            store.save_in_background(number, model, None, Saving(), group)
            stalls.append(time.perf_counter() - start)
            for step in itertools.count():
                writing = step // TURN % 2 == 0
                disk.switch(writing)
                seconds[writing].append(_timed(model, batch, group))
                if _everywhere(group, bool(store.ended())):
                    break
            disk.switch(True)
            store.finish(group)
        ratios.append(statistics.median(seconds[True]) / statistics.median(seconds[False]))
        means.append(statistics.mean(seconds[True]) / statistics.mean(seconds[False]))
        steps.append(len(seconds[True]))
        copied = sum(item.weight.nbytes for table in model.tables().values() for item in table.local)
        peaks.append(peak.highest - resident_before - copied)
    return {
        "step_ratio_during_save": statistics.median(ratios),
        "mean_step_ratio_during_save": statistics.median(means),
        "save_stall_s": statistics.median(stalls),
        "save_beside_steps": statistics.mean(steps),
        "save_peak_over_state_bytes": float(max(0, *peaks)),
    }


class _SwitchedFolder(LocalFolder):
    """A folder whose writes block while it is switched off."""

    def __init__(self, path: Path, on: threading.Event | None = None) -> None:
        super().__init__(path)
        if on is None:
            on = threading.Event()
            on.set()
        self._on = on

    def switch(self, on: bool) -> None:
        self._on.set() if on else self._on.clear()

    def sub(self, name: str) -> LocalFolder:
        return _SwitchedFolder(self._path / name, self._on)

    @contextmanager
    def create(self, name: str) -> Iterator[Any]:
        with super().create(name) as file:
            yield _SwitchedSink(file, self._on)


class _SwitchedSink:
    def __init__(self, file: Any, on: threading.Event) -> None:
        self._file, self._on = file, on

    def write(self, data: Any) -> None:
        self._on.wait()
        self._file.write(data)


def _batch(model: DistributedModelParallel) -> KeyedJaggedTensor:
    rows = min(table.config.num_embeddings for table in model.tables().values())
    values = torch.randint(0, rows, (TABLES * BATCH * BAG,))
    lengths = torch.full((TABLES * BATCH,), BAG)
    return KeyedJaggedTensor(keys=[f"f{i}" for i in range(TABLES)], values=values, lengths=lengths)


def _step(model: DistributedModelParallel, batch: KeyedJaggedTensor) -> None:
    out = model(batch)
    out = out.wait() if hasattr(out, "wait") else out
    out.values().square().mean().backward()


def _timed(model: DistributedModelParallel, batch: KeyedJaggedTensor, group: dist.ProcessGroup) -> float:
    dist.barrier(group)
    start = time.perf_counter()
    _step(model, batch)
    return time.perf_counter() - start


def _together(group: dist.ProcessGroup, act: Any) -> float:
    """Seconds until all ranks are done."""
    dist.barrier(group)
    start = time.perf_counter()
    act()
    dist.barrier(group)
    return time.perf_counter() - start


def _everywhere(group: dist.ProcessGroup, mine: bool) -> bool:
    """The value of rank 0."""
    value = torch.tensor([float(mine)])
    dist.broadcast(value, 0, group)
    return bool(value)


def _write(path: Path, view: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(view), BLOCK):
            file.write(view[start : start + BLOCK])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    block = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def _drop(path: Path) -> None:
    """Drops a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Peak:
    """The peak of this process's resident memory within the context."""

    def __enter__(self) -> _Peak:
        self.highest, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.highest = max(self.highest, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state over both ranks")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side of a ratio")
    parser.add_argument("--folder", help="folder for the files; default: a temporary folder")
    args = parser.parse_args()
    print(machine(), flush=True)
    results = measure(args)
    for name, value in results.items():
        print(f"{name:28} {value:>16,.3f}  {GOALS.get(name, '')}")
    print_json(args, results)


if __name__ == "__main__":
    main()
