"""Quality of rankers with histories and several tasks, on real data: `python jobs/experiments/models.py --help`.

`--only movielens` compares target attention (DIN) with the same model over the pooled history, on MovieLens-100K by
time: what a user rated before, how many stars, and how far above what others had given; settings are chosen by
`--folds`, and the test part is read last. `--only census` compares MMoE, PLE and a shared bottom with models of one
task each, on Census-Income (census_income_test.csv.gz of UCI's KDD set); with `--peers` (see `peers.py`) each beside
the same of FuxiCTR's layers, the epoch chosen on validation rows. Each seed is a run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
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
from peers import use
from torchmetrics.functional.classification import binary_auroc

from rayrec.models import DIN, Batch
from rayrec.modules import EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import Trainer
from rayrec.train.config.file import parse_config

# Columns of Census-Income by number; 24 is the survey's own weight of a row, 41 and 7 are predicted.
NUMBERS = (0, 5, 16, 17, 18, 30, 39)
LEFT_OUT = (7, 24, 41)
HISTORY, ITEM_ROWS = 30, 1683
# Those that were best on `FOLDS`, seed 0 (jobs/RESULTS.md says what was tried).
SETTINGS: dict[str, Any] = {"dim": 16, "hidden": [32, 16], "softmax": True, "dropout": 0.5, "over": [64, 32]}
SETTINGS |= {"sparse_lr": 1e-4}
OF_MODEL: dict[str, dict[str, Any]] = {
    "history pooled": {"std": 1.0, "lr": 1e-3, "epochs": 8},
    "DIN": {"std": 1.0, "lr": 2e-3, "epochs": 6},
}
# Of a rating that lies in the history: its columns, each with what the candidate has like it, if anything.
COLUMNS = {"genre": "genre", "genre_2": "genre_2", "year": "year", "mean": "mean", "stars": None, "lift": None}
# Tables of buckets in an order, by their rows: five years, quarters of a star, stars, half stars above others' mean.
ORDERED = {"year": 14, "mean": 12, "stars": 6, "lift": 13}
RATINGS = 100_000
TRAINED = range(RATINGS * 4 // 5)
TEST = range(RATINGS * 4 // 5, RATINGS)
FOLDS = [(range(48_000), range(48_000, 64_000)), (range(64_000), range(64_000, 80_000))]
TASKS = ("income", "never_married")
# Of every model of Census-Income, FuxiCTR's as well.
DIM, EXPERT, TOWER, BATCH, EPOCHS, LR = 8, [64], [32], 512, 8, 0.001
EXPERTS: dict[str, dict[str, int]] = {
    "shared": {"experts": 1},
    "mmoe": {"experts": 4},
    "ple": {"own": 1, "shared": 2},
}


@dataclass(frozen=True, slots=True)
class Ratings:
    """MovieLens-100K in order of time; of each rating `COLUMNS` of its user's `HISTORY` ratings before it.

    Args:
        lists: of each feature its values, and where each rating's begin.
    """

    dense: torch.Tensor
    label: torch.Tensor
    lists: dict[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def read(cls, folder: Path) -> Ratings:
        """
        Args:
            folder: of `prepare.py`, whose `ratings.py` and `history.py` are used, and of the published files.
        """
        sys.path.append(str(Path(__file__).resolve().parents[2] / "data" / "movielens"))
        history, prepare, ratings = (importlib.import_module(name) for name in ("history", "prepare", "ratings"))
        data = ratings.read(folder)
        table, past = prepare.examples(data), history.earlier(data.user_R, data.time_R)
        genre = np.zeros((ITEM_ROWS, 2), dtype=np.int64)
        for item, about in data.items.items():
            first, *others = about.genres or (0,)
            genre[item] = first, (others or [first])[0]
        others_mean, year = table["item_mean"].to_numpy(), np.nan_to_num(table["release_year"].to_numpy(), nan=1990)
        of = {"genre": genre[data.item_R, 0], "genre_2": genre[data.item_R, 1], "stars": data.rating_R}
        of["year"] = (year.clip(1930, 1999) - 1930) // 5
        of["mean"] = (4 * (others_mean - 1.5)).clip(0, 11)
        of["lift"] = np.round(2 * (data.rating_R - others_mean)).clip(-6, 6) + 6
        every = np.ones(table.num_rows, dtype=bool)
        earlier = {name: history.last_items(past, of[name].astype(np.int64), every, HISTORY) for name in COLUMNS}
        lists = {f"seen_{name}": (of.values, of.offsets) for name, of in earlier.items()}
        single = {name: of[name] for name in filter(None, COLUMNS.values())}
        single |= {name: table[name].to_numpy() for name in ("gender", "occupation")}
        lists |= {name: (of, np.arange(len(of) + 1)) for name, of in single.items()}
        genres = table["genres"].combine_chunks()
        lists["genres"] = (genres.values.to_numpy(), genres.offsets.to_numpy())
        numbers = yaml.safe_load((Path(prepare.__file__).parent / "train.yaml").read_text())["schema"]["dense"]
        dense = []
        for one in numbers:
            of = table[one["name"]].to_numpy().astype(np.float64)
            steps = {step["kind"]: step for step in one["transforms"]}
            of = np.log1p(of) if "log1p" in steps else of
            dense.append((of - steps["standardize"]["mean"]) / steps["standardize"]["std"])
        return cls(
            torch.from_numpy(np.stack(dense, axis=1)).float(),
            torch.from_numpy(data.rating_R >= prepare.LIKED_FROM).float(),
            {name: (torch.tensor(of).long(), torch.tensor(at).long()) for name, (of, at) in lists.items()},
        )

    def batch(self, rows: torch.Tensor) -> Batch:
        values, lengths = [], []
        for of, offsets in self.lists.values():
            begin, sizes = offsets[rows], offsets[rows + 1] - offsets[rows]
            ends = sizes.cumsum(0)
            values.append(of[(begin - ends + sizes).repeat_interleave(sizes) + torch.arange(int(ends[-1]))])
            lengths.append(sizes)
        kjt = KeyedJaggedTensor(list(self.lists), torch.cat(values), lengths=torch.cat(lengths))
        return Batch(self.dense[rows], kjt, self.label[rows])


def init(std: float, ordered: bool) -> Callable[[torch.Tensor], None]:
    """How a table starts. Attention can tell from products of vectors which are alike only if they are not small; rows
    of ordered buckets have the more in common the nearer they are (random Fourier features, Rahimi & Recht 2007)."""

    def fill(rows: torch.Tensor) -> None:
        if not ordered:
            rows.normal_(std=std)
            return
        place = torch.arange(len(rows))[:, None] / len(rows)
        speed, phase = torch.rand(2, rows.shape[1]) * 2 * torch.pi
        rows.copy_(std * 2**0.5 * torch.cos(1.5 * speed * place + phase))

    return fill


def movielens(
    data: Ratings, parts: tuple[range, range], seed: int, attention: bool, settings: dict[str, Any]
) -> list[float]:
    """AUC on the second part after each epoch of training on the first."""
    torch.manual_seed(seed)
    dim, genres = settings["dim"], ["genre", "genre_2", "genres", "seen_genre", "seen_genre_2"]
    sizes: list[tuple[str, int, int, list[str]]] = [("genre", 19, dim, genres)]
    for name, rows in ORDERED.items():
        sizes.append((name, rows, dim, [*filter(None, [COLUMNS[name]]), f"seen_{name}"]))
    sizes += [("gender", 2, 4, ["gender"]), ("occupation", 21, 4, ["occupation"])]
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim_of,
            feature_names=features,
            pooling=PoolingType.MEAN,
            init_fn=init(0.1 if dim_of < dim else settings["std"], name in ORDERED),
        )
        for name, rows, dim_of, features in sizes
    ]
    histories = [{"history": [f"seen_{name}" for name in COLUMNS], "target": [*COLUMNS.values()]}]
    model = DIN(
        tables,
        data.dense.shape[1],
        [*settings["over"], 1],
        attention=histories if attention else [],
        attention_hidden=settings["hidden"],
        softmax=settings["softmax"],
        dropout=settings["dropout"],
        tables_device="cpu",
        seed=seed,
    )
    in_tables = {id(weight) for weight in model.input.lookup.parameters()}
    adam = torch.optim.Adam(
        [
            {"params": [w for w in model.parameters() if id(w) in in_tables], "lr": settings["sparse_lr"]},
            {"params": [w for w in model.parameters() if id(w) not in in_tables], "lr": settings["lr"]},
        ]
    )
    trained, held = (torch.arange(part.start, part.stop) for part in parts)
    aucs = []
    for _ in range(settings["epochs"]):
        model.train()
        for rows in trained[torch.randperm(len(trained))].split(512):
            adam.zero_grad(set_to_none=True)
            model(data.batch(rows))[0].backward()
            adam.step()
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(data.batch(rows))[1] for rows in held.split(8192)])
        aucs.append(float(binary_auroc(logits, data.label[held].long())))
    return aucs


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
    from peers import FuxiExperts, feature_map

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
    parser.add_argument("--movielens", type=Path, help="folder of the published MovieLens-100K files")
    parser.add_argument("--folds", action="store_true", help="of MovieLens: the parts that settings are chosen by")
    parser.add_argument("--set", default="{}", help="of MovieLens: JSON over the settings")
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
            if args.movielens is None:
                parser.error("--movielens is needed: the folder of the published files")
            data = Ratings.read(args.movielens)
            for name, own in OF_MODEL.items():
                start, settings = time.monotonic(), {**SETTINGS, **own, **json.loads(args.set)}
                for what, parts in (("on later training days", FOLDS), ("test", [(TRAINED, TEST)])):
                    if args.folds == (what == "test"):
                        continue
                    found = [
                        mean(movielens(data, part, seed, name == "DIN", settings)[-1] for part in parts)
                        for seed in range(args.seeds)
                    ]
                    _row(f"MovieLens, {name}, {what}", found, time.monotonic() - start)
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
