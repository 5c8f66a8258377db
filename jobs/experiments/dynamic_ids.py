"""What rows for ids that come and go are worth: ratings of 22 years, and a stream in which ids are born and die.

    python jobs/experiments/dynamic_ids.py RATINGS.csv.gz [--seeds N] [--batch N] [--results FILE]
    python jobs/experiments/dynamic_ids.py --stream IDS [--seeds N] [--results FILE]

Each batch is scored before it is trained on. Prints the normalized entropy (log loss over that of the mean label), its
mean over seeds, and the share of the way from hashing to a table with a row for each id. With `--results`, each run of
a seed is appended to a file, and runs that the file has are not repeated: a second start goes on where the first ended.

1. Ratings, in the order of time: a matrix factorization with biases predicts whether a rating is at least 4. The table
   of users, or of items, has 10 % or 20 % of the rows it would need; the other one is full. With 61 rows, 10 % of the
   users, the layout is coarse: a bucket has 61 rows instead of 64.
2. Stream: IDS ids in all. The traffic of an id falls exponentially with its age, and some ids are popular: a lookup is
   one of 16 ids drawn by age, drawn by a popularity of Pareto's law. A click depends on the id alone, and the model has
   a number for each row. The full table has room for 98 % of the traffic at a time, the others for 10 %
   or 20 % of that, and memory does not grow with the ids.

| side | who has a row |
|---|---|
| hashing | all ids, shared |
| extended daily | ids of `rayrec data vocabulary --extend` each day, until the table is full; others share 10 % of the rows |
| managed | ids by TorchRec's sorted collisions, decided each step; others share a row; rows are reset. `fast` is the LRU form in numpy, but for ties |
| lfu, lfu_aged, lru, lfu_decay | dynamic ids. Ends with `own`, `fallback`, `stale`: first weights of an admitted id are those of its seed, of its fallback row, or not set |
| shared 0 %, 3 %, … | dynamic ids with that share of fallback rows, at least one a bucket; else the default share |
| equal bytes | dynamic ids with fewer rows, so that map and table need the bytes of the hashed table, at 64 floats and row-wise state |
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec._runtime.numba_loops import compiled
from rayrec.dynamic_ids import DynamicIds, Evict, IdMap
from rayrec.dynamic_ids.layout import mix
from rayrec.sparse import JaggedTensor
from rayrec.torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)

DIM, RATE, SPREAD = 8, 0.1, 0.05
DAY = 86_400
SHARED = (0.0, 0.03, 0.05, 0.1, 0.2)  # of the rows are fallback rows
ROW_BYTES = 64 * 4 + 4  # of a table with 64 floats a row and one number of state
BIRTHS, STREAM_BATCH, LIFE = 820, 8192, 100_000  # ids of a batch that are new; lookups; mean age of a lookup in ids


STEP, SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(33)


@compiled({"number": "uint64", "shift": "uint64"})
def mixed(number: Any, shift: Any) -> Any:
    number = (number ^ (number >> shift)) * np.uint64(0xFF51AFD7ED558CCD)
    number = (number ^ (number >> shift)) * np.uint64(0xC4CEB9FE1A85EC53)
    return number ^ (number >> shift)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of a training batch, and rows to reset before it, with their ids, and rows that they start from, if any."""

    rows: np.ndarray
    taken: np.ndarray
    ids: np.ndarray
    source: np.ndarray | None = None


NONE = np.empty(0, np.int64)


