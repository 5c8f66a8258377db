"""Report pages of fixed runs, mark by mark, as they were when a person last looked at them.

After a change that is meant: `python -m tests.train.test_report_golden` writes `golden_*.html` anew; look at the
page of a run, and let the files' diff go into the review.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrec.cli import run
from rayrec.train import write_report
from tests.train.test_report import PLAN, eval_line, event_line, full_run, train_line, write_run


def noise(step: int) -> float:
    """In [-1, 1], the same everywhere."""
    return math.sin(step * 12.9898) * 43758.5453 % 2 - 1


def long_run(folder: Path) -> Path:
    """149 noisy steps of two labels on 16-bit tables with moving rates, rows left out and exports; not ended."""
    lines = []
    for step in range(1, 150):
        spike = 3.0 if step in (30, 77) else 0.0
        tasks = {
            name: {"ne": 1.1 - step / 1000 + noise(step + place) / 50, "auc": 0.5 + step / 1000}
            for place, name in enumerate(("buy", "like"))
        }
        figures = {"loss": 1 - step / 300 + noise(step) / 20 + spike, "data_wait_fraction": abs(noise(step)) / 4}
        lines.append(train_line(step * 10, tasks=tasks, **figures, lr={"dense": 1e-4 * step, "sparse": 0.05}))
    for step in (400, 800, 1200):
        figures = eval_line(step, 0.6 + step / 10_000)
        tasks = {"buy": {**figures, "gauc": 0.61}, "like": {**figures, "auc": 0.7 - step / 10_000}}
        stretches = [{"start": f"2026-01-0{day}", "tasks": tasks} for day in (1, 2)]
        lines.append({**figures, "tasks": tasks, "by_time": stretches, "epoch": step // 500})
    bad = {"problem": "not a number", "column": "age", "value": "<x>", "row": 7, "row_group": 1, "file": "a.parquet"}
    left_out = {"count": 51, "samples": [bad | {"row": row} for row in range(51)]}
    lines += [
        {**event_line(300, "skipped", "51 rows of epoch 1 were left out"), **left_out},
        event_line(500, "checkpoint", "step 500"),
        event_line(700, "recovered", "worker 1 was lost"),
        event_line(900, "recovered", "worker 0 was lost"),
        event_line(1000, "resumed", "resumed from the checkpoint of step 1000"),
    ]
    folder = write_run(
        folder, lines, PLAN, "name: long\ntables:\n- {name: user, data_type: fp16}\ntrainer: {epochs: 3}\n"
    )
    memory = [{"rank": 0, "weights_bytes": 3 << 20, "optimizer_bytes": 1 << 20}, {"rank": 1, "dense_bytes": 1 << 19}]
    times = [{"rank": 0, "ids_s": 0.001, "lookup_s": 0.002}, {"rank": 1, "vectors_s": 0.004, "update_s": 1e-5}]
    (folder / "plan.json").write_text(json.dumps({**PLAN.to_dict(), "memory": memory, "time": times}))
    export = {"path": "gone/first", "version": 1, "step": 500, "tables": "int8", "dense": "fp32", "target": "cpu"}
    one, several = {"auc": 0.7}, {"tasks": {"buy": {"auc": 0.71}, "like": {"auc": None}}}
    exports = [
        {**export, "share": 0.26, "trained": one, "exported": {"auc": 0.6999}, "within_limits": True},
        {**export, "path": "gone/second", "trained": several, "exported": several, "within_limits": False},
    ]
    (folder / "exports.jsonl").write_text("".join(json.dumps(line) + "\n" for line in exports))
    return folder


def compared(folder: Path) -> str:
    runs = [str(full_run(folder / "first")), str(long_run(folder / "long"))]
    assert run(["runs", "compare", *runs, "--html", str(folder / "compared.html")]) == 0
    return (folder / "compared.html").read_text()


PAGES: dict[str, Callable[[Path], str]] = {
    "report": lambda folder: write_report(full_run(folder / "first")).read_text(),
    "long_report": lambda folder: write_report(long_run(folder / "long")).read_text(),
    "compared": compared,
}


def golden(name: str) -> Path:
    return Path(__file__).with_name(f"golden_{name}.html")


def page(name: str, folder: Path) -> str:
    """One tag a line; without style, script, and what says where and when it was written."""
    text = re.sub(r"<(style|script)[^>]*>.*?</\1>|<footer>.*?</footer>", "", PAGES[name](folder), flags=re.DOTALL)
    return re.sub(r">\s*<", ">\n<", text)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_it_was(tmp_path: Path, name: str) -> None:
    assert page(name, tmp_path) == golden(name).read_text(), "if it is meant: python -m tests.train.test_report_golden"


if __name__ == "__main__":
    for each in PAGES:
        with tempfile.TemporaryDirectory() as place:
            golden(each).write_text(page(each, Path(place)), encoding="utf-8")
