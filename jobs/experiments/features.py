"""What features are worth: `python jobs/experiments/features.py census_income_test.csv.gz --json out.json`.

Trains on Census-Income (KDD, UCI, CC BY 4.0; the test file, without a line of names) with ids and raw numbers alone,
with what `rayrec init` proposes, and with crosses too, and compares with LightGBM on the same split, if it is installed
(`pip install lightgbm scipy`; no dependencies of rayrec). A fifth of the rows, by a hash of their number, is held out:
nothing sees them but the last evaluation. Of the others a tenth validates: it says when to stop, for both. Prints the
AUC on the held-out rows over several seeds of training; all statistics are fitted to the training rows.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import statistics
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from rayrec.data.tools.init.make_config import Machine, by_hash, start
from rayrec.train import Trainer
from rayrec.train.after.evaluate import evaluate_run
from rayrec.train.config.file import parse_config
from rayrec.train.driver.console import Display

# Columns by their meaning (census_income.names of the UCI repository); True: a number.
COLUMNS = {
    "age": True, "class_of_worker": False, "industry": False, "occupation": False, "education": False,
    "wage_per_hour": True, "enrolled": False, "marital": False, "major_industry": False, "major_occupation": False,
    "race": False, "hispanic": False, "sex": False, "union_member": False, "unemployment_reason": False,
    "employment": False, "capital_gains": True, "capital_losses": True, "dividends": True, "tax_filer": False,
    "previous_region": False, "previous_state": False, "household": False, "household_summary": False,
    "instance_weight": None, "migration_msa": False, "migration_region": False, "migration_within_region": False,
    "same_house": False, "sunbelt": False, "employer_size": True, "parents": False, "father_birth": False,
    "mother_birth": False, "self_birth": False, "citizenship": False, "self_employed": False, "veterans_admin": False,
    "veterans_benefits": False, "weeks_worked": True, "year": False, "income": None,
}  # fmt: skip
CROSSES = (
    ("education", "occupation"), ("age_bucket", "weeks_worked_bucket"), ("occupation", "sex"),
    ("capital_gains_bucket", "dividends_bucket"), ("education", "age_bucket"), ("occupation", "weeks_worked_bucket"),
)  # fmt: skip
ARMS = ("today", "proposed", "all")


def table(path: Path) -> pa.Table:
    """The file's columns: categories as texts, numbers as floats, and the label."""
    with gzip.open(path, "rt") as file:
        rows = [[value.strip() for value in row] for row in csv.reader(file) if row]
    found: dict[str, Any] = {}
    for (name, number), values in zip(COLUMNS.items(), zip(*rows, strict=True), strict=True):
        if number is not None:
            found[name] = pa.array([float(value) for value in values]) if number else pa.array(values)
        elif name == "income":
            found["label"] = pa.array([int(value.startswith("50000+")) for value in values])
    return pa.table(found)


def arm_of(proposed: dict[str, Any], arm: str) -> dict[str, Any]:
    """The config of an arm, made of the proposal."""
    config = deepcopy(proposed)
    schema, tables = config["schema"], config["tables"]
    if arm == "today":
        made = {spec["name"] for spec in schema.pop("derived", [])}
        for kind in ("dense", "sparse"):
            schema[kind] = [feature for feature in schema[kind] if feature["name"] not in made]
        config["tables"] = [one for one in tables if one["name"] not in made]
    if arm == "all":
        dim = tables[0]["dim"]
        for pair in CROSSES:
            name = "_x_".join(pair)
            schema["derived"].append({"name": name, "kind": "cross", "columns": [*pair]})
            schema["sparse"].append({"name": name, "kind": "id", "mapping": {"kind": "hash"}})
            tables.append({"name": name, "rows": 4096, "dim": dim, "features": [name]})
    return config


def auc_of(config: dict[str, Any], seed: int, folder: Path, held: Path) -> float:
    """Of one run on the held-out rows, by the checkpoint that is best on those to validate on."""
    config, display = deepcopy(config), Display(Console(file=io.StringIO()))
    config["name"] = f"{config['name']}-{seed}"
    config["storage"] = {"path": str(folder), "keep_best": "ne"}
    config["trainer"] |= {"seed": seed}
    with contextlib.redirect_stdout(io.StringIO()):
        result = Trainer(parse_config(config), display=display).fit()
        return float(evaluate_run(result.folder, str(held), display=display, checkpoint="best")["auc"])


def lightgbm_aucs(folders: dict[str, str], seeds: int, test: Path) -> list[float]:
    """Of LightGBM with its defaults at a rate of 0.05, as many trees as the rows to validate on say; categories as
    such."""
    import lightgbm

    train, validation, held = (pq.read_table(path) for path in (folders["train"], folders["eval"], test))
    names = [name for name in train.column_names if name != "label"]
    categories = [name for name in names if not COLUMNS[name]]
    known = {name: train[name].unique().to_pylist() for name in categories}

    def matrix(rows: pa.Table) -> np.ndarray:
        columns = [
            np.array([{v: i for i, v in enumerate(known[name])}.get(v, -1) for v in rows[name].to_pylist()], float)
            if name in known
            else rows[name].to_numpy()
            for name in names
        ]
        return np.stack(columns, axis=1)

    found, inputs, labels = [], (matrix(train), matrix(held)), held["label"].to_numpy()
    valid, stops = matrix(validation), [lightgbm.early_stopping(50, verbose=False)]
    for seed in range(seeds):
        settings = {"objective": "binary", "learning_rate": 0.05, "seed": seed, "verbosity": -1, "num_threads": 1}
        settings |= {"feature_fraction": 0.8, "bagging_fraction": 0.8, "bagging_freq": 1}
        known_as = {"categorical_feature": [names.index(name) for name in categories]}
        data = lightgbm.Dataset(inputs[0], train["label"].to_numpy(), **known_as)
        beside = [lightgbm.Dataset(valid, validation["label"].to_numpy(), reference=data)]
        scores = lightgbm.train(settings, data, 1000, valid_sets=beside, callbacks=stops).predict(inputs[1])
        ranks = np.argsort(np.argsort(scores)) + 1
        ones = labels.sum()
        found.append(float((ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = table(given.path)
        mask = by_hash(0.2)(rows, 0)
        for name, chosen in (("rows", ~mask), ("held", mask)):
            pq.write_table(rows.filter(pa.array(chosen)), folder / f"{name}.parquet")
        started = start([str(folder / "rows.parquet")], "census", folder / "census", Machine(cores=1), "label")
        config = {name: part for name, part in started.config.items() if name != "storage"}
        try:
            found["LightGBM"] = lightgbm_aucs(config["data"], given.seeds, folder / "held.parquet")
            print("LightGBM", found["LightGBM"], flush=True)
        except ImportError:
            print("LightGBM is not installed")
        for seed in range(given.seeds):
            for arm in given.arms:
                one = arm_of(config, arm) | {"name": arm}
                found.setdefault(arm, []).append(auc_of(one, seed, folder / "runs", folder / "held.parquet"))
                print(arm, seed, f"{found[arm][-1]:.4f}", flush=True)
    for name, values in found.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name:10} AUC {statistics.mean(values):.4f} ± {spread:.4f} ({len(values)} seeds)")
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
