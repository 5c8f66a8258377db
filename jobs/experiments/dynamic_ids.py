"""What rows for ids that come and go are worth, on MovieLens ratings of 22 years in the order of time.

    python jobs/experiments/dynamic_ids.py RATINGS.csv.gz [--seeds N] [--batch N]

A matrix factorization with biases predicts whether a rating is at least 4, each batch before it is trained on it. The
table of users, or of items, has 10 % or 20 % of the rows it would need; the other one is full. Prints the normalized
entropy (log loss over that of the mean label), its mean over seeds, and the share of the way from hashing to the full
table; below 100 rows per bucket of 64 the layout is coarse, as with the 61 rows of 10 % of the users.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from rayrec.dynamic_ids import DynamicIds, Evict, IdMap

DIM, RATE, SPREAD = 8, 0.1, 0.05
DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Side:
    """How ids of the small table get rows.

    Args:
        config: None for hashing.
        first: First weights of an admitted id: "own", those of its seed; "fallback", those of its fallback row;
            "stale", no reset at all.
    """

    name: str
    config: DynamicIds | None = None
    first: str = "own"


def sides(rows: int) -> list[Side]:
    year = 365 * DAY
    rules = {
        "lfu": DynamicIds(rows=rows),
        "lru": DynamicIds(rows=rows, evict=Evict.LRU),
        "lfu_decay of 30 days": DynamicIds(rows=rows, evict=Evict.LFU_DECAY, half_life_s=30 * DAY),
        "lfu_decay of a year": DynamicIds(rows=rows, evict=Evict.LFU_DECAY, half_life_s=year),
    }
    made = [Side(name=f"{name}, {first}", config=rule, first=first)
            for (name, rule), first in product(rules.items(), ("own", "fallback", "stale"))]  # fmt: skip
    few = replace(rules["lfu"], min_count=2)
    return [Side(name="hashing"), *made, Side(name="lfu, own, min_count 2", config=few)]


class Table:
    """Vectors and biases of users or items, trained by Adagrad."""

    def __init__(self, rows: int, draw: np.random.Generator) -> None:
        self.pool = draw.normal(0, SPREAD, (8192, DIM + 1)).astype(np.float32)
        self.pool[:, DIM] = 0
        self.weights, self.state = self.pool[np.arange(rows) % 8192].copy(), np.zeros((rows, DIM + 1), np.float32)

    def reset(self, rows: np.ndarray, ids: np.ndarray, source: np.ndarray | None) -> None:
        self.weights[rows] = self.pool[ids % 8192] if source is None else self.weights[source]
        self.state[rows] = 0

    def train(self, rows: np.ndarray, gradient: np.ndarray) -> None:
        keys, inverse = np.unique(rows, return_inverse=True)
        total = np.zeros((len(keys), DIM + 1), np.float32)
        np.add.at(total, inverse, gradient)
        self.state[keys] += total**2
        self.weights[keys] -= RATE * total / (np.sqrt(self.state[keys]) + 1e-6)


def normalized_entropy(
    small: np.ndarray,
    full: np.ndarray,
    label: np.ndarray,
    times: np.ndarray,
    rows: int,
    side: Side,
    seed: int,
    batch: int,
) -> tuple[float, float]:
    """Also the share of evaluated lookups that had a row of their own."""
    draw = np.random.default_rng(seed)
    table, other = Table(rows, draw), Table(int(full.max()) + 1, draw)
    own = IdMap(side.config) if side.config else None
    bias, loss, with_row = 0.0, 0.0, 0
    hashed = draw.permutation(int(small.max()) + 1)[small] % rows  # as evenly as a hash can
    for at in range(0, len(label), batch):
        part = slice(at, at + batch)
        row, column = own.find(small[part]) if own else hashed[part], full[part]
        if own:
            with_row += int((own.find(small[part], -1) >= 0).sum())
        u, v, y = table.weights[row], other.weights[column], label[part]
        logit = bias + (u[:, :DIM] * v[:, :DIM]).sum(1) + u[:, DIM] + v[:, DIM]
        loss += float(np.logaddexp(0, np.where(y, -logit, logit)).sum())
        if own:
            mapped = own.step(small[part], int(times[part][-1]))
            taken = mapped.changes.taken
            if side.first != "stale":
                new = mapped.changes.new[taken]
                source = own.layout.fallback_row(new) if side.first == "fallback" else None
                table.reset(mapped.changes.row[taken], new, source)
            row = mapped.rows
            u = table.weights[row]
            logit = bias + (u[:, :DIM] * v[:, :DIM]).sum(1) + u[:, DIM] + v[:, DIM]
        error = (1 / (1 + np.exp(-logit)) - y).astype(np.float32)[:, None]
        ones = np.ones_like(error)
        table.train(row, error * np.concatenate([v[:, :DIM], ones], 1))
        other.train(column, error * np.concatenate([u[:, :DIM], ones], 1))
        bias -= 0.1 * float(error.mean())
    mean = label.mean()
    entropy = -mean * np.log(mean) - (1 - mean) * np.log(1 - mean)
    return loss / len(label) / entropy, with_row / len(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    with gzip.open(args.ratings, "rt") as file:
        lines = sorted(
            (int(r["timestamp"]), int(r["userId"]), int(r["movieId"]), float(r["rating"])) for r in csv.DictReader(file)
        )
    times = np.array([line[0] for line in lines])
    ids = {"users": 1, "items": 2}
    columns = {
        name: np.unique([line[number] for line in lines], return_inverse=True)[1] for name, number in ids.items()
    }
    label = np.array([line[3] >= 4 for line in lines])
    for name, other in (("users", "items"), ("items", "users")):
        small, full = columns[name], columns[other]
        count = int(small.max()) + 1

        def run(rows: int, side: Side, small: np.ndarray = small, full: np.ndarray = full) -> tuple[np.ndarray, float]:
            each = [
                normalized_entropy(small, full, label, times, rows, side, seed, args.batch)
                for seed in range(args.seeds)
            ]
            return np.array([value for value, _ in each]), each[0][1]

        # A dynamic table with room for all: each id has its own row. Its first weights matter, too.
        room = DynamicIds(rows=8 * count)
        full_tables = [run(room.rows, Side(name="full", config=room, first=first))[0] for first in ("own", "fallback")]
        best = full_tables[0]
        for first, found in zip(("own", "fallback"), full_tables, strict=True):
            print(f"{name} full table, {first:29} {found.mean():.4f} ± {found.std():.4f}", flush=True)
        for share in (0.1, 0.2):
            worst = np.empty(0)
            for side in sides(int(share * count)):
                found, with_row = run(int(share * count), side)
                worst = found if side.config is None else worst
                closed = (worst - found).mean() / (worst - best).mean()
                print(f"{name} {share:.0%} {side.name:34} {found.mean():.4f} ± {found.std():.4f}  closes {closed:5.0%}"
                      f"  lookups with a row {with_row:.0%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
