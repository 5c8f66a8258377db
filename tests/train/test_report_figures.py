"""The report's figures by hand: cards, ticks, averages, ranges, durations, tables and what is left out of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayrec.distributed import ShardingPlan
from rayrec.distributed.plan.cuts import by_rows
from rayrec.train import write_report
from rayrec.train.report.compare import differing, last_figures
from rayrec.train.report.page import _duration
from rayrec.train.report.plan import plan_section
from rayrec.train.report.run import number, of_task, read_run, task_names
from rayrec.train.report.runs import compare_table, list_table
from rayrec.train.report.svg import (
    Chart,
    _reference,
    _Scale,
    _tick,
    _value_range,
    moving_average,
    svg_chart,
    thin,
    ticks,
)
from rayrec.train.report.tables import evaluations_table, exports_table
from tests.train.test_report import PLAN, event_line, sharding, train_line, write_run

CARD = re.compile(
    r"<div class='name'>([^<]*)</div><div class='value' title='[^']*'>([^<]*)</div><div class='about' title='[^']*'>"
    r"([^<]*)</div>"
)


def cards(page: str) -> dict[str, tuple[str, str]]:
    return {name: (value, about) for name, value, about in CARD.findall(page)}


def numbers_run(folder: Path, result: dict[str, Any] | None = None) -> str:
    """The page of four logged lines and two evaluations of a label that is a number, over an hour."""
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "epoch": 1, "time": 100.0 + step, "rmse": 1.0, "r2": 0.2, "loss": 1.0,
         "samples_per_second": rate, "data_wait_fraction": rate / 1000, "attempt": 2}
        for step, rate in enumerate((400, 100, 300, 200), start=1)
    ]  # fmt: skip
    figures = {"kind": "eval", "epoch": 1, "mae": 0.6, "prediction_mean": 3.25, "label_mean": 3.0, "samples": 1000}
    lines += [
        {**figures, "step": 2, "time": 200.0, "rmse": 0.7, "r2": 0.1},
        {**figures, "step": 4, "time": 3701.0, "rmse": 0.8, "r2": 0.05},
        {**event_line(3, "checkpoint", "whole"), "time": 300.0},
    ]
    return write_report(write_run(folder, lines, result=result)).read_text()


def test_cards_of_a_run_that_goes_on_are_of_what_is_known(tmp_path: Path) -> None:
    page = numbers_run(tmp_path / "run")
    assert cards(page) == {
        "RMSE": ("0.8000", "best 0.7000 at step 2"),
        "R²": ("0.0500", "best 0.1000 at step 2"),
        "MAE": ("0.6000", "evaluated on 1,000 rows"),
        "Mean": ("3.2500", "labels: 3.0000"),
        "Throughput": ("300", "samples / s"),
        "Waiting for data": ("30.0%", "of the time, median"),
        "Workers": ("–", "attempt 2"),
        "Steps": ("4", "in epoch 2, 1 h 0 min"),
        "Checkpoint": ("step 3", "step 3"),
    }
    titles = re.findall(r"<figcaption><b>([^<]*)</b>", page)
    assert titles == [
        "Squared error",
        "RMSE",
        "R²",
        "Samples / s",
        "Time waiting for data",
        "Time waiting in exchanges",
        "Time waiting for checkpoints and evaluations",
    ]


def test_cards_of_a_run_that_has_ended_are_of_its_result(tmp_path: Path) -> None:
    whole = {"data_wait_fraction": 0.125, "seconds": 90.0}
    result = {"epochs": 1, "steps": 5, "world_size": 3, "samples_per_second": 1234.0, "checkpoint": "a/b/step_5/"}
    shown = cards(numbers_run(tmp_path / "run", {**result, "train": whole}))
    assert shown["Throughput"] == ("1,234", "samples / s")
    assert shown["Waiting for data"] == ("12.5%", "of 1 min 30 s of steps")
    assert (shown["Workers"], shown["Checkpoint"]) == (("3", "attempt 2"), ("step_5", "a/b/step_5/"))
    assert shown["Steps"] == ("5", "1 epoch, 1 h 0 min")
    less = {**result, "epochs": 2, "train": {"data_wait_fraction": 0.125}}
    shown = cards(numbers_run(tmp_path / "run", less))
    assert shown["Waiting for data"] == ("12.5%", "of the training time")
    assert shown["Steps"] == ("5", "2 epochs, 1 h 0 min")
    one = write_run(tmp_path / "one", [{**train_line(1, attempt=1), "auc": 0.6}])
    shown = cards(write_report(one).read_text())
    assert shown["AUC"] == ("–", "in training 0.6000"), "where nothing was evaluated"
    assert shown["Workers"] == ("–", "") and shown["Log loss"] == ("–", "")


def test_events_beyond_the_last_200_are_counted(tmp_path: Path) -> None:
    for count, told in [(200, False), (201, True)]:
        events = [event_line(step, "note", f"event number {step};") for step in range(count)]
        page = write_report(write_run(tmp_path / "run", events)).read_text()
        table = page[page.index("<h2>Events</h2>") :]
        assert ("1 earlier events are in metrics.jsonl" in table) is told
        assert ("event number 0;" in table) is not told and f"event number {count - 1};" in table


def test_one_row_that_was_left_out_is_one_row(tmp_path: Path) -> None:
    for counts, text in [((1,), "Left out 1 row that could"), ((1, 1), "Left out 2 rows that could")]:
        lines = [{**event_line(1, "skipped", "x"), "count": count} for count in counts]
        assert text in write_report(write_run(tmp_path / "run", lines)).read_text()


def test_durations_for_people() -> None:
    given = [None, 0.0, 59.4, 59.6, 60, 3599, 3600, 7325]
    assert [_duration(seconds) for seconds in given] == [
        "", "0 s", "59 s", "1 min 0 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "2 h 2 min"
    ]  # fmt: skip


def test_only_finite_numbers_are_numbers() -> None:
    line = {"a": True, "b": "1", "c": float("inf"), "d": 0, "e": 1.5, "f": float("nan")}
    assert [number(line, key) for key in "abcdefg"] == [None, None, None, 0, 1.5, None, None]


def test_figures_of_a_label_stand_in_place_of_those_of_the_first() -> None:
    first = {"step": 1, "auc": 0.5, "ne": 1.0, "tasks": {"a": {"auc": 0.5, "ne": 1.0}, "b": {"auc": 0.6}}}
    last = {"step": 2, "auc": 0.7, "tasks": {"b": {"auc": 0.8}}}
    lines = [first, {"step": 3, "auc": 0.9}, last, {"step": 4, "tasks": None}]
    assert task_names(lines) == ["b"] and task_names(lines[:2]) == ["a", "b"] and task_names([]) == []
    assert [{k: v for k, v in line.items() if k != "tasks"} for line in of_task(lines, "b")] == [
        {"step": 1, "auc": 0.6}, {"step": 2, "auc": 0.8}
    ]  # fmt: skip
    assert [line["step"] for line in of_task(lines, "a")] == [1]


def marked(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[bool]]:
    """Heads of the table of evaluations, and which of its rows are the best."""
    table = evaluations_table([{"step": step, **line} for step, line in enumerate(lines)])
    rows = re.findall(r"<tr( class='best')?><td", table)
    return re.findall(r"<th[^>]*>([^<]*)</th>", table), [bool(row) for row in rows]


def test_the_best_of_several_evaluations_is_marked() -> None:
    binary = ["epoch", "step", "AUC", "normalized entropy", "log loss", "calibration", "rows"]
    assert marked([{"auc": 0.6}, {"auc": 0.8}, {"auc": None}, {"auc": 0.7}]) == (binary, [False, True, False, False])
    assert marked([{"auc": 0.6}]) == (binary, [False])
    assert marked([{"rmse": 2.0}, {"rmse": 1.0}]) == (["epoch", "step", "RMSE", "rows"], [False, True])
    assert marked([{"rmse": 1.0, "r2": 0.5}, {"auc": 0.5, "rmse": 2.0}])[1] == [True, False]
    assert marked([]) == ([], [])


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 5, [0, 1, 2, 3, 4, 5]),
        (0, 12, [0, 2.5, 5, 7.5, 10]),
        (0, 20, [0, 5, 10, 15, 20]),
        (0, 40, [0, 10, 20, 30, 40]),
        (-3, 2, [-3, -2, -1, 0, 1, 2]),
        (0.1, 0.62, [0.2, 0.4, 0.6]),
    ],
)
def test_ticks_are_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == found


def test_ticks_are_short() -> None:
    given = [0.1234567, 9999, 10_000, 999_000, 1e6, 2.5e9, -20_000, 0]
    assert [_tick(value) for value in given] == ["0.123457", "9999", "10k", "999k", "1M", "2.5G", "-20k", "0"]
    assert [_tick(value, percent=True) for value in (0.125, 1, 200)] == ["12.5%", "100%", "20000%"]


def test_averages_by_hand() -> None:
    points = list(enumerate([0.0, 3.0, 6.0, 0.0]))
    assert moving_average(points) == [(0, 0), (1, 3), (2, 3), (3, 3)]
    assert moving_average(points, share=1.0) == [(0, 0), (1, 3), (2, 2.25), (3, 3)]
    assert thin(points, 2) == [(1, 1.5), (3, 3.0)] and thin(points, 3) == thin(points, 2) and thin(points, 4) == points
    assert thin(points[:3], 2) == [(1, 1.5), (2, 6.0)]


def shown(values: Sequence[float], **look: Any) -> tuple[float, float]:
    """The value axis of a chart with these dots alone."""
    return _value_range(Chart(title="x", curve=(), dots=list(enumerate(values)), **look), (), ())


def test_the_axis_holds_the_data_and_what_is_near_it() -> None:
    assert shown([0, 10]) == pytest.approx((-0.8, 10.8))
    assert (shown([0]), shown([5]), shown([-5])) == ((-1, 1), (4.5, 5.5), (-5.5, -4.5))
    for reference, found in [(15, (-1.2, 16.2)), (15.1, (-0.8, 10.8)), (-5, (-6.2, 11.2)), (-5.1, (-0.8, 10.8))]:
        assert shown([0, 10], reference=(reference, "x")) == pytest.approx(found)
    assert shown([0, 10], reference=(4, "x")) == pytest.approx((-0.8, 10.8))
    assert shown([0, 10], low=0.0) == pytest.approx((0, 10.8)) and shown([0, 10], high=30.0) == pytest.approx(
        (-0.8, 30)
    )
    assert shown([0, 10], low=20.0) == (20, 21) and shown([0, 10], low=1.0, high=1.0) == (1, 2)


def test_the_axis_leaves_out_the_start_and_single_spikes() -> None:
    calm: list[tuple[float, float]] = [(step, 1.0 + step % 2) for step in range(48)]
    spikes = [(48.0, 1000.0), (49.0, -1000.0)]
    chart = Chart(title="x", curve=())
    assert _value_range(chart, [*calm, *spikes], calm) == pytest.approx((0.92, 2.08))
    assert _value_range(chart, [*calm[1:], *spikes], calm)[1] > 1000, "1 of 49 may be no spike"
    trend = [(0.0, 500.0), *calm, (50.0, 1.0)]
    assert _value_range(chart, calm, trend) == pytest.approx((0.92, 2.08))
    assert _value_range(chart, calm, trend[:49])[1] > 500, "and the first of 49 no start"
    undone = Chart(title="x", curve=(), undone=[(0.0, 3.0)])
    assert _value_range(undone, calm, calm) == pytest.approx((0.84, 3.16))


def test_a_reference_is_named_where_the_points_are_far() -> None:
    scale = _Scale((0, 10), (0, 1))

    def anchor(*values: float, at: float = 0.5) -> str:
        found = _reference(scale, (at, "base"), list(enumerate(values)))
        return "" if found is None else "end" if found["at_end"] else "start"

    assert [anchor(0.5, 0.9), anchor(0.9, 0.5), anchor(0.9, 0.9), anchor(0.9)] == ["end", "start", "end", "start"]
    assert [anchor(0.5, at=at) for at in (0, 1, -0.01, 1.01)] == ["start", "start", "", ""]
    assert _reference(scale, None, [(0, 1)]) is None


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 1), (4, 4), (32, 32), (33, 17), (100, 25)])
def test_a_plan_is_drawn_with_all_of_its_ranks(ranks: int, numbers: int) -> None:
    table = sharding("row_wise", by_rows("t", 20 * ranks, 8, range(ranks)))
    section = plan_section(ShardingPlan({"ebc": {"t": table}}), {"t": 16})
    assert len(re.findall(r"y='10' text-anchor='middle'>\d+<", section)) == numbers
    (box,) = re.findall(r"<title>(.*?)</title>", section, re.DOTALL)
    which = "0" if ranks == 1 else f"0 to {ranks - 1}"
    assert box == f"t on rank {which}\nrow_wise, fused\nrows 20 x columns 8\n320 B"


def test_long_names_are_cut_in_the_picture_of_the_plan() -> None:
    names = ["n" * 26, "m" * 27]
    tables = {name: sharding("row_wise", by_rows(name, 1000, 8, [0])) for name in names}
    section = plan_section(ShardingPlan({"ebc": tables}), {names[0]: 16})
    assert re.findall(r"text-anchor='end'>([^<]*)<", section) == ["…" + "m" * 25, "n" * 26], "the larger first"


def of_config(folder: Path, config: dict[str, Any], **more: Any) -> Any:
    import yaml

    return read_run(write_run(folder, config=yaml.safe_dump(config), **more))


def test_configs_differ_where_a_value_does(tmp_path: Path) -> None:
    one = {
        "name": "a",
        "storage": {"path": "x", "keep": 3},
        "list": [1, 2],
        "tables": [{"name": "t", "rows": 1}],
        "e": {},
    }
    two = {
        "name": "b",
        "storage": {"path": "y", "keep": 3},
        "list": [1, 3],
        "tables": [{"name": "t", "rows": 1}],
        "f": 1,
    }
    runs = [of_config(tmp_path / run["name"], run) for run in (one, two)]
    assert differing(runs) == {"list": [[1, 2], [1, 3]], "e": [{}, None], "f": [None, 1]}
    assert differing(runs[:1]) == differing([]) == {}


def test_the_last_figures_are_those_of_the_result_where_no_evaluation_stands(tmp_path: Path) -> None:
    run = of_config(tmp_path / "a", {"name": "a"}, result={"eval": {"auc": 0.7}})
    assert last_figures(run) == {"auc": 0.7}
    assert last_figures(of_config(tmp_path / "b", {"name": "b"})) == {}


def test_fields_beyond_thirty_are_counted(tmp_path: Path) -> None:
    for count, caption in [(30, None), (31, "and 1 more fields; see the page")]:
        runs = [of_config(tmp_path / run, {f"f{i}": run for i in range(count)}) for run in ("a", "b")]
        table = compare_table(runs)
        assert table.caption == caption and table.row_count == 2 + 30


def lines_of(count: int, **look: Any) -> list[tuple[str, int]]:
    """Class and points of each line of a chart of so many points."""
    chart = Chart(title="x", curve=[(step, 1.0 + step % 2) for step in range(count)], **look)
    found = re.findall(r"<path class='line ([^']*)' d='([^']*)'", svg_chart(chart, count))
    return [(kind, points.count("L") + 1) for kind, points in found]


def test_long_curves_are_averaged_and_those_of_many_points_smoothed() -> None:
    assert lines_of(600) == [("train", 600)] and lines_of(601) == [("train", 301)]
    assert lines_of(40, smooth=True) == [("train", 40)]
    assert lines_of(41, smooth=True) == [("faint train", 41), ("train", 41)]


def test_exports_link_to_their_page_while_it_is_there(tmp_path: Path) -> None:
    run, export = tmp_path / "run", tmp_path / "a b"
    for folder in (run, export):
        folder.mkdir()
    line = {"path": str(export), "share": 0.5, "within_limits": True, "trained": {"auc": 0.5}, "exported": None}
    assert "<a " not in (table := exports_table([line], run)) and f"title='{export}'>a b (removed)<" in table
    (export / "parity.html").touch()
    table = exports_table([line, {}], run)
    assert f"<a href='../a%20b/parity.html' title='{export}'>a b</a>" in table
    rows = [re.findall(r"<td(?: class='num')?>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert rows[0][1:] == ["–", "", "", "", "–", "–", "–", "–", "no"], "the newest first, whatever it does not have"
    assert rows[1][-5:] == ["50%", "0.500000", "–", "–", "yes"] and exports_table([], run) == ""


def cells(table: Any) -> list[list[str]]:
    columns = [list(column.cells) for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_tables_of_runs_by_hand(tmp_path: Path) -> None:
    scores = {"auc": 0.7, "ne": 0.9, "logloss": 0.5}
    one = of_config(tmp_path / "a", {"name": "a"}, result={"eval": scores, "steps": 1234})
    two = of_config(tmp_path / "b", {"name": "b", "seed": 3}, lines=[{"kind": "eval", "step": 7, "auc": 0.8}])
    table = compare_table([one, two])
    assert [column.justify for column in table.columns] == ["left", "right", "right"]
    assert cells(table) == [
        ["status", "finished", "unfinished"], ["steps", "1,234", "7"], ["auc", "0.7000", "0.8000"],
        ["ne", "0.9000", "–"], ["logloss", "0.5000", "–"], ["seed", "–", "3"],
    ]  # fmt: skip
    heads = [(column.header, column.justify, column.no_wrap) for column in list_table([]).columns]
    assert heads == [
        ("run", "left", True), ("status", "left", False), ("began", "left", False), ("minutes", "right", False),
        ("steps", "right", False), ("workers", "right", False), ("samples/s", "right", False), ("AUC", "right", False),
        ("NE", "right", False),
    ]  # fmt: skip
    planned = write_run(tmp_path / "c", [train_line(1)], plan=PLAN)
    assert cells(list_table([read_run(planned)]))[0][4:6] == ["1", "2"]
