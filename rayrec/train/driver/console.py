"""What the user sees of a run: plan, progress, evaluations, events, summary. A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rayrec._runtime.debug import debugging
from rayrec.train.driver.terminal import host_lines, memory_lines, plain, plan_table
from rayrec.train.tolerance import Tolerance, lenient, tolerated

MIN_S_BETWEEN_LINES = 1.0
WIDTH_OF_FILES = 120
TITLES = {
    "auc": "AUC",
    "ne": "NE",
    "rmse": "RMSE",
    "r2": "R²",
    "mrr": "MRR",
    "recall@10": "HR@10",
    "ndcg@10": "NDCG@10",
}


def figure(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


class Display:
    """Shows a run on a `rich` console. If that fails (a closed pipe, a full disk), output is lost, never the run."""

    def __init__(self, console: Console | None = None) -> None:
        self.tolerance = Tolerance()
        if console is None:
            lenient(sys.stdout)
        self.console = console or Console()
        if console is None and not self.console.is_terminal:
            self.console.width = WIDTH_OF_FILES
        self._progress: Progress | None = None
        self._task: Any = None
        self._figures: dict[str, float | None] = {}
        self._last_line_at = 0.0

    @tolerated
    def say(self, text: str, style: str | None = None) -> None:
        """One line of plain text; no markup is read from it."""
        self.console.print(plain(text), style=style, highlight=False, soft_wrap=True)

    def debug(self, text: str) -> None:
        if text and debugging():
            self.say(text, style="dim")

    @tolerated
    def plan(self, plan: Mapping[str, Any]) -> None:
        """The sharding plan as a table, the bytes it puts on each rank, and what it was made for."""
        self.console.print(plan_table(plan))
        for line in [*memory_lines(plan), *host_lines(plan)]:
            self.say(line)

    @tolerated
    def begin(self, record: Mapping[str, Any]) -> None:
        """A worker group starts, at `resumed_step` or 0."""
        self.close()
        self._figures = {}
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("training", total=None, figures="")
            self._progress.start()

    @tolerated
    def progress(self, record: Mapping[str, Any]) -> None:
        """A step was made."""
        if self._progress is None:
            return
        self._progress.update(
            self._task,
            completed=record["step"],
            total=record["total_steps"],
            description=f"epoch {record['epoch'] + 1}/{record['epochs']}",
            figures=self._figures_text(),
        )

    @tolerated
    def train(self, record: Mapping[str, Any]) -> None:
        """Figures of the steps since the last logging step."""
        self._figures = {name: record.get(name) for name in ("samples_per_second", "loss", "ne", "rmse")}
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], figures=self._figures_text())
        elif time.monotonic() - self._last_line_at >= MIN_S_BETWEEN_LINES:
            self._last_line_at = time.monotonic()
            self.say(f"epoch {record['epoch'] + 1}  step {record['step']}  {self._figures_text()}")

    @tolerated
    def evaluation(self, record: Mapping[str, Any]) -> None:
        """One pass over the evaluation rows."""
        head = f"evaluation after epoch {record['epoch'] + 1} (step {record['step']})"
        for line in evaluation_lines(head, record):
            self.say(line, style="bold")

    @tolerated
    def event(self, record: Mapping[str, Any]) -> None:
        """Something happened that a user should know of; a checkpoint only with RAYREC_DEBUG."""
        if record["event"] == "checkpoint":
            self.debug(record["message"])
        else:
            self.say(record["message"], style="yellow")
        if record.get("stacks"):
            self.say(record["stacks"], style="dim")

    @tolerated
    def summary(self, result: Mapping[str, Any], places: Mapping[str, str]) -> None:
        """How the run ended and where everything is."""
        self.close()
        evaluation = result["eval"] or {}
        named = evaluation.get("tasks", {})
        tasks = {f", {name}": scores for name, scores in named.items()} or {"": evaluation}
        rows = [
            *(_scores(tasks, "mrr", "recall@10", "ndcg@10") or _scores(tasks, "auc", "ne")),
            *_scores(tasks, "rmse", "r2"),
            ("epochs, steps", f"{result['epochs']}, {result['steps']:,}"),
            ("workers", str(result["world_size"])),
            ("samples/s", f"{result['samples_per_second']:,.0f}"),
            ("waited for data", f"{result['train']['data_wait_fraction']:.1%} of the training time"),
            *places.items(),
        ]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"{name:<{width}}  {value}")

    @tolerated
    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _figures_text(self) -> str:
        if not self._figures:
            return ""
        speed = self._figures["samples_per_second"] or 0.0
        loss, rmse = self._figures["loss"], self._figures["rmse"]
        quality = f"NE {figure(self._figures['ne'])}" if rmse is None else f"RMSE {figure(rmse)}"
        return f"{speed:,.0f} samples/s  loss {figure(loss)}  {quality}"


def evaluation_lines(head: str, scores: Mapping[str, Any]) -> list[str]:
    """The figures of an evaluation behind `head`: one line, or one for each of several labels."""
    skipped = f", {scores['skipped']:,} left out" if scores.get("skipped") else ""
    if "tasks" not in scores:
        return [f"{head}: {_quality(scores)}  on {scores['samples']:,} rows{skipped}"]
    width = max(len(name) for name in scores["tasks"])
    lines = [f"  {name:<{width}}  {_quality(of)}  on {of['samples']:,} rows" for name, of in scores["tasks"].items()]
    return [f"{head}{skipped}:", *lines]


def _scores(tasks: Mapping[str, Mapping[str, Any]], *names: str) -> list[tuple[str, str]]:
    """Lines of the summary: figures of those labels that have them, or, without an evaluation, that there are none."""
    having = {label: scores for label, scores in tasks.items() if names[0] in scores or (not scores and "ne" in names)}
    return [
        (f"evaluation {TITLES[name]}{label}", figure(scores.get(name)))
        for name in names
        for label, scores in having.items()
    ]


def _quality(scores: Mapping[str, Any]) -> str:
    if "rmse" in scores:
        return f"RMSE {figure(scores['rmse'])}  MAE {figure(scores['mae'])}  R² {figure(scores['r2'])}"
    if "mrr" in scores:
        seen = ", seen items left out" if "mrr/unseen" in scores else ""
        popular = f"; popularity {figure(scores['popularity']['recall@10'])}" if "popularity" in scores else ""
        return f"HR@10 {figure(scores['recall@10'])}{popular}  NDCG@10 {figure(scores['ndcg@10'])} of all items{seen}"
    grouped = f"GAUC {figure(scores['gauc'])}  " if "gauc" in scores else ""
    return (
        f"AUC {figure(scores['auc'])}  {grouped}NE {figure(scores['ne'])}  logloss {figure(scores['logloss'])}  "
        f"calibration {figure(scores['calibration'], 3)}"
    )