class Hashed:
    """All ids share rows."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self._rows, self._seed = rows, rows, np.uint64(mix(np.array([seed + 1]))[0])

    def find(self, ids: np.ndarray) -> np.ndarray:
        return (mix((mix(ids) ^ self._seed).view(np.int64)) % np.uint64(self._rows)).astype(np.int64)

    def step(self, ids: np.ndarray, time: int) -> Step:
        return Step(rows=self.find(ids), taken=NONE, ids=NONE)

    def own(self, rows: np.ndarray) -> int:
        return 0


class Dynamic:
    """Dynamic ids. Each seed has other ids, because their hash, which chooses the bucket, has no seed."""

    def __init__(self, config: DynamicIds, first: str, seed: int) -> None:
        self._map, self._first, self.rows, self._salt = (
            IdMap(config),
            first,
            config.rows,
            int(mix([seed]).view(np.int64)[0]),
        )

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self._map.find(ids ^ self._salt)

    def own(self, rows: np.ndarray) -> int:
        layout = self._map.layout
        return int((rows % layout.bucket_rows < layout.own_rows).sum())

    def step(self, ids: np.ndarray, time: int) -> Step:
        mapped = self._map.step(ids ^ self._salt, time)
        taken = mapped.changes.taken
        rows, new = mapped.changes.row[taken], mapped.changes.new[taken]
        if self._first == "stale":
            return Step(rows=mapped.rows, taken=NONE, ids=NONE)
        source = self._map.layout.fallback_row(new) if self._first == "fallback" else None
        return Step(rows=mapped.rows, taken=rows, ids=new, source=source)


class Extended:
    """A vocabulary to which each day appends the ids of the day, most frequent first, until the rows are full."""

    def __init__(self, rows: int, seed: int, day: int) -> None:
        self.rows, self._shared, self._day, self._now = rows, Hashed(max(1, rows // 10), seed), day, 0
        self._ids, self._places, self._seen = NONE, NONE, list[np.ndarray]()

    def find(self, ids: np.ndarray) -> np.ndarray:
        rows, known = self._shared.find(ids), self._known(ids)
        rows[known >= 0] = self._shared.rows + known[known >= 0]
        return rows

    def own(self, rows: np.ndarray) -> int:
        return int((rows >= self._shared.rows).sum())

    def _known(self, ids: np.ndarray) -> np.ndarray:
        if not len(self._ids):
            return np.full(len(ids), -1)
        at = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._places[at], -1)

    def step(self, ids: np.ndarray, time: int) -> Step:
        if time // self._day > self._now and self._seen:
            self._now = time // self._day
            new, counts = np.unique(np.concatenate(self._seen), return_counts=True)
            counts = counts[self._known(new) < 0]
            new = new[self._known(new) < 0][np.argsort(-counts, kind="stable")]
            new = new[: self.rows - self._shared.rows - len(self._ids)]
            ids_now = np.concatenate([self._ids, new])
            places = np.concatenate([self._places, len(self._ids) + np.arange(len(new))])
            order = np.argsort(ids_now)
            self._ids, self._places, self._seen = ids_now[order], places[order], []
        self._seen.append(ids)
        return Step(rows=self.find(ids), taken=NONE, ids=NONE)


class Managed:
    """TorchRec's sorted managed collisions."""

    def __init__(self, rows: int, policy: MCHEvictionPolicy) -> None:
        self.rows = rows
        self._module = MCHManagedCollisionModule(rows, torch.device("cpu"), policy, eviction_interval=1)

    def _mapped(self, ids: np.ndarray, train: bool) -> np.ndarray:
        features = {"id": JaggedTensor(torch.from_numpy(ids.copy()), lengths=torch.ones(len(ids), dtype=torch.int64))}
        self._module.train(train)
        out: np.ndarray = self._module(features)["id"].values().numpy()
        return out

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self._mapped(ids, False)

    def own(self, rows: np.ndarray) -> int:
        return int((rows < self.rows - 1).sum())

    def step(self, ids: np.ndarray, time: int) -> Step:
        rows, evicted = self._mapped(ids, True), self._module.evict()
        taken = NONE if evicted is None else evicted.numpy()
        taken = taken[taken < self.rows - 1]  # the last row is shared
        return Step(rows=rows, taken=taken, ids=taken)


