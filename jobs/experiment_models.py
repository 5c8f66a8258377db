"""Quality of rankers with histories and several tasks, on real data: `python jobs/experiment_models.py --help`.

`--only movielens` compares target attention (DIN) with the same model over the pooled history, on MovieLens-100K by
time (first: `python data/movielens/prepare.py`); `--only census` compares MMoE, PLE and a shared bottom with models of
one task each, on Census-Income (census_income_test.csv.gz of UCI's KDD set). Each seed is a run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import yaml

from rayrec.train import Trainer
from rayrec.train.config.file import parse_config

# Columns of Census-Income by number; 24 is the survey's own weight of a row, 41 and 7 are predicted.
NUMBERS = (0, 5, 16, 17, 18, 30, 39)
LEFT_OUT = (7, 24, 41)
TASKS = ("income", "never_married")


def movielens(folder: Path, runs: Path, seed: int, attention: bool) -> float:
    """AUC on the last fifth in time."""
    raw: dict[str, Any] = yaml.safe_load((folder / "train.yaml").read_text())
    raw["data"] = {part: str(folder / "parquet" / part) for part in ("train", "eval")} | {"read": {"reader": "local"}}
    for table in raw["tables"]:
        if table["name"] == "item":
            table["features"] += ["liked", "disliked"]
            table["pooling"] = "mean"
    raw["tables"] = [table for table in raw["tables"] if table["name"] not in ("liked", "disliked")]
    histories = [{"history": [name], "target": ["item"]} for name in ("liked", "disliked")]
    args = {"over_arch": [64, 32, 1], "attention_hidden": [32, 16], "softmax": True}
    raw["model"] = {"name": "din", "args": {**args, "attention": histories if attention else []}}
    raw["sharding"] = {}
    return float(_fit(raw, runs, seed)["auc"])


def census(folder: Path, runs: Path, seed: int, model: str, tasks: tuple[str, ...]) -> list[float]:
    """AUC of each task on a random fifth."""
    columns = [f"c{number}" for number in range(42) if number not in LEFT_OUT]
    numbers = [f"c{number}" for number in NUMBERS]
    texts = [column for column in columns if column not in numbers]
    args: dict[str, Any] = {"expert": [64], "tower": [32]}
    args |= {"mmoe": {"experts": 4}, "shared": {"experts": 1}, "ple": {"own": 1, "shared": 2, "levels": 1}}[model]
    raw = {
        "data": {part: str(folder / part) for part in ("train", "eval")} | {"read": {"reader": "local"}},
        "schema": {
            "labels": [{"name": task} for task in tasks],
            "dense": [{"name": name} for name in numbers],
            "sparse": [{"name": name, "mapping": {"kind": "hash", "seed": 0}} for name in texts],
        },
        "tables": [{"name": name, "rows": 256, "dim": 8, "features": [name]} for name in texts],
        "model": {"name": "mmoe" if model == "shared" else model, "args": args},
        "optimizers": {"dense": {"kind": "adam", "lr": 0.001}, "sparse": {"kind": "adam", "lr": 0.001}},
        "trainer": {"batch_size": 512, "epochs": 3},
    }
    found = _fit(raw, runs, seed)
    return [float(found["tasks"][task]["auc"]) for task in tasks]


def write_census(file: Path, folder: Path) -> None:
    """Train and eval as Parquet: numbers standardized by the training rows, the rest as texts."""
    with gzip.open(file) as stream:
        text = stream.read()
    names = [f"c{number}" for number in range(42)]
    read = pc_csv.read_csv(
        io.BytesIO(text),
        pc_csv.ReadOptions(column_names=names),
        convert_options=pc_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )
    held = np.random.default_rng(0).random(read.num_rows) < 0.2
    texts = {name: [value.strip() for value in read[name].to_pylist()] for name in names}
    columns: dict[str, Any] = {name: texts[name] for name in names}
    for number in NUMBERS:
        values = np.asarray(texts[f"c{number}"], dtype=np.float64)
        values = np.log1p(values) if values.max() > 200 else values
        columns[f"c{number}"] = ((values - values[~held].mean()) / (values[~held].std() + 1e-6)).astype(np.float32)
    columns["income"] = [int("+" in value) for value in texts["c41"]]
    columns["never_married"] = [int(value == "Never married") for value in texts["c7"]]
    table = pa.table(columns)
    for part, mask in (("train", ~held), ("eval", held)):
        (folder / part).mkdir(parents=True)
        pq.write_table(table.filter(pa.array(mask)), folder / part / "rows.parquet", row_group_size=4096)


def _fit(raw: dict[str, Any], runs: Path, seed: int) -> dict[str, Any]:
    trainer = {**raw["trainer"], "num_workers": 0, "seed": seed, "threads_per_worker": 1}
    raw = {**raw, "name": f"run-{time.time_ns()}", "trainer": trainer, "storage": {"path": str(runs)}}
    with contextlib.redirect_stdout(io.StringIO()):
        found = Trainer(parse_config(raw)).fit().eval
    assert found is not None
    return found


def _row(name: str, values: list[float], seconds: float) -> None:
    spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    print(f"| {name} | {mean(values):.4f}{spread} | {len(values)} | {seconds / len(values):.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("movielens", "census"))
    parser.add_argument("--movielens", type=Path, default=Path("data/movielens"), help="folder of train.yaml")
    parser.add_argument("--census", type=Path, help="census_income_test.csv.gz")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    print("| model | AUC, mean ± deviation over seeds | seeds | seconds a run |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if args.only != "census":
            for name, attention in (("MovieLens, history pooled", False), ("MovieLens, DIN", True)):
                start = time.monotonic()
                found = [movielens(args.movielens, root / "runs", seed, attention) for seed in range(args.seeds)]
                _row(name, found, time.monotonic() - start)
        if args.only != "movielens":
            if args.census is None:
                parser.error("--census is needed: the file census_income_test.csv.gz")
            write_census(args.census, root / "census")
            kinds = [("one model a task", "shared", [(task,) for task in TASKS])]
            kinds += [(model, model, [TASKS]) for model in ("shared", "mmoe", "ple")]
            for name, model, groups in kinds:
                start, of_seeds = time.monotonic(), []
                for seed in range(args.seeds):
                    parts = [census(root / "census", root / "runs", seed, model, tasks) for tasks in groups]
                    of_seeds.append(mean(auc for part in parts for auc in part))
                _row(f"Census-Income, {name}, mean of tasks", of_seeds, time.monotonic() - start)


if __name__ == "__main__":
    main()
