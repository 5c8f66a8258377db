"""How well two towers find items that training never saw: by their features, and by their ids alone.

    python jobs/experiments/cold_start.py [--seeds N] [--rows N]

Generates 2,000 items with three of 50 tags each, and 1,500 users who like four tags. Training rows are of the first
1,500 items; the test has the pairs of the other 500, which are ranked among all 2,000. Prints recall@100 of both models
for the new items, and for the earlier ones; a random order has 0.05. One process, no Ray.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from rayrec.train import Display, Trainer, evaluate_run, parse_config

ITEMS, KNOWN, USERS, TAGS, DIM = 2000, 1500, 1500, 50, 32


def write_data(folder: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    tags = np.argsort(draw.random((ITEMS, TAGS)), axis=1)[:, :3]
    likes = np.argsort(draw.random((USERS, TAGS)), axis=1)[:, :4]
    matches = (tags[None, :, :, None] == likes[:, None, None, :]).any(axis=3).sum(axis=2)  # [users, items]
    weights = np.exp(3.0 * matches)
    for part, items, count in (
        ("train", range(KNOWN), rows),
        ("old", range(KNOWN), 3000),
        ("new", range(KNOWN, ITEMS), 3000),
    ):
        sums = np.cumsum(weights[:, items.start : items.stop], axis=1)
        user = draw.integers(0, USERS, count)
        item = [items.start + np.searchsorted(sums[one], draw.random() * sums[one, -1], side="right") for one in user]
        (folder / part).mkdir()
        pq.write_table(pa.table({"user": user, "item": item, "label": np.ones(count)}), folder / part / "0.parquet")
    pq.write_table(pa.table({"id": range(ITEMS), "tags": tags.tolist()}), folder / "items.parquet")


def recalls(folder: Path, by_features: bool, seed: int) -> dict[str, float]:
    """recall@100 of new and of earlier items."""
    identity = {"mapping": {"kind": "identity"}}
    sparse: list[dict[str, Any]] = [{"name": "user"} | identity, {"name": "item"} | identity]
    tables = [
        {"name": name, "rows": rows, "dim": DIM, "features": [name]}
        for name, rows in (("user", USERS), ("item", ITEMS))
    ]
    args: dict[str, Any] = {"item": "item", "towers": [64, DIM]}
    if by_features:
        sparse.append({"name": "tags", "kind": "id_list", "from": "item.tags", "by": "item"} | identity)
        tables.append({"name": "tags", "rows": TAGS, "dim": DIM, "features": ["tags"]})
        args["item_features"] = ["tags"]
    raw = {
        "name": f"{'features' if by_features else 'ids'}-{seed}",
        "data": {
            "train": str(folder / "train"),
            "entities": {"item": {"path": str(folder / "items.parquet"), "key": "id"}},
        },
        "schema": {"label": {"column": "label"}, "sparse": sparse},
        "tables": tables,
        "model": {
            "name": "two_tower",
            "args": args,
            "loss": {"kind": "in_batch", "temperature": 0.1, "counts": "data"},
        },
        "optimizers": {"dense": {"kind": "adam", "lr": 0.002}, "sparse": {"kind": "adam", "lr": 0.005}},
        "trainer": {"num_workers": 0, "batch_size": 256, "epochs": 5, "seed": seed, "threads_per_worker": 1}
        | {"ranking": {"ks": [100]}},
        "storage": {"path": str(folder / "runs")},
    }
    quiet = Display(Console(quiet=True))
    run = Trainer(parse_config(raw), display=quiet).fit().folder
    return {part: evaluate_run(run, str(folder / part), display=quiet)["recall@100"] for part in ("new", "old")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=30_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), args.rows)
        for by_features in (True, False):
            found = [recalls(Path(name), by_features, seed) for seed in range(args.seeds)]
            for part in ("new", "old"):
                values = np.array([one[part] for one in found])
                spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
                print(f"{'features' if by_features else 'ids alone'}, {part}: recall@100 {values.mean():.4f}{spread}")


if __name__ == "__main__":
    main()
