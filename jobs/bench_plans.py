"""Trains MovieLens under every kind of plan and on 1, 2 and 4 workers: the evaluation AUC must not depend on either.

    python data/movielens/prepare.py && python jobs/bench_plans.py

Global batch and seed are the same throughout. Exits 1 where an AUC is below 0.70 or two are more than 0.005 apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time

from rayrec.train import Trainer, load_config

GOAL, SPREAD = 0.70, 0.005
CONFIG = "data/movielens/train.yaml"
TABLES = ["user", "item", "gender", "occupation", "genres", "liked", "disliked"]
KINDS = ["table_wise", "row_wise", "column_wise", "data_parallel"]


def only(kind: str) -> str:
    """A constraint that shards every table in one way; a table of two rows is too short to be cut over four ranks."""
    return json.dumps({table: {"sharding_types": [kind]} for table in TABLES})


def runs() -> list[tuple[str, list[str]]]:
    """(name, overrides) of each run; "mixed" is the config as it is."""
    workers = [(f"mixed, {n} workers", [f"trainer.num_workers={n}"]) for n in (1, 2, 4)]
    return workers + [(f"{kind}, 2 workers", [f"sharding.constraints={only(kind)}"]) for kind in KINDS]


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", action="store_true", help="one object with all rows as the last line")
    args = cli.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rayrec-plans-") as folder:
        for number, (name, overrides) in enumerate(runs()):
            config = load_config(CONFIG, [f"name=run{number}", f"storage.path={folder}", *overrides])
            start = time.perf_counter()
            result = Trainer(config).fit()
            rows.append({"run": name, **result.eval, "seconds": time.perf_counter() - start})
    aucs = [row["auc"] for row in rows]
    print(f"\n{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores: MovieLens-100K by time")
    for row in rows:
        print(f"{row['run']:28s} AUC {row['auc']:.4f}  NE {row['ne']:.4f}  {row['seconds']:6.1f} s with start-up")
    print(f"lowest {min(aucs):.4f} (goal ≥ {GOAL}), spread {max(aucs) - min(aucs):.4f} (goal ≤ {SPREAD})")
    if args.json:
        print(json.dumps({"rows": rows}))
    return int(min(aucs) < GOAL or max(aucs) - min(aucs) > SPREAD)


if __name__ == "__main__":
    sys.exit(main())
