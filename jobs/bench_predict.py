"""Rows a second of `rayrec predict` beside those of `rayrec evaluate`, whole commands in turns on the same files.

python jobs/bench_predict.py RUN EXPORT DATA --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rayrec.data import Manifest
from rayrec.inference import Model
from rayrec.inference.scorer import Scorer, features_only

_COMMAND = "import sys; from rayrec.cli.main import run; sys.exit(run(sys.argv[1:]))"


def seconds(*command: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", _COMMAND, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("export", help="its export")
    parser.add_argument("data", help="Parquet files with labels")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = Manifest.read(args.data, features_only(Scorer(Model(args.export)).schema)).rows
    found: list[tuple[float, float]] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            evaluated = seconds("evaluate", args.run, "--data", args.data)
            found.append((evaluated, seconds("predict", args.export, args.data, str(Path(folder) / "out"))))
    figures = {
        "rows": rows,
        "evaluate_rows_per_s": rows / statistics.median(one for one, _ in found),
        "predict_rows_per_s": rows / statistics.median(other for _, other in found),
        "predict_over_evaluate": statistics.median(one / other for one, other in found),
    }
    print(json.dumps(figures) if args.json else "\n".join(f"{key:24} {value:,.4g}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
