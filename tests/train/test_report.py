"""The report of runs that went well, went wrong, or have only begun."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rayrec.distributed import ParameterSharding, Shard, ShardingPlan, Span
from rayrec.train import write_report
from rayrec.train.report.run import read_run
from rayrec.train.report.runs import compare_table, find_runs, list_table
from rayrec.train.report.svg import (
    Chart,
    Mark,
    moving_average,
    svg_chart,
    thin,
    ticks,
)

VOID = {"meta", "link", "br"}


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open; collects attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data + "\n"


def train_line(step: int, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "time": 1.7e9 + step,
        "step": step,
        "epoch": 0,
        "samples": step * 64,
        "samples_per_second": 5000.0,
        "loss": 0.7 - step / 1000,
        "ne": 1.02 - step / 1000,
        "auc": None if step < 3 else 0.5 + step / 1000,
        "lr": {"dense": 0.001, "sparse": 0.05},
        "data_wait_fraction": 0.1,
        "attempt": attempt,
        **more,
    }


def eval_line(step: int, auc: float) -> dict[str, Any]:
    figures = {"auc": auc, "ne": 0.93, "logloss": 0.612, "calibration": 1.01, "samples": 20_000}
    return {"kind": "eval", "time": 1.7e9 + step, "step": step, "epoch": 0, **figures, "attempt": 0}


def event_line(step: int, event: str, message: str) -> dict[str, Any]:
    return {"kind": "event", "time": 1.7e9 + step, "step": step, "event": event, "message": message, "attempt": 0}


def sharding(kind: str, shards: Sequence[Shard]) -> ParameterSharding:
    return ParameterSharding(sharding_type=kind, compute_kernel="fused", shards=tuple(shards))


def shard(table: str, rank: int, rows: tuple[int, int], cols: tuple[int, int]) -> Shard:
    return Shard(table=table, rows=Span(*rows), cols=Span(*cols), rank=rank)


def by_rows(table: str, rows: int, dim: int, ranks: Sequence[int]) -> list[Shard]:
    """Equal blocks of rows."""
    block = rows // len(ranks)
    return [shard(table, rank, (block * place, block * (place + 1)), (0, dim)) for place, rank in enumerate(ranks)]


PLAN = ShardingPlan(
    {
        "sparse.ebc": {
            "user": sharding("row_wise", by_rows("user", 944, 32, [0, 1])),
            "item": sharding(
                "column_wise", [shard("item", rank, (0, 1683), (16 * rank, 16 * rank + 16)) for rank in (0, 1)]
            ),
            "city": sharding("table_wise", [shard("city", 1, (0, 5000), (0, 16))]),
            "genre": sharding("data_parallel", [shard("genre", rank, (0, 20), (0, 16)) for rank in (0, 1)]),
        }
    }
)
MEMORY = [{"rank": r, "weights_bytes": 2**20 * (r + 1), "optimizer_bytes": 2**15, "dense_bytes": 2**18} for r in (0, 1)]


def write_run(
    path: Path,
    lines: Sequence[Mapping[str, Any]] = (),
    plan: ShardingPlan | None = None,
    config: str | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if lines:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if plan:
        (path / "plan.json").write_text(json.dumps({**plan.to_dict(), "memory": MEMORY}))
    if config:
        (path / "config.yaml").write_text(config)
    if result:
        (path / "result.json").write_text(json.dumps(result))
    return path


def full_run(path: Path) -> Path:
    lines = [train_line(step) for step in range(1, 61)]
    lines += [event_line(40, "checkpoint", "step 40"), event_line(40, "recovered", "rank 1 died; on from step 40")]
    lines += [train_line(step, attempt=1, time=1.7e9 + 60 + step) for step in range(41, 91)]
    lines += [eval_line(45, 0.69), eval_line(90, 0.7041)]
    result = {
        "eval": {key: eval_line(90, 0.7041)[key] for key in ("auc", "ne", "logloss", "calibration", "samples")},
        "train": {"loss": 0.6},
        "world_size": 2,
        "epochs": 2,
        "steps": 90,
        "samples_per_second": 5123.4,
        "checkpoint": "runs/first/checkpoints/step_00000090",
    }
    return write_run(path, lines, PLAN, "name: first\ntables:\n- {name: user}\n", result)


def test_full_run(tmp_path: Path) -> None:
    run = full_run(tmp_path / "first")
    report = write_report(run)
    assert report == run / "report.html"
    page = report.read_text()
    text = Balanced(page).text
    for part in ("first", "finished", "0.7041", "0.9300", "0.6120", "1.0100", "5,123", "20,000", "2 epochs"):
        assert part in text, part
    for part in ("step_00000090", "Recovered once: rank 1 died", "best 0.7041 at step 90", "row-wise", "1,683"):
        assert part in text, part
    assert "done again" in text, "the twenty steps that were lost must be shown as such"
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_needs_no_network(tmp_path: Path) -> None:
    page = write_report(full_run(tmp_path / "run")).read_text()
    links = [value for name, value in Balanced(page).attributes if name in ("src", "href", "srcset", "action")]
    assert links == ["data:,"]
    assert "@import" not in page and "url(" not in page
    assert set(re.findall(r"https?://[\w./]+", page)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("missing", ["config.yaml", "plan.json", "metrics.jsonl", "result.json"])
def test_a_missing_piece_leaves_the_others(tmp_path: Path, missing: str) -> None:
    run = full_run(tmp_path / "first")
    (run / missing).unlink()
    text = Balanced(write_report(run).read_text()).text
    assert "first" in text and "Not shown" not in text
    assert ("unfinished" in text) == (missing == "result.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("plan.json", "{", "plan.json: not JSON"),
        ("plan.json", '{"version": 99}', "plan.json: plan version 99"),
        ("result.json", "[]", "result.json: not a JSON object"),
        ("config.yaml", "a: [", "config.yaml: not YAML"),
        ("metrics.jsonl", '{"kind": "train", "st', "metrics.jsonl: 1 of 1 lines"),
    ],
)
def test_a_damaged_piece_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    run = full_run(tmp_path / "first")
    (run / name).write_text(content)
    text = Balanced(write_report(run).read_text()).text
    assert f"Not shown: {said}" in text


def test_the_config_is_shown_as_it_is(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", config="name: \"a\"\nmodel:\n  'x': 1 < 2\n")).read_text()
    assert "<pre><b>name</b>: \"a\"\n<b>model</b>:\n  'x': 1 &lt; 2\n</pre>" in page


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    text = Balanced(write_report(write_run(tmp_path / "new", config="name: new\n")).read_text()).text
    assert "unfinished" in text and "nothing recorded yet" in text
    one = write_run(tmp_path / "one", [train_line(1)])
    assert "still running" in Balanced(write_report(one).read_text()).text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    lines = [train_line(1), event_line(1, "failed", "ratings.parquet: row 7: label 3")]
    text = Balanced(write_report(write_run(tmp_path / "bad", lines)).read_text()).text
    assert "The run failed. ratings.parquet: row 7: label 3" in text


def test_a_run_taken_up_again_is_not_failed_any_more(tmp_path: Path) -> None:
    lines = [train_line(1), event_line(1, "interrupted", "stopped by the user"), train_line(2)]
    assert read_run(write_run(tmp_path / "run", lines[:2])).status == "interrupted"
    assert read_run(write_run(tmp_path / "run", lines)).status == "unfinished"


def test_the_last_line_says_how_a_run_ended_though_clocks_of_its_hosts_differ(tmp_path: Path) -> None:
    lines = [train_line(step, time=1.7e9 + 1860) for step in (1, 2)]
    lines.append(event_line(2, "failed", "no room"))
    for brief in (False, True):
        assert read_run(write_run(tmp_path / "run", lines), brief).status == "failed"


def test_a_diverged_run(tmp_path: Path) -> None:
    lines = [train_line(step, loss=float("nan") if step > 5 else 0.7, ne=float("inf")) for step in range(1, 20)]
    page = write_report(write_run(tmp_path / "run", lines)).read_text()
    Balanced(page)
    assert not re.search(r"\bnan\b", page[page.index("<main>") : page.index("<script>")])


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'& onclick='x'"
    plan = ShardingPlan({evil: {evil: sharding("table_wise", [shard(evil, 0, (0, 10), (0, 4))])}})
    tasks = {evil: {"ne": 1.0, "auc": 0.5}}
    lines = [train_line(step, tasks=tasks, lr={evil: 1 / step}) for step in (1, 2)]
    lines += [event_line(1, evil, evil), {**eval_line(1, 0.5), "epoch": evil}]
    export = {"path": f"{tmp_path}/{evil}", "version": evil, "tables": evil, "dense": evil, "target": evil}
    run = write_run(tmp_path / "run", lines, plan, f"name: {json.dumps(evil)}\n", {"checkpoint": evil, "steps": 1})
    (run / "exports.jsonl").write_text(json.dumps(export))
    page = write_report(run).read_text()
    assert page.count("<script>") == 1
    assert "onclick" not in dict(Balanced(page).attributes)


def test_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: not a folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config.yaml"):
        write_report(tmp_path)
    (full_run(tmp_path / "run") / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"report.html: cannot be written \(Is a directory\)"):
        write_report(tmp_path / "run")


def test_runs_are_listed_the_last_one_first(tmp_path: Path) -> None:
    for name, first in (("a", 10), ("c", 30), ("b", 20)):
        write_run(tmp_path / name, [train_line(first), train_line(first + 60)], config=f"name: {name}\n")
    (tmp_path / "no run").mkdir()
    begun = write_run(tmp_path / "begun", config="name: begun\n")
    runs = find_runs(tmp_path)
    assert [run.name for run in runs] == ["c", "b", "a", "begun"]
    out = io.StringIO()
    Console(file=out, width=150).print(list_table([*runs[:1], read_run(full_run(tmp_path / "first")), read_run(begun)]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert [row[:2] + row[3:] for row in rows] == [
        ["c", "unfinished", "1.0", "90", "–", "–", "–", "–"],
        ["first", "finished", "2.5", "90", "2", "5,123", "0.7041", "0.9300"],
        ["begun", "unfinished", "–", "0", "–", "–", "–", "–"],
    ]
    found = {**eval_line(9, 0.5), "auc": None, "ne": None, "hr@10": 0.0803, "ndcg@10": 0.0428}
    finder = write_run(tmp_path / "finder", [train_line(9), found], config="name: finder\n")
    out = io.StringIO()
    Console(file=out, width=150).print(list_table([read_run(finder)]))
    assert re.search(r"samples/s +┃ +HR@10 +┃ +NDCG@10 ┃", out.getvalue()) and "0.0428" in out.getvalue()
    out = io.StringIO()
    Console(file=out, width=150).print(compare_table(runs[:2]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [["status", "unfinished", "unfinished"], ["steps", "90", "80"]]
    with pytest.raises(ValueError, match="nowhere: not a folder"):
        find_runs(tmp_path / "nowhere")


def test_status_and_times(tmp_path: Path) -> None:
    run = read_run(full_run(tmp_path / "run"))
    assert (run.status, run.steps, run.name, len(run.events)) == ("finished", 90, "first", 2)
    assert run.first_time == 1.7e9 + 1 and run.last_time == 1.7e9 + 150


numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@settings(max_examples=60)
@given(st.lists(numbers, max_size=40), st.lists(numbers, max_size=3), numbers, st.booleans())
def test_any_numbers_can_be_drawn(values: list[float], dots: list[float], reference: float, smooth: bool) -> None:
    chart = Chart(
        title="any",
        curve=[(i + 1, v) for i, v in enumerate(values)],
        undone=[(i + 1, v) for i, v in enumerate(values[:5])],
        dots=[(i * 3, v) for i, v in enumerate(dots)],
        marks=[Mark(step=1, kind="recovered", text="x")],
        smooth=smooth,
        reference=(reference, "reference"),
    )
    svg = svg_chart(chart, last_step=len(values))
    Balanced(svg)
    for y in re.findall(r" c?y[12]?='(-?[\d.]+)'", svg):
        assert -300 <= float(y) <= 500


@settings(max_examples=60)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - width * 1e-3 <= tick <= high + width * 1e-3 for tick in found)


def test_large_plans_are_cut_short(tmp_path: Path) -> None:
    tables = {f"t{i}": sharding("row_wise", by_rows(f"t{i}", 10_000, 8, range(100))) for i in range(70)}
    memory = [{"rank": 0}, *({"rank": r, "weights_bytes": r} for r in range(1, 70))]
    times = [{"rank": 0, "ids_s": 0.003}, {"rank": 1, "ids_s": 0.001}]
    run = write_run(tmp_path, plan=ShardingPlan({"ebc": tables}), config="name: a\n")
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "memory": memory, "time": times}))
    page = write_report(run).read_text()
    Balanced(page)
    for part in ("and 10 smaller tables", "t69 on rank 0 to 99", "rank 69: 69 B", "busiest rank: 1.50 × the mean"):
        assert part in page


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


def test_averages_by_hand() -> None:
    points = list(enumerate([0.0, 3.0, 6.0, 0.0]))
    assert moving_average(points) == [(0, 0), (1, 3), (2, 3), (3, 3)]
    assert moving_average(points, share=1.0) == [(0, 0), (1, 3), (2, 2.25), (3, 3)]
    assert thin(points, 2) == [(1, 1.5), (3, 3.0)] and thin(points, 3) == thin(points, 2) and thin(points, 4) == points
    assert thin(points[:3], 2) == [(1, 1.5), (2, 6.0)]


def picture_of(folder: Path, tables: dict[str, ParameterSharding], of_16_bits: str) -> str:
    """The picture of a plan on the page of its run."""
    config = f"name: a\ntables:\n- {{name: {of_16_bits}, data_type: fp16}}\n"
    page = write_report(write_run(folder / "run", plan=ShardingPlan({"ebc": tables}), config=config)).read_text()
    (picture,) = (one for one in re.findall(r"<svg.*?</svg>", page, re.DOTALL) if "fused" in one)
    return picture


@pytest.mark.parametrize(("ranks", "numbers"), [(1, 1), (4, 4), (32, 32), (33, 17), (100, 25)])
def test_a_plan_is_drawn_with_all_of_its_ranks(tmp_path: Path, ranks: int, numbers: int) -> None:
    table = sharding("row_wise", by_rows("t", 20 * ranks, 8, range(ranks)))
    section = picture_of(tmp_path, {"t": table}, "t")
    assert len(re.findall(r"y='10' text-anchor='middle'>\d+<", section)) == numbers
    (box,) = re.findall(r"<title>(.*?)</title>", section, re.DOTALL)
    which = "0" if ranks == 1 else f"0 to {ranks - 1}"
    assert box == f"t on rank {which}\nrow_wise, fused\nrows 20 x columns 8\n320 B"


def test_long_names_are_cut_in_the_picture_of_the_plan(tmp_path: Path) -> None:
    names = ["n" * 26, "m" * 27]
    tables = {name: sharding("row_wise", by_rows(name, 1000, 8, [0])) for name in names}
    section = picture_of(tmp_path, tables, names[0])
    assert re.findall(r"text-anchor='end'>([^<]*)<", section) == ["…" + "m" * 25, "n" * 26], "the larger first"


def lines_of(count: int, **look: Any) -> list[tuple[str, int]]:
    """Class and points of each line of a chart of so many points."""
    chart = Chart(title="x", curve=[(step, 1.0 + step % 2) for step in range(count)], **look)
    found = re.findall(r"<path class='line ([^']*)' d='([^']*)'", svg_chart(chart, count))
    return [(kind, points.count("L") + 1) for kind, points in found]


def test_long_curves_are_averaged_and_those_of_many_points_smoothed() -> None:
    assert lines_of(600) == [("train", 600)] and lines_of(601) == [("train", 301)]
    assert lines_of(40, smooth=True) == [("train", 40)]
    assert lines_of(41, smooth=True) == [("faint train", 41), ("train", 41)]


def test_reliability_is_drawn_for_each_label_against_the_diagonal(tmp_path: Path) -> None:
    bands = [
        {"label": label, "weight": 50.0, "predicted": mean, "observed": mean * factor}
        for label, factor in (("click", 1.0), ("buy", 2.0))
        for mean in (0.01, 0.05, 0.2)
    ]
    records = [
        {"kind": "eval", "step": step, "epoch": 1, "auc": 0.7, "samples": 300, "reliability": shown}
        for step, shown in ((10, bands[:1]), (20, [*bands, {"label": "click", "weight": None}]))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report(tmp_path).read_text()
    Balanced(page)
    section = page.split("Reliability of the last evaluation")[1].split("</div>\n<p class='note'>")[0]
    dots = re.findall(r"cx='([\d.]+)' cy='([\d.]+)' r='4.5'><title>predicted ([\d.]+), observed ([\d.]+)", section)
    assert [(float(mean), float(share)) for _, _, mean, share in dots] == [
        (band["predicted"], band["observed"]) for band in bands
    ]
    assert re.findall("<figcaption><b>(.*?)</b>", section) == ["click", "buy"]
    line = re.search(r"class='reference' x1='(\S+)' x2='(\S+)' y1='(\S+)' y2='(\S+)'", section)
    assert line is not None
    left, right, bottom, top = (float(value) for value in line.groups())
    for x, y, mean, share in dots:  # on the diagonal if calibrated, above it if the event is more frequent
        diagonal = bottom + (float(x) - left) / (right - left) * (top - bottom)
        assert (abs(float(y) - diagonal) < 0.2) == (mean == share) and float(y) <= diagonal + 0.2