class Recent:
    """The rule of `Managed` under LRU, fast enough for the stream: ids of a step have rows before any older id."""

    def __init__(self, rows: int) -> None:
        self.rows, self._now = rows, 0
        self._ids, self._places, self._seen = NONE, NONE, NONE

    def find(self, ids: np.ndarray) -> np.ndarray:
        if not len(self._ids):
            return np.full(len(ids), self.rows - 1)
        at = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._places[at], self.rows - 1)

    def own(self, rows: np.ndarray) -> int:
        return int((rows < self.rows - 1).sum())

    def step(self, ids: np.ndarray, time: int) -> Step:
        self._now, new = self._now + 1, np.unique(ids)
        at = np.searchsorted(self._ids, new)
        known = at < len(self._ids)
        known[known] = self._ids[at[known]] == new[known]
        self._seen[at[known]] = self._now
        new = new[~known][: self.rows - 1]
        free = self.rows - 1 - len(self._ids)
        if len(new) > free:
            oldest = np.argpartition(self._seen, len(new) - free - 1)[: len(new) - free]
            stays = np.ones(len(self._ids), bool)
            stays[oldest] = False
            places = np.concatenate([np.arange(len(self._ids), self.rows - 1), self._places[oldest]])
            self._ids, self._places, self._seen = self._ids[stays], self._places[stays], self._seen[stays]
        else:
            places = len(self._ids) + np.arange(len(new))
        at = np.searchsorted(self._ids, new)
        self._ids, self._places = np.insert(self._ids, at, new), np.insert(self._places, at, places)
        self._seen = np.insert(self._seen, at, self._now)
        return Step(rows=self.find(ids), taken=places, ids=new)


Rule = Hashed | Dynamic | Extended | Managed | Recent
Result = tuple[float, float]
"""The normalized entropy, and the share of evaluated lookups that had a row of their own."""


def sides(rows: int, day: int, half_lives: dict[str, int]) -> dict[str, Callable[[int], Rule]]:
    """Name → the rule of a seed."""
    rules = {"lfu": DynamicIds(rows=rows), "lru": DynamicIds(rows=rows, evict=Evict.LRU)}
    rules["lfu_aged"] = DynamicIds(rows=rows, evict=Evict.LFU_AGED)
    rules |= {
        f"lfu_decay of {name}": DynamicIds(rows=rows, evict=Evict.LFU_DECAY, half_life_s=half_life)
        for name, half_life in half_lives.items()
    }
    equal = int(rows * ROW_BYTES / (ROW_BYTES + 20))
    made: dict[str, Callable[[int], Rule]] = {
        "hashing": lambda seed: Hashed(rows, seed),
        "extended daily": lambda seed: Extended(rows, seed, day),
        "managed, lfu": lambda seed: Managed(rows, LFU_EvictionPolicy()),
        "managed, lru": lambda seed: Managed(rows, LRU_EvictionPolicy()),
        "managed, lru, fast": lambda seed: Recent(rows),
    }
    for (name, rule), first in product(rules.items(), ("own", "fallback", "stale")):
        made[f"{name}, {first}"] = lambda seed, rule=rule, first=first: Dynamic(rule, first, seed)  # type: ignore[misc]
    for (name, rule), count in product(rules.items(), (1, 2)):
        counted = f"{name}, own" + (f", min_count {count}" if count > 1 else "")
        few = replace(rule, min_count=count)
        if count > 1:
            made[counted] = lambda seed, few=few: Dynamic(few, "own", seed)  # type: ignore[misc]
        for share in SHARED:
            side = replace(few, fallback=share)
            made[f"{counted}, shared {share:.0%}"] = lambda seed, side=side: Dynamic(side, "own", seed)  # type: ignore[misc]
        fewer = replace(few, rows=equal)
        made[f"{counted}, equal bytes"] = lambda seed, fewer=fewer: Dynamic(fewer, "own", seed)  # type: ignore[misc]
    return made


