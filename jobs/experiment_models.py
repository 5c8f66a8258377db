"""Quality of rankers with histories and several tasks, on real data: `python jobs/experiment_models.py --help`.

`--only movielens` compares target attention (DIN) with the same model over the pooled history, on MovieLens-100K by
time (first: `python data/movielens/prepare.py`); `--only census` compares MMoE, PLE and a shared bottom with models of
one task each, on Census-Income (census_income_test.csv.gz of UCI's KDD set); with `--peers` (see `peers.py`) each
beside the same of FuxiCTR's layers. Each seed is a run in this process; the epoch is chosen on validation rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import yaml
from torchmetrics.functional.classification import binary_auroc

from jobs.peers import use
from rayrec.train import Trainer
from rayrec.train.config.file import parse_config

# Columns of Census-Income by number; 24 is the survey's own weight of a row, 41 and 7 are predicted.
NUMBERS = (0, 5, 16, 17, 18, 30, 39)
LEFT_OUT = (7, 24, 41)
TASKS = ("income", "never_married")
# Of every model of Census-Income, FuxiCTR's as well.
DIM, EXPERT, TOWER, BATCH, EPOCHS, LR = 8, [64], [32], 512, 8, 0.001
EXPERTS: dict[str, dict[str, int]] = {
    "shared": {"experts": 1},
    "mmoe": {"experts": 4},
    "ple": {"own": 1, "shared": 2},
}


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
    return float(json.loads((_run(raw, runs, seed) / "result.json").read_text())["eval"]["auc"])


def census(data: Census, runs: Path, seed: int, model: str, tasks: tuple[str, ...]) -> list[float]:
    """Test AUC of each task after the epoch that was best on validation, by the mean of the tasks."""
    args: dict[str, Any] = {"expert": EXPERT, "tower": TOWER, **EXPERTS[model]}
    args |= {"levels": 1} if model == "ple" else {}
    raw = {
        "data": {
            "train": str(data.folder / "train"),
            "eval": str(data.folder / "validation"),
            "eval_sets": {"test": str(data.folder / "test")},
            "read": {"reader": "local"},
        },
        "schema": {
            "labels": [{"name": task} for task in tasks],
            "dense": [{"name": name} for name in data.numbers],
            "sparse": [{"name": name, "mapping": {"kind": "identity"}} for name in data.rows],
        },
        "tables": [{"name": name, "rows": rows, "dim": DIM, "features": [name]} for name, rows in data.rows.items()],
        "model": {"name": "ple" if model == "ple" else "mmoe", "args": args},
        "optimizers": {"dense": {"kind": "adam", "lr": LR}, "sparse": {"kind": "adam", "lr": LR}},
        "trainer": {"batch_size": BATCH, "epochs": EPOCHS},
    }
    lines = _run(raw, runs, seed).joinpath("metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    aucs = [[_aucs(record, tasks), _aucs(record["sets"]["test"], tasks)] for record in evaluations]
    return max(aucs, key=lambda pair: mean(pair[0]))[1]


def _aucs(figures: dict[str, Any], tasks: tuple[str, ...]) -> list[float]:
    return [float(figures["tasks"][task]["auc"] if "tasks" in figures else figures["auc"]) for task in tasks]


def fuxi_census(data: Census, seed: int, model: str, tasks: tuple[str, ...]) -> list[float]:
    """The same of FuxiCTR's layers: the same rows, ids, widths, optimizer, batches of one size, epochs and choice."""
    from jobs.peers import FuxiExperts, feature_map

    torch.manual_seed(seed)
    sizes = EXPERTS[model]
    own, shared = (sizes["own"], sizes["shared"]) if model == "ple" else (0, sizes["experts"])
    net = FuxiExperts(feature_map(data.numbers, data.rows, tasks), DIM, own, shared, EXPERT, TOWER)
    adam = torch.optim.Adam(net.parameters(), lr=LR)
    parts = {name: data.tensors(name, tasks) for name in ("train", "validation", "test")}
    inputs, label = parts["train"]
    best: tuple[float, list[float]] = (0.0, [])
    for _ in range(EPOCHS):
        net.train()
        for rows in torch.randperm(len(label)).split(BATCH):
            adam.zero_grad(set_to_none=True)
            probability = net({name: values[rows] for name, values in inputs.items()})
            (len(tasks) * F.binary_cross_entropy(probability, label[rows])).backward()
            adam.step()
        net.eval()
        with torch.no_grad():
            found = {
                name: [
                    float(binary_auroc(of, label.long()))
                    for of, label in zip(net(parts[name][0]).T, parts[name][1].T, strict=True)
                ]
                for name in ("validation", "test")
            }
        best = max(best, (mean(found["validation"]), found["test"]))
    return best[1]


