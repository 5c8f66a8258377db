"""Times the map of dynamic ids on one core, against the least that a compiled loop can do.

    python jobs/bench/dynamic_ids.py [--ids N] [--rows N] [--json]

1. Ids found per second in a table at 90 % load: a search that changes nothing, and a step of training, of Zipf ids and
   of even ones. Floor: linear probing in an open-addressed array of the same rows, filled in the same order.
2. Ids inserted per second into a full table, each of which evicts another. Floor: the id of the least score of 64
   consecutive rows is overwritten; nothing is admitted, put in order or told.
3. Lookups of the busiest rank over the mean, hottest id aside: of all ids, and of distinct ids of each rank's batch.
4. A training step of DLRM with 26 tables of Zipf ids, at 1 and 20 ids a bag, and of `hstu`, dynamic over hashed: map,
   reset, forward, backward and update, without reading. `--only step` runs this alone.

Times are processor times, of a step those of all threads, and beside them wall times; sides run in turns, and a ratio
is the median of the pairs. On a machine that others use, compare the fastest steps: what others do to its caches and
memory hides what the map takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import arguments, in_turns, machine, medians, paired_ratio, print_json

from rayrec._runtime.numba_loops import compiled
from rayrec.data.arrays.hashing import hash_rows
from rayrec.dynamic_ids import DynamicIds, Evict, IdMap
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import parse_config
from rayrec.train.run.log import Mailbox
from rayrec.train.worker.learner import make_learner
from rayrec.train.worker.lockstep import StepInput
from rayrec.train.worker.session import Job, session_alone

EXPONENT, BATCH = 1.05, 8192
TYPES = dict.fromkeys(("ids", "table", "out"), "int64[::1]") | {"mask": "uint64", "score": "uint32[::1]"}
A, B, S = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(33)


@compiled(TYPES)
def fill(ids: Any, table: Any, mask: Any) -> None:
    for number in range(ids.size):
        slot = np.uint64(ids[number])
        slot = (slot ^ (slot >> S)) * A
        slot = ((slot ^ (slot >> S)) * B) & mask
        while table[slot] != 0 and table[slot] != ids[number]:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = ids[number]


@compiled(TYPES)
def probe(ids: Any, table: Any, mask: Any, out: Any) -> None:
    for number in range(ids.size):
        slot = np.uint64(ids[number])
        slot = (slot ^ (slot >> S)) * A
        slot = ((slot ^ (slot >> S)) * B) & mask
        while table[slot] != ids[number]:
            slot = (slot + np.uint64(1)) & mask
        out[number] = np.int64(slot)


@compiled(TYPES)
def replace_least(ids: Any, table: Any, score: Any, mask: Any, out: Any) -> None:
    for number in range(ids.size):
        base = np.uint64(ids[number])
        base = (base ^ (base >> S)) * A
        base = (((base ^ (base >> S)) * B) >> S) & mask & ~np.uint64(63)
        found = np.uint64(0)
        for slot in range(np.uint64(64)):
            found += slot + np.uint64(1) if table[base + slot] == ids[number] else np.uint64(0)
        if found == 0:
            found = np.uint64(score[base : base + np.uint64(64)].argmin()) + np.uint64(1)
            table[base + found - np.uint64(1)] = ids[number]
        out[number] = np.int64(base + found) - 1
        score[base + found - np.uint64(1)] += np.uint32(1)


def timed(act: Callable[[], object]) -> Callable[[], float]:
    """The processor time of one call."""

    def run() -> float:
        start = time.thread_time()
        act()
        return time.thread_time() - start

    return run


def timed_twice(act: Callable[[], object], walls: list[float]) -> Callable[[], float]:
    """The processor time of one call on all threads; its wall time is appended to `walls`."""

    def run() -> float:
        start, wall = time.process_time(), time.perf_counter()
        act()
        walls.append(time.perf_counter() - wall)
        return time.process_time() - start

    return run


def zipf(pool: np.ndarray, size: int, draw: np.random.Generator) -> np.ndarray:
    weights = np.cumsum(np.arange(1, len(pool) + 1) ** -EXPONENT)
    return pool[np.searchsorted(weights, draw.random(size) * weights[-1])]


def finding(rows: int, size: int, rounds: int) -> dict[str, float]:
    draw = np.random.default_rng(0)
    pool = draw.integers(-(2**63), 2**63 - 1, int(0.9 * rows))
    own = IdMap(DynamicIds(rows=rows))
    own.step(pool, 1)
    pool = pool[draw.permutation(len(pool))]
    known = pool[own.find(pool, -1) >= 0]
    table, mask, out = np.zeros(rows, np.int64), rows - 1, np.empty(size, np.int64)
    fill(known, table, mask)
    results = {"share of ids with a row": len(known) / len(pool)}
    for name, ids in (("Zipf", zipf(known, size, draw)), ("even", known[draw.integers(0, len(known), size)])):
        sides = {
            "floor": timed(lambda ids=ids: probe(ids, table, mask, out)),
            "find": timed(lambda ids=ids: own.find(ids)),
            "step": timed(lambda ids=ids: own.step(ids, own.clock + 1)),
        }
        times = in_turns(sides, rounds, warmup=1)
        for side, value in medians(times).items():
            results[f"{name}, {side}, M ids/s"] = size / value / 1e6
        for side in ("find", "step"):
            results[f"{name}, {side} / floor"] = paired_ratio(times[side], times["floor"])
    return results


def inserting(rows: int, size: int, rounds: int) -> dict[str, float]:
    draw, out = np.random.default_rng(1), np.empty(size, np.int64)
    own, table, score = (
        IdMap(DynamicIds(rows=rows, evict=Evict.LRU)),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.uint32),
    )
    ids, evicted = np.empty(0, np.int64), 0

    def step() -> None:
        nonlocal ids, evicted
        evicted = own.step(ids, own.clock + 1).statistics["evicted"]

    sides = {"floor": timed(lambda: replace_least(ids, table, score, rows - 1, out)), "step": timed(step)}
    times: dict[str, list[float]] = {"floor": [], "step": []}
    for number in range(rounds + 3):
        ids = draw.integers(-(2**63), 2**63 - 1, size)
        pair = in_turns(sides, 1)
        if number >= 3:
            times = {side: times[side] + pair[side] for side in times}
    results = {f"inserted, {side}, M ids/s": size / value / 1e6 for side, value in medians(times).items()}
    results["of them evicting"] = evicted / size
    return results | {"inserted, step / floor": paired_ratio(times["step"], times["floor"])}


def balance(rows: int) -> dict[str, float]:
    draw, results = np.random.default_rng(2), dict[str, float]()
    layout, pool = DynamicIds(rows=rows).layout, np.arange(rows)
    for ranks in (8, 64):
        batches = zipf(pool, ranks * BATCH, draw).reshape(ranks, BATCH)
        distinct = np.concatenate([np.unique(batch) for batch in batches])
        for name, ids in (("all ids", batches.ravel()), ("distinct ids of each rank", distinct)):
            lookups = np.bincount(layout.owner(ids[ids != 0], ranks), minlength=ranks)
            results[f"max / mean of {ranks} ranks, {name}"] = float(lookups.max() / lookups.mean())
    return results


@dataclass(frozen=True)
class Case:
    """Steps of a model whose features `names` all have dynamic ids, or all are hashed."""

    names: list[str]
    model: dict[str, Any]
    kind: str  # of the features
    rows: int
    dim: int
    lengths: torch.Tensor  # of the bags, by feature
    label: torch.Tensor

    def steps(self, mapping: str, device: str = "cpu") -> Callable[[], object]:
        """A step of a run on the next batch of ids."""
        names, rows = self.names, self.rows
        rule = {"kind": mapping} | ({"admit": {"min_count": 1}} if mapping == "dynamic" else {})  # warms up sooner
        config = parse_config({
            "name": "bench",
            "data": {"train": "none"},
            "schema": {"dense": [{"name": "number"}] if len(names) > 1 else [],
                       "sparse": [{"name": name, "kind": self.kind, "mapping": rule} for name in names]},
            "tables": [{"name": name, "rows": rows, "dim": self.dim, "features": [name]} for name in names],
            "model": self.model,
            "trainer": {"num_workers": 0, "threads_per_worker": 1},
        })  # fmt: skip
        job = Job(config=config, train=None, eval=None, folder=Path("none"), checkpoints="none")  # type: ignore[arg-type]
        learner = make_learner(job, replace(session_alone(Mailbox()), device=torch.device(device)))
        draw, count = np.random.default_rng(3), 0
        pools = [draw.integers(0, 2**62, rows) for _ in names]
        sizes = self.lengths.view(len(names), -1).sum(1).tolist()
        ids = [np.concatenate([zipf(*pair, draw) for pair in zip(pools, sizes, strict=True)]) for _ in range(12)]
        given = ids if mapping == "dynamic" else [hash_rows(each, 0, rows).astype(np.int64) for each in ids]
        batch_rows, numbers = len(self.label), len(config.data_schema.dense)
        dense = torch.randn(batch_rows, numbers)

        def step() -> None:
            nonlocal count
            values = torch.from_numpy(given[count % len(given)].copy())
            batch = Batch(dense, KeyedJaggedTensor(names, values, lengths=self.lengths), self.label)
            taken = StepInput(batch, batch_rows, 1.0, 1.0, None, 0.0)
            if learner.dynamic is not None:
                (taken,) = learner.dynamic.trained(iter([taken]), lambda: count)
            learner.step(taken.batch.to(device), 1.0, count)
            count += 1

        return step


def dlrm(ids_per_bag: int, rows: int, batch_rows: int | None = None) -> Case:
    batch_rows, args = (
        batch_rows or 2048 // max(1, ids_per_bag // 4),
        {"dense_arch": [128, 64], "over_arch": [256, 128, 1]},
    )
    lengths, label = torch.full((26 * batch_rows,), ids_per_bag), torch.randint(0, 2, (batch_rows,)).float()
    return Case([f"c{number}" for number in range(26)], {"name": "dlrm", "args": args}, "id_list", rows, 64, lengths,
                label)  # fmt: skip


def hstu(rows: int) -> Case:
    """Histories of 20 to 50 items."""
    model = {"name": "hstu", "args": {"history": "seen", "max_length": 50},
             "loss": {"kind": "sampled_softmax", "negatives": 128}}  # fmt: skip
    lengths = torch.randint(20, 51, (128,), generator=torch.Generator().manual_seed(0))
    return Case(["seen"], model, "id_list", rows, 64, lengths, torch.ones(128))


def stepping(rows: int, rounds: int) -> dict[str, float]:
    results = {}
    cases = {
        "step of 26 tables, 1 id a bag": dlrm(1, rows),
        "step of 26 tables, 20 ids a bag": dlrm(20, rows),
        "step of hstu": hstu(rows),
    }
    for name, case in cases.items():
        walls: dict[str, list[float]] = {"dynamic": [], "hash": []}
        times = in_turns({kind: timed_twice(case.steps(kind), walls[kind]) for kind in walls}, rounds, warmup=12)
        walls = {kind: of_kind[-rounds:] for kind, of_kind in walls.items()}
        results[f"{name}, hashed, ms"] = medians(times)["hash"] * 1e3
        results[f"{name}, dynamic / hashed"] = paired_ratio(times["dynamic"], times["hash"])
        results[f"{name}, dynamic / hashed, wall"] = paired_ratio(walls["dynamic"], walls["hash"])
        results[f"{name}, dynamic / hashed, of the fastest steps, wall"] = min(walls["dynamic"]) / min(walls["hash"])
        results[f"{name}, dynamic / hashed, of the fastest steps"] = min(times["dynamic"]) / min(times["hash"])
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=["map", "step"], help="run only one part")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=1 << 20, help="a power of two")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(machine())
    results = {} if args.only == "map" else stepping(50_000, args.repeats)
    if args.only != "step":
        results |= finding(args.rows, args.ids, args.repeats) | inserting(args.rows, args.ids, args.repeats)
        results |= balance(args.rows)
    for name, value in results.items():
        print(f"{name:62} {value:8.3f}")
    print_json(args, results)


if __name__ == "__main__":
    main()