class Table:
    """Vectors and biases of users or items, trained by Adagrad."""

    def __init__(self, rows: int, draw: np.random.Generator, dim: int = DIM) -> None:
        self.pool = draw.normal(0, SPREAD, (8192, dim + 1)).astype(np.float32)
        self.pool[:, dim] = 0
        self.weights, self.state = self.pool[np.arange(rows) % 8192].copy(), np.zeros((rows, dim + 1), np.float32)

    def reset(self, step: Step) -> None:
        """The rows of a step that ids took."""
        if len(step.taken):
            first = self.pool[step.ids % 8192] if step.source is None else self.weights[step.source]
            self.weights[step.taken], self.state[step.taken] = first, 0

    def train(self, rows: np.ndarray, gradient: np.ndarray) -> None:
        keys, inverse = np.unique(rows, return_inverse=True)
        total = np.stack([np.bincount(inverse, column, len(keys)) for column in gradient.T], 1).astype(np.float32)
        self.state[keys] += total**2
        self.weights[keys] -= RATE * total / (np.sqrt(self.state[keys]) + 1e-6)


def entropy(mean: float) -> float:
    return float(-mean * np.log(mean) - (1 - mean) * np.log(1 - mean))


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order of time; ids from 0."""

    small: np.ndarray
    full: np.ndarray
    label: np.ndarray
    times: np.ndarray
    batch: int

    def runs(self, rules: Sequence[Rule], seed: int) -> list[Result]:
        return [self._run(rule, seed) for rule in rules]

    def _run(self, rule: Rule, seed: int) -> Result:
        draw = np.random.default_rng(seed)
        table, other = Table(rule.rows, draw), Table(int(self.full.max()) + 1, draw)
        bias, loss, own = 0.0, 0.0, 0
        for at in range(0, len(self.label), self.batch):
            part = slice(at, at + self.batch)
            ids, column, y = self.small[part], self.full[part], self.label[part]
            rows = rule.find(ids)
            own += rule.own(rows)
            v = other.weights[column]

            def logit(u: np.ndarray, v: np.ndarray = v, bias: float = bias) -> np.ndarray:
                return bias + (u[:, :DIM] * v[:, :DIM]).sum(1) + u[:, DIM] + v[:, DIM]

            score = logit(table.weights[rows])
            loss += float(np.logaddexp(0, np.where(y, -score, score)).sum())
            step = rule.step(ids, int(self.times[part][-1]))
            table.reset(step)
            u = table.weights[step.rows]
            error = (1 / (1 + np.exp(-logit(u))) - y).astype(np.float32)[:, None]
            ones = np.ones_like(error)
            table.train(step.rows, error * np.concatenate([v[:, :DIM], ones], 1))
            other.train(column, error * np.concatenate([u[:, :DIM], ones], 1))
            bias -= 0.1 * float(error.mean())
        return loss / len(self.label) / entropy(self.label.mean()), own / len(self.label)


@compiled({"state": "uint64", "born": "int64", "id_N": "int64[::1]"})
def draw_lookups(state: Any, born: Any, id_N: Any) -> None:
    """Each lookup is one of 16 ids drawn by age, drawn by popularity."""
    for n in range(id_N.size):
        total = 0.0
        for _ in range(16):
            state += STEP
            age = -LIFE * math.log((mixed(state, SHIFT) >> np.uint64(11)) * 2.0**-53 + 1e-18)
            key = born - np.int64(age) - np.int64(1)
            weight = 1 / ((mixed(np.uint64(key + 2**41), SHIFT) >> np.uint64(11)) * 2.0**-53 + 1e-9)
            total += weight
            state += STEP
            if (mixed(state, SHIFT) >> np.uint64(11)) * 2.0**-53 * total < weight:
                id_N[n] = key


@compiled({"row_N": "int64[::1]", "gradient_N": "float64[::1]", "weight_R": "float32[::1]", "state_R": "float32[::1]",
           "total_R": "float64[::1]"})  # fmt: skip
def train_numbers(row_N: Any, gradient_N: Any, weight_R: Any, state_R: Any, total_R: Any) -> None:
    """A step of Adagrad of a table with one number a row. `total_R` is zero before and after."""
    for n in range(row_N.size):
        total_R[row_N[n]] += gradient_N[n]
    for n in range(row_N.size):
        row = row_N[n]
        total = total_R[row]
        if total != 0:
            state_R[row] += total * total
            weight_R[row] -= RATE * total / (math.sqrt(state_R[row]) + 1e-6)
            total_R[row] = 0


@dataclass(frozen=True)
class Stream:
    """Ids that are born and die; id n is the n-th that was born."""

    count: int

    def batches(self, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        draw = np.random.default_rng(1000 + seed)
        for born in range(LIFE, LIFE + self.count, BIRTHS):  # as if it had always been going on
            ids = np.empty(STREAM_BATCH, np.int64)
            draw_lookups(draw.integers(0, 2**64, dtype=np.uint64), born, ids)
            taste = (
                2
                * np.sqrt(-2 * np.log((mix(ids) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 1e-18))
                * np.cos((mix(ids + 2**40) >> np.uint64(11)).astype(np.float64) * 2.0**-52 * np.pi)
            )
            yield ids, draw.random(len(ids)) < 1 / (1 + np.exp(-taste))

    def runs(self, rules: Sequence[Rule], seed: int) -> list[Result]:
        """All rules read the stream together, because to draw it takes longer than to train a table of numbers."""
        sides = [OfStream(rule, seed) for rule in rules]
        lookups, positive = 0, 0
        for number, (ids, y) in enumerate(self.batches(seed)):
            counted = number * BIRTHS >= LIFE  # once the tables are in use
            if counted:
                lookups, positive = lookups + len(ids), positive + int(y.sum())
            for side in sides:
                side.take(ids, y, number, counted)
        of_mean = entropy(positive / lookups)
        return [(side.loss / lookups / of_mean, side.own / lookups) for side in sides]


class OfStream:
    """A rule and its table of one number a row."""

    def __init__(self, rule: Rule, seed: int) -> None:
        self.rule, table = rule, Table(rule.rows, np.random.default_rng(seed), dim=0)
        self.table, self.total = table, np.zeros(rule.rows)
        self.weights, self.state = table.weights[:, 0], table.state[:, 0]
        self.loss, self.own = 0.0, 0

    def take(self, ids: np.ndarray, y: np.ndarray, number: int, counted: bool) -> None:
        """Scores a batch, and trains on it."""
        if counted:
            rows = self.rule.find(ids)
            score = self.weights[rows]
            self.loss += float(np.logaddexp(0, np.where(y, -score, score)).sum())
            self.own += self.rule.own(rows)
        step = self.rule.step(ids, number + 1)
        self.table.reset(step)
        error = 1 / (1 + np.exp(-self.weights[step.rows])) - y
        # Several lookups of an id in a batch count as one larger step, so the rate is higher than for vectors.
        train_numbers(step.rows, 8 * error.astype(np.float64), self.weights, self.state, self.total)


class Results:
    """Results of single runs, kept in a file if there is one: a line of (table, side, seed, entropy, share)."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._known = path, dict[tuple[str, str, int], Result]()
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                table, side, seed, normalized, share = json.loads(line)
                self._known[table, side, seed] = normalized, share

    def of(self, table: str, sides: Sequence[str], seed: int, run: Callable[[list[str]], list[Result]]) -> list[Result]:
        """The results of sides; `run` gives those that are missing."""
        missing = [side for side in sides if (table, side, seed) not in self._known]
        if missing:
            for side, result in zip(missing, run(missing), strict=True):
                self._known[table, side, seed] = result
                if self._path is not None:
                    with self._path.open("a") as file:
                        print(json.dumps([table, side, seed, *map(float, result)]), file=file)
        return [self._known[table, side, seed] for side in sides]