@dataclass(frozen=True, slots=True)
class Census:
    """Census-Income as Parquet: 70 % to train on, 10 % to choose by, 20 % to test; numbers standardized by the training
    rows, texts as ids of those, 0 where training has none.

    Args:
        rows: of each id column, one more than its ids.
    """

    folder: Path
    numbers: list[str]
    rows: dict[str, int]

    @classmethod
    def write(cls, file: Path, folder: Path) -> Census:
        with gzip.open(file) as stream:
            text = stream.read()
        names = [f"c{number}" for number in range(42)]
        read = pc_csv.read_csv(
            io.BytesIO(text),
            pc_csv.ReadOptions(column_names=names),
            convert_options=pc_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
        draw = np.random.default_rng(0).random(read.num_rows)
        parts = {"train": draw < 0.7, "validation": (draw >= 0.7) & (draw < 0.8), "test": draw >= 0.8}
        fitted = parts["train"]
        texts = {name: np.array([value.strip() for value in read[name].to_pylist()]) for name in names}
        columns: dict[str, Any] = {}
        rows: dict[str, int] = {}
        for number in (one for one in range(42) if one not in LEFT_OUT):
            name = f"c{number}"
            if number in NUMBERS:
                values = texts[name].astype(np.float64)
                values = np.log1p(values) if values.max() > 200 else values
                columns[name] = ((values - values[fitted].mean()) / (values[fitted].std() + 1e-6)).astype(np.float32)
            else:
                known = {value: place for place, value in enumerate(np.unique(texts[name][fitted]).tolist(), start=1)}
                columns[name], rows[name] = [known.get(value, 0) for value in texts[name].tolist()], len(known) + 1
        columns["income"] = ["+" in value for value in texts["c41"].tolist()]
        columns["never_married"] = texts["c7"] == "Never married"
        columns |= {task: np.asarray(columns[task]).astype(np.int64) for task in TASKS}
        table = pa.table(columns)
        for part, mask in parts.items():
            (folder / part).mkdir(parents=True)
            pq.write_table(table.filter(pa.array(mask)), folder / part / "rows.parquet", row_group_size=4096)
        return cls(folder, [f"c{number}" for number in NUMBERS], rows)

    def tensors(self, part: str, tasks: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Numbers and ids by name, ids from 1 as FuxiCTR has them, and labels `[B, T]`."""
        table = pq.read_table(self.folder / part)
        columns = {name: torch.from_numpy(table[name].to_numpy()) for name in (*self.numbers, *self.rows, *tasks)}
        inputs = {name: columns[name] + (name in self.rows) for name in (*self.numbers, *self.rows)}
        return inputs, torch.stack([columns[task] for task in tasks], dim=1).float()


def _run(raw: dict[str, Any], runs: Path, seed: int) -> Path:
    """Train in this process; the run's folder."""
    trainer = {**raw["trainer"], "num_workers": 0, "seed": seed, "threads_per_worker": 1}
    raw = {**raw, "name": f"run-{time.time_ns()}", "trainer": trainer, "storage": {"path": str(runs)}}
    with contextlib.redirect_stdout(io.StringIO()):
        return Trainer(parse_config(raw)).fit().folder


def _row(name: str, values: list[float], seconds: float) -> None:
    spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    print(f"| {name} | {mean(values):.4f}{spread} | {len(values)} | {seconds / len(values):.0f} |", flush=True)


def _tasks_row(name: str, of_seeds: list[list[float]], seconds: float) -> None:
    """The mean of the tasks, and each."""
    _row(f"{name}, mean of tasks", [mean(aucs) for aucs in of_seeds], seconds)
    for place, task in enumerate(TASKS):
        _row(f"{name}, {task}", [aucs[place] for aucs in of_seeds], seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("movielens", "census"))
    parser.add_argument("--movielens", type=Path, default=Path("data/movielens"), help="folder of train.yaml")
    parser.add_argument("--census", type=Path, help="census_income_test.csv.gz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="folder with FuxiCTR, trained on the same rows; see peers.py")
    args = parser.parse_args()
    use(args.peers)
    torch.set_num_threads(1)
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
            data = Census.write(args.census, root / "census")
            kinds = [("one model a task", "shared", [(task,) for task in TASKS])]
            kinds += [(model, model, [TASKS]) for model in EXPERTS]
            for name, model, groups in kinds:
                start = time.monotonic()
                of_seeds = [
                    [auc for tasks in groups for auc in census(data, root / "runs", seed, model, tasks)]
                    for seed in range(args.seeds)
                ]
                _tasks_row(f"Census-Income, {name}", of_seeds, time.monotonic() - start)
                if args.peers is not None:
                    start = time.monotonic()
                    of_seeds = [
                        [auc for tasks in groups for auc in fuxi_census(data, seed, model, tasks)]
                        for seed in range(args.seeds)
                    ]
                    _tasks_row(f"Census-Income, {name}, FuxiCTR's layers", of_seeds, time.monotonic() - start)


if __name__ == "__main__":
    main()
