"""The protocol of MLPerf DLRMv4 at a size for two cores: `python jobs/experiments/dlrmv4.py --out dlrmv4`.

Generates plays (data/synthetic/plays.py), builds the store of events, and trains an HSTU ranker on them strictly in the
order of time: train window T, evaluate on T + 1 before training on it. Histories are the last events of the user before
each row, with actions and ages; dense layers use Adam and tables row-wise Adagrad, with a warm-up. Prints the AUC of
each window beside the best that any model could have, lines of the compliance log (`:::MLLOG`), and whether the last
windows reach the target: the share `--target` of the best AUC beyond 0.5. The reference has 4.76 billion events,
histories of 4,086 and AUC 0.75 on Yambda-5b.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.synthetic.plays import PlaysSpec, best_auc, write_plays
from rayrec.data import StoreSpec, build_store
from rayrec.train import Display, Trainer, parse_config


def config(out: Path, spec: PlaysSpec, args: argparse.Namespace) -> dict[str, Any]:
    """The config of the run."""
    identity = {"mapping": {"kind": "identity"}}
    history = ["history_item", "history_action", "history_age"]
    return {
        "name": "dlrmv4",
        "data": {
            "train": str(out / "plays"),
            "order": "time",
            "windows": {"time": f"{args.window_days}d", "eval_every": args.eval_every, "eval_share": args.eval_share},
            "events": {"plays": {"path": str(out / "store"), "key": "user", "time": "at"}},
            "read": {"reader": "local"},
        },
        "schema": {
            "label": {"column": "like"},
            "timestamp": {"column": "at"},
            "derived": [
                {"name": "age", "kind": "age", "column": "history.at", "at": "at", "per": "minute"},
                {"name": "age_bucket", "kind": "buckets", "column": "age", "log_base": 2},
            ],
            "sparse": [
                {"name": "user", **identity},
                {"name": "item", **identity},
                {"name": "history_item", "from": "history.item", **identity},
                {"name": "history_action", "from": "history.action", "mapping": {"kind": "hash"}},
                {"name": "history_age", "kind": "id_list", "column": "age_bucket", "mapping": {"kind": "hash"}},
            ],
            "sequences": [
                {"name": "history", "from": "plays", "last": args.length, "before": "at", "ids": ["history_age"]}
                | {"values": [{"name": "ts", "from": "at", "kind": "time"}]}
            ],
        },
        "tables": [
            {"name": "user", "rows": spec.users, "dim": args.dim, "features": ["user"]},
            {"name": "item", "rows": spec.items, "dim": args.dim, "features": ["item", "history_item"]},
            {"name": "action", "rows": 64, "dim": args.dim, "features": ["history_action"]},
            {"name": "age", "rows": 256, "dim": args.dim, "features": ["history_age"]},
        ],
        "model": {
            "name": "hstu_ranker",
            "args": {
                "attention": [{"history": history, "target": ["item", None, None]}],
                "context": ["user"],
                "max_length": args.length,
                "blocks": args.blocks,
                "heads": 2,
                "over_arch": [64, 1],
            },
        },
        "optimizers": {
            "dense": {"kind": "adam", "lr": args.lr, "schedule": {"warmup_steps": args.warmup_steps}},
            "sparse": {"kind": "rowwise_adagrad", "lr": 10 * args.lr, "schedule": {"warmup_steps": args.warmup_steps}},
        },
        "trainer": {"num_workers": 0, "batch_size": args.batch, "seed": args.seed, "threads_per_worker": 1},
        "storage": {"path": str(out / "runs")},
    }


def log(key: str, value: object, **metadata: object) -> None:
    """Prints a line of the compliance log."""
    line = {"namespace": "", "time_ms": int(1000 * time.time()), "event_type": "POINT_IN_TIME", "key": key}
    print(":::MLLOG", json.dumps({**line, "value": value, "metadata": metadata}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data and run; a run there is continued")
    for name, default in (("users", 80), ("items", 400), ("days", 60), ("files", 6), ("length", 32), ("dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("window-days", 6), ("eval-every", 1), ("blocks", 2), ("batch", 256), ("warmup-steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, fraction in (("median", 300.0), ("lr", 0.004), ("eval-share", 1.0), ("target", 0.6)):
        parser.add_argument(f"--{name}", type=float, default=fraction)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    spec = PlaysSpec(
        users=args.users, items=args.items, days=args.days, files=args.files, median=args.median, longest=args.longest
    )
    if not (args.out / "store").exists():
        list(write_plays(spec, args.out / "plays"))
        done = build_store(str(args.out / "plays"), args.out / "store", StoreSpec("user", "at", ("item", "action")))
        print(f"{done.events:,} events of {done.keys:,} users, {done.nbytes / done.events:.1f} bytes each")
    for key, value in (("submission_benchmark", "dlrm_v4"), ("global_batch_size", args.batch), ("seed", args.seed)):
        log(key, value)
    log("opt_base_learning_rate", args.lr, optimizer="adam, row-wise adagrad")
    log("run_start", None)
    result = Trainer(parse_config(config(args.out, spec, args)), display=Display()).fit()
    lines = (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    best = best_auc(spec, spec.files - 1)
    for record in evaluations:
        print(
            f"window {record['window']}: AUC {record['auc']:.4f}, NE {record['ne']:.4f} on {record['samples']:,} rows"
        )
        log("eval_accuracy", record["auc"], step=record["step"], window=record["window"])
    last = [record["auc"] for record in evaluations[-3:]]
    reached = (sum(last) / len(last) - 0.5) / (best - 0.5)
    print(
        f"the last {len(last)} windows: {reached:.0%} of the best AUC {best:.4f} beyond 0.5; target {args.target:.0%}"
    )
    print(f"{result.train['samples']:,} samples in {result.train['seconds']:.0f} s of training")
    status = "success" if reached >= args.target else "aborted"
    log("run_stop", None, status=status)
    return 0 if status == "success" else 1


if __name__ == "__main__":
    raise SystemExit(main())