def compared(name: str, data: Ratings | Stream, full: DynamicIds, rows: int, day: int, half_lives: dict[str, int],
             results: Results, args: argparse.Namespace) -> None:  # fmt: skip
    """Runs the sides of a table of some rows, one seed after the other, and prints them."""
    # A dynamic table with room for all: each id has its own row.
    made = {f"full, {first}": lambda seed, first=first: Dynamic(full, first, seed) for first in ("own", "fallback")}
    made |= sides(rows, day, half_lives)  # type: ignore[arg-type]
    base = ("full, own", "hashing")
    chosen = [
        side
        for side in made
        if side in base or (any(text in side for text in args.side) and not any(text in side for text in args.skip))
    ]
    found: dict[str, list[Result]] = {side: [] for side in chosen}
    for seed in range(args.seeds):
        of_seed = results.of(name, chosen, seed, lambda sides: data.runs([made[side](seed) for side in sides], seed))  # noqa: B023
        for side, result in zip(chosen, of_seed, strict=True):
            found[side].append(result)
    best, worst = (np.array(found[side])[:, 0] for side in base)
    for side in chosen:
        entropies, shares = np.array(found[side]).T
        closed = (worst - entropies) / (worst - best).mean()
        print(f"{name} {side:44} {entropies.mean():.4f} ± {entropies.std():.4f}  lookups with a row"
              f" {shares.mean():4.0%}  closes {closed.mean():5.0%} ± {closed.std():4.0%}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", nargs="?")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--stream", type=int, metavar="IDS", help="the stream with that many ids, e.g. 10_000_000")
    parser.add_argument("--side", action="append", metavar="TEXT", help="run only sides with this text in their name")
    parser.add_argument("--skip", action="append", default=[], metavar="TEXT", help="skip sides with this text")
    parser.add_argument("--table", choices=["users", "items"], help="run only this table of the ratings")
    parser.add_argument("--share", type=float, action="append", help="rows of the table; default: 0.1 and 0.2")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the results of single runs in this file")
    args = parser.parse_args()
    args.side = args.side or [""]
    results = Results(args.results)
    shares = args.share or [0.1, 0.2]
    if args.stream:
        need = 4 * LIFE  # ids with 98 % of the traffic at a time
        half_lives = {"half a life": LIFE // BIRTHS // 2}
        for share in shares:
            full = DynamicIds(rows=2 * need, evict=Evict.LRU)
            name = f"stream of {args.stream} {share:.0%}"
            compared(name, Stream(args.stream), full, int(share * need), 12, half_lives, results, args)
        return
    if args.ratings is None:
        parser.error("give the file of ratings, or --stream IDS")
    with gzip.open(args.ratings, "rt") as file:
        lines = sorted(
            (int(r["timestamp"]), int(r["userId"]), int(r["movieId"]), float(r["rating"])) for r in csv.DictReader(file)
        )
    times, label = np.array([line[0] for line in lines]), np.array([line[3] >= 4 for line in lines])
    ids = {"users": 1, "items": 2}
    columns = {
        name: np.unique([line[number] for line in lines], return_inverse=True)[1] for name, number in ids.items()
    }
    for name, other in (("users", "items"), ("items", "users")):
        if args.table not in (None, name):
            continue
        data = Ratings(columns[name], columns[other], label, times, args.batch)
        count = int(columns[name].max()) + 1
        for share in shares:
            half_lives = {"30 days": 30 * DAY, "a year": 365 * DAY}
            full = DynamicIds(rows=8 * count)
            compared(
                f"{name} {share:.0%}, batch {args.batch}",
                data,
                full,
                int(share * count),
                DAY,
                half_lives,
                results,
                args,
            )


if __name__ == "__main__":
    main()
