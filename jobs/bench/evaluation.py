"""Measures the share of a run's time in which evaluations stop training: inline, and in the background.

    python jobs/bench/evaluation.py --json

Each side is a run with one Ray worker, in turns. A training step waits `--step-ms`, as the host does during a step on a
GPU, so that CPUs are free for evaluations; both sides save a checkpoint at each evaluation. `stopped`: the fraction of
the time from the first line of metrics to the last step in which evaluations and checkpoints stopped training. `whole`:
seconds from the first line to the end of the last evaluation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from harness import arguments, in_turns, machine, print_json
from rich.console import Console
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train import Display, Trainer, parse_config
from rayrec.train.run.folder import RunFolder
from tests.train.small import raw_config, write

BATCH, EVERY, EVALUATIONS = 256, 60, 4


class Waits(nn.Module):
    """A model whose training step waits."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, batch: Batch) -> Any:
        if self.training:
            time.sleep(self.seconds)
        return self.inner(batch)


def waits(seconds: float) -> Callable[..., nn.Module]:
    return lambda **given: Waits(DLRM(**given), seconds)


def run(folder: Path, evaluate: str, step_s: float) -> dict[str, float]:
    """A run; its figures."""
    raw = raw_config(
        folder,
        name=f"{evaluate}-{time.time_ns()}",
        trainer__num_workers=1,
        trainer__batch_size=BATCH,
        trainer__epochs=1,
        trainer__log_every=5,
        trainer__checkpoint_every=None,
        trainer__eval_every=EVERY,
        trainer__evaluate=evaluate,
        storage__keep_best="auc",
    )
    display = Display(Console(file=StringIO()))
    result = Trainer(parse_config(raw), factory=waits(step_s), display=display).fit()
    records = list(RunFolder(result.folder).read_metrics())
    lines = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    assert len(evals) == EVALUATIONS, [record.get("message") for record in records if record["kind"] == "event"]
    stopped_s = sum(
        line["stall_fraction"] * (line["time"] - before["time"]) for before, line in zip(lines, lines[1:], strict=False)
    )
    return {
        "stopped": stopped_s / (lines[-1]["time"] - lines[0]["time"]),
        "whole": max(record["time"] for record in records) - lines[0]["time"],
        "auc": evals[-1]["auc"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--rows", type=int, default=60_000, help="rows of an evaluation")
    args = parser.parse_args()
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    print(f"{machine()}; steps of {args.step_ms:g} ms, an evaluation of {args.rows:,} rows every {EVERY} steps")
    results = measure(args)
    for name, value in results.items():
        print(f"{name:<28} {value:.4g}")
    print_json(args, results)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Medians of each side."""
    with tempfile.TemporaryDirectory(prefix="rayrec-evaluation-") as name:
        folder = Path(name)
        # The last evaluation, after the last step, is in `whole` only.
        write(folder / "train", BATCH * (EVERY * EVALUATIONS - EVERY // 2), row_group=2048)
        write(folder / "eval", args.rows, seed=1, row_group=4096)
        rounds: dict[str, list[dict[str, float]]] = {"inline": [], "background": []}

        def side(evaluate: str) -> Callable[[], float]:
            def act() -> float:
                figures = run(folder, evaluate, args.step_ms / 1e3)
                rounds[evaluate].append(figures)
                return figures["stopped"]

            return act

        in_turns({evaluate: side(evaluate) for evaluate in rounds}, args.rounds)
    return {
        f"{evaluate}_{figure}": statistics.median(one[figure] for one in figures)
        for evaluate, figures in rounds.items()
        for figure in ("stopped", "whole", "auc")
    }


if __name__ == "__main__":
    main()
