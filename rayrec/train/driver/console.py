"""Shows a run to the user: plan, progress, evaluations, events, summary. A progress bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rayrec._runtime.debug import debugging
from rayrec.train.config.metric_titles import SHORT_TITLES, cutoff
from rayrec.train.terminal import format_metric, host_lines, memory_lines, plain, plan_table
from rayrec.train.tolerance import Tolerance, replace_unencodable, tolerated

MIN_S_BETWEEN_LINES = 1.0
WIDTH_OF_FILES = 120


class Display:
    """Shows a run on a `rich` console. A console error (a closed pipe) loses output but does not end the run."""

    def __init__(self, console: Console | None = None) -> None:
        self.tolerance = Tolerance()
        self._file_tolerance = Tolerance(lambda text: self.say(text, style="yellow"))
        if console is None:
            replace_unencodable(sys.stdout)
        self.console = console or Console()
        if console is None and not self.console.is_terminal:
            self.console.width = WIDTH_OF_FILES
        self._progress: Progress | None = None
        self._task: Any = None
        self._metrics: dict[str, float | None] = {}
        self._last_line_at = 0.0

    @tolerated
    def say(self, text: str, style: str | None = None) -> None:
        """Print one line of plain text; markup in it is not interpreted."""
        self.console.print(plain(text), style=style, highlight=False, soft_wrap=True)

    def writing(self, path: Path) -> AbstractContextManager[None]:
        """Report an error while the body writes a file of the run, and continue."""
        return self._file_tolerance.drop_errors(f"Could not write {path}")

    def debug(self, text: str) -> None:
        """Print a line if RAYREC_DEBUG is set."""
        if text and debugging():
            self.say(text, style="dim")

    @tolerated
    def plan(self, plan: Mapping[str, Any]) -> None:
        """Print the sharding plan as a table, its bytes per rank, and the hosts for which it was planned."""
        self.console.print(plan_table(plan))
        for line in [*memory_lines(plan), *host_lines(plan)]:
            self.say(line)

    @tolerated
    def begin(self, record: Mapping[str, Any]) -> None:
        """Start a new progress bar for a worker group, which starts at `resumed_step` or at step 0."""
        self.close()
        self._metrics = {}
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("training", total=None, metrics="")
            self._progress.start()

    @tolerated
    def progress(self, record: Mapping[str, Any]) -> None:
        """Update the progress bar after a step."""
        if self._progress is None:
            return
        self._progress.update(
            self._task,
            completed=record["step"],
            total=record["total_steps"],
            description=f"epoch {record['epoch'] + 1}/{record['epochs']}",
            metrics=self._metrics_text(),
        )

    @tolerated
    def train(self, record: Mapping[str, Any]) -> None:
        """Show the metrics of the steps since the last logging step."""
        self._metrics = {name: record.get(name) for name in ("samples_per_second", "loss", "ne", "rmse")}
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"], metrics=self._metrics_text())
        elif time.monotonic() - self._last_line_at >= MIN_S_BETWEEN_LINES:
            self._last_line_at = time.monotonic()
            self.say(f"epoch {record['epoch'] + 1}  step {record['step']}  {self._metrics_text()}")

    @tolerated
    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Print the metrics of an evaluation."""
        epoch, step = record["epoch"] + 1, record["step"]
        if record.get("partial"):
            head = f"evaluation at step {step} (in epoch {epoch}, on the first rows)"
        else:
            head = f"evaluation after epoch {epoch} (step {step})"
        for line in evaluation_lines(head, record):
            self.say(line, style="bold")

    @tolerated
    def event(self, record: Mapping[str, Any]) -> None:
        """Print an event; a completed checkpoint only if RAYREC_DEBUG is set."""
        if record["event"] == "checkpoint":
            self.debug(record["message"])
        else:
            self.say(record["message"], style="yellow")
        if record.get("stacks"):
            self.say(record["stacks"], style="dim")

    @tolerated
    def summary(self, result: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        """Print how the run ended, and the paths of its files."""
        self.close()
        evaluation = result["eval"] or {}
        by_task = evaluation.get("tasks", {})
        tasks = {f", {name}": scores for name, scores in by_task.items()} or {"": evaluation}
        k = cutoff(evaluation)
        rows = [
            *(_scores(tasks, "mrr", f"recall@{k}", f"ndcg@{k}") or _scores(tasks, "auc", "ne")),
            *_scores(tasks, "rmse", "r2"),
            ("epochs, steps", f"{result['epochs']}, {result['steps']:,}"),
            ("workers", str(result["world_size"])),
            ("samples/s", f"{result['samples_per_second']:,.0f}"),
            ("waited for data", f"{result['train']['data_wait_fraction']:.1%} of the training time"),
            *paths.items(),
        ]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"{name:<{width}}  {value}")

    @tolerated
    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _metrics_text(self) -> str:
        if not self._metrics:
            return ""
        speed = self._metrics["samples_per_second"] or 0.0
        by_title = {title: self._metrics[name] for name, title in (("rmse", "RMSE"), ("ne", "NE"))}
        quality = next((f"  {title} {format_metric(x)}" for title, x in by_title.items() if x is not None), "")
        return f"{speed:,.0f} samples/s  loss {format_metric(self._metrics['loss'])}{quality}"


def evaluation_lines(head: str, scores: Mapping[str, Any]) -> list[str]:
    """The metrics of an evaluation after `head`: one line, or one for each of several labels."""
    skipped = f", {scores['skipped']:,} rows skipped" if scores.get("skipped") else ""
    if "tasks" not in scores:
        return [f"{head}: {_quality(scores)}  on {scores['samples']:,} rows{skipped}"]
    width = max(len(name) for name in scores["tasks"])
    tasks = scores["tasks"].items()
    lines = [f"  {name:<{width}}  {_quality(metrics)}  on {metrics['samples']:,} rows" for name, metrics in tasks]
    return [f"{head}{skipped}:", *lines]


def _scores(tasks: Mapping[str, Mapping[str, Any]], *names: str) -> list[tuple[str, str]]:
    """Lines of the summary: each metric for each label that has it; a dash if there was no evaluation."""
    rows = {label: scores for label, scores in tasks.items() if names[0] in scores or (not scores and "ne" in names)}
    return [
        (f"evaluation {SHORT_TITLES.get(name, name)}{label}", format_metric(scores.get(name)))
        for name in names
        for label, scores in rows.items()
    ]


def _quality(scores: Mapping[str, Any]) -> str:
    text = {
        name: format_metric(value) for name, value in scores.items() if value is None or isinstance(value, int | float)
    }
    if "rmse" in scores:
        return f"RMSE {text['rmse']}  MAE {text['mae']}  R² {text['r2']}"
    if "mrr" in scores:
        unseen = ", without seen items" if "mrr/unseen" in scores else ""
        k = cutoff(scores)
        popular = f"; popularity {format_metric(scores['popularity'][f'recall@{k}'])}" if "popularity" in scores else ""
        return f"HR@{k} {text[f'recall@{k}']}{popular}  NDCG@{k} {text[f'ndcg@{k}']} of all items{unseen}"
    grouped = f"GAUC {text['gauc']}  " if "gauc" in scores else ""
    calibration = format_metric(scores["calibration"], 3)
    error = f" (±{scores['auc_error']:.3f})" if "auc_error" in scores else ""
    return f"AUC {text['auc']}{error}  {grouped}NE {text['ne']}  logloss {text['logloss']}  calibration {calibration}"
