"""Lines and tables on the console: progress, evaluations, the plan, the summary, and where they are shown."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rayrec._runtime.ranks import ranks_text
from rayrec.train import Display, StorageError
from rayrec.train.driver.console import MIN_S_BETWEEN_LINES, WIDTH_OF_FILES, evaluation_lines
from rayrec.train.terminal import _sizes, format_metric, host_lines, memory_lines, plan_table
from tests.train.test_driver import TRAIN


def test_what_is_said_at_the_end() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=150))
    scores = {"auc": 0.75, "ne": 0.8, "logloss": 0.6, "calibration": 1.0, "samples": 1000}
    display.evaluation({**scores, "epoch": 1, "step": 32, "skipped": 7})
    display.evaluation({**scores, "epoch": 1, "step": 32, "tasks": {"buy": {**scores, "gauc": 0.7}, "like": scores}})
    display.evaluation({**scores, "epoch": 1, "step": 40, "partial": True})
    figures = {"epochs": 2, "steps": 3200, "world_size": 4, "samples_per_second": 12345.6}
    result = {**figures, "train": {"data_wait_fraction": 0.0521}, "eval": scores}
    display.summary(result, {"report": "runs/a/report.html"})
    display.summary({**result, "eval": {"tasks": {"buy": scores}}}, {})
    display.summary({**result, "eval": None}, {})
    display.close()
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "evaluation after epoch 2 (step 32): AUC 0.7500  NE 0.8000  logloss 0.6000  calibration 1.000  "
        "on 1,000 rows, 7 rows skipped",
        "evaluation after epoch 2 (step 32):",
        "  buy   AUC 0.7500  GAUC 0.7000  NE 0.8000  logloss 0.6000  calibration 1.000  on 1,000 rows",
        "  like  AUC 0.7500  NE 0.8000  logloss 0.6000  calibration 1.000  on 1,000 rows",
        "evaluation at step 40 (in epoch 2, on the first rows): AUC 0.7500  NE 0.8000  logloss 0.6000  "
        "calibration 1.000  on 1,000 rows",
        "evaluation AUC   0.7500",
        "evaluation NE    0.8000",
        "epochs, steps    2, 3,200",
        "workers          4",
        "samples/s        12,346",
        "waited for data  5.2% of the training time",
        "report           runs/a/report.html",
        "evaluation AUC, buy  0.7500",
        "evaluation NE, buy   0.8000",
        "epochs, steps        2, 3,200",
        "workers              4",
        "samples/s            12,346",
        "waited for data      5.2% of the training time",
        "evaluation AUC   –",
        "evaluation NE    –",
        "epochs, steps    2, 3,200",
        "workers          4",
        "samples/s        12,346",
        "waited for data  5.2% of the training time",
    ]


def test_the_plan_table_counts_what_it_leaves_out() -> None:
    shard = {"shard_offsets": [0, 0], "shard_sizes": [500, 8], "placement": "rank:0/cpu"}
    other = {"shard_offsets": [500, 0], "shard_sizes": [400, 8], "placement": "rank:3/cpu"}
    sharding = {"sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0, 1, 2, 5], "shards": [shard, other]}
    plan: dict[str, Any] = {"plan": {"bags": {f"table {i}": sharding for i in range(7)}}}
    out = io.StringIO()
    Console(file=out, width=150).print(plan_table(plan, limit=3))
    text = out.getvalue()
    for part in ("table 2", "900 × 8", "2 of 500 × 8", "0–2, 5", "and 4 more tables"):
        assert part in text
    assert "table 3" not in text


def test_a_plan_of_many_ranks_has_few_lines() -> None:
    ranks = [
        {"rank": rank, "weights_bytes": (1 + rank % 5) << 30, "optimizer_bytes": 0, "dense_bytes": 1 << 20}
        for rank in range(1000)
    ]
    assert memory_lines({"memory": ranks[:2]})[1] == "rank 1: 2.0 GiB weights, 0 B optimizer, 1.0 MiB dense"
    largest, smallest = memory_lines({"memory": ranks})
    assert largest == "largest rank of 1,000 (999): 5.0 GiB weights, 0 B optimizer, 1.0 MiB dense"
    assert smallest == "smallest rank of 1,000 (0): 1.0 GiB weights, 0 B optimizer, 1.0 MiB dense"


def test_what_cannot_be_written_is_told_with_its_reason() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    errors = StorageError("too far"), OSError(28, "No space left on device"), OSError("odd"), KeyError("auc")
    for number, error in enumerate(errors):
        for _ in range(2):  # reported once
            with display.writing(Path(f"a/{number}")):
                raise error
    assert out.getvalue().splitlines() == [
        "Could not write a/0 (StorageError: too far). The run continues.",
        "Could not write a/1 (No space left on device). The run continues.",
        "Could not write a/2 (OSError: odd). The run continues.",
        "Could not write a/3 (KeyError: 'auc'). The run continues.",
    ]


def test_lines_of_progress_come_at_most_once_a_second() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200))
    display.train({**TRAIN, "step": 1})
    display.train({**TRAIN, "step": 2})
    assert MIN_S_BETWEEN_LINES == 1.0
    display._last_line_at = time.monotonic() - MIN_S_BETWEEN_LINES
    display.train({"epoch": 2, "step": 3, "samples_per_second": None, "loss": None, "rmse": 0.25})
    display.progress({"step": 4, "total_steps": 9, "epoch": 0, "epochs": 1})
    assert out.getvalue().splitlines() == [
        "epoch 1  step 1  1,234 samples/s  loss 0.5000  NE 0.9000",
        "epoch 3  step 3  0 samples/s  loss –  RMSE 0.2500",
    ]
    assert (format_metric(None), format_metric(0.0), format_metric(1.25, 1)) == ("–", "0.0000", "1.2")


def test_a_long_line_stays_one_line() -> None:
    out = io.StringIO()
    Display(Console(file=out, width=40)).say("one two three " * 20)
    assert out.getvalue() == "one two three " * 20 + "\n"


def test_a_file_is_as_wide_as_its_lines_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert Display().console.width == WIDTH_OF_FILES == 120
    assert Display(Console(file=io.StringIO(), width=50)).console.width == 50
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, to rich
    assert Display().console.width == 40


def test_checkpoints_are_shown_to_who_asks_and_stacks_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(record: dict[str, Any]) -> str:
        out = io.StringIO()
        Display(Console(file=out, width=200)).event(record)
        return out.getvalue()

    saved = {"event": "checkpoint", "message": "checkpoint of step 3 is complete"}
    hang = {"event": "hang", "message": "rank 1 has not moved", "stacks": "thread a:\n  at [red]x"}
    for value, seen in [("", False), ("0", False), ("no", False), ("False", False), ("1", True)]:
        monkeypatch.setenv("RAYREC_DEBUG", value)
        assert shown(saved) == ("checkpoint of step 3 is complete\n" if seen else "")
        assert shown(hang) == "rank 1 has not moved\nthread a:\n  at [red]x\n"
    monkeypatch.delenv("RAYREC_DEBUG")
    assert shown(saved) == ""


def test_evaluations_of_numbers_in_words() -> None:
    stars = {"rmse": 0.5, "mae": 0.25, "r2": None, "samples": 1234, "skipped": 0}
    assert evaluation_lines("head", stars) == ["head: RMSE 0.5000  MAE 0.2500  R² –  on 1,234 rows"]
    like = {"auc": 0.5, "ne": 1.0, "logloss": 0.5, "calibration": 1.25, "samples": 7}
    far = {"mrr": 0.5, "samples": 9, "recall@100": 0.75, "ndcg@100": 0.25, "popularity": {"recall@100": 0.5}}
    assert evaluation_lines("head", far) == [
        "head: HR@100 0.7500; popularity 0.5000  NDCG@100 0.2500 of all items  on 9 rows"
    ]
    assert evaluation_lines("head", {**stars, "skipped": 1200, "tasks": {"stars": stars, "b": like}}) == [
        "head, 1,200 rows skipped:",
        "  stars  RMSE 0.5000  MAE 0.2500  R² –  on 1,234 rows",
        "  b      AUC 0.5000  NE 1.0000  logloss 0.5000  calibration 1.250  on 7 rows",
    ]
    out = io.StringIO()
    result = {"epochs": 1, "steps": 2, "world_size": 1, "samples_per_second": 3.0, "train": {"data_wait_fraction": 0}}
    Display(Console(file=out, width=200)).summary({**result, "eval": {"tasks": {"stars": stars, "b": like}}}, {})
    assert out.getvalue().splitlines()[:4] == [
        "evaluation AUC, b       0.5000",
        "evaluation NE, b        1.0000",
        "evaluation RMSE, stars  0.5000",
        "evaluation R², stars    –",
    ]


def test_a_plan_of_just_as_many_tables_is_shown_whole() -> None:
    shard = {"shard_offsets": [0, 0], "shard_sizes": [5, 8], "placement": "rank:0/cpu"}
    one = {"sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0], "shards": [shard]}
    for count, caption in [(60, None), (61, "and 1 more tables")]:
        table = plan_table({"plan": {"bags": {f"t{i}": one for i in range(count)}}})
        assert (table.row_count, table.caption) == (60, caption)
        assert [(column.header, column.justify) for column in table.columns] == [
            ("table", "left"), ("rows × dim", "right"), ("sharding", "left"), ("kernel", "left"), ("shards", "right"),
            ("ranks", "right"),
        ]  # fmt: skip


def test_the_plans_table_in_words() -> None:
    shards = [{"shard_sizes": [842, 32]}, {"shard_sizes": [10, 64]}]
    assert _sizes(shards) == "2 of 842 × 32"
    assert [ranks_text(ranks) for ranks in ([0, 1, 2, 3, 6], [4], [], [1, 3, 4])] == ["0–3, 6", "4", "", "1, 3–4"]
    memory = {"rank": 3, "weights_bytes": 1500, "optimizer_bytes": 10, "dense_bytes": 2_000_000}
    assert memory_lines({"memory": [memory]}) == ["rank 3: 1.5 KiB weights, 10 B optimizer, 1.9 MiB dense"]
    assert memory_lines({}) == host_lines({}) == []
    small = {"ranks": 1, "memory_bytes": 2**30, "cpus": 2.5, "gpu": None}
    large = {"ranks": 2, "memory_bytes": 2**30, "cpus": 4.0, "gpu": "H100"}
    hosts = {"planned_for": {"hosts": [small, large, small], "speeds": "presets", "exchange": "one"}}
    assert host_lines(hosts) == [
        "planned for 2 × host of 1 rank (1.0 GiB, 2.5 CPUs), host of 2 ranks (1.0 GiB, 4 CPUs, H100); speeds: presets",
        "vectors: one",
    ]
