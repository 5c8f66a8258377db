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

from rayrec.distributed import ParameterSharding, Shard, ShardingPlan
from rayrec.distributed.plan.cuts import by_cols, by_rows, everywhere, whole
from rayrec.train import write_report
from rayrec.train.report.plan import memory_section, plan_section, time_section
from rayrec.train.report.run import history, read_run
from rayrec.train.report.runs import compare_table, find_runs, list_table
from rayrec.train.report.svg import Chart, Mark, moving_average, svg_chart, thin, ticks

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


PLAN = ShardingPlan(
    {
        "sparse.ebc": {
            "user": sharding("row_wise", by_rows("user", 944, 32, [0, 1])),
            "item": sharding("column_wise", by_cols("item", 1683, 32, [0, 1])),
            "city": sharding("table_wise", whole("city", 5000, 16, [1])),
            "genre": sharding("data_parallel", everywhere("genre", 20, 16, [0, 1])),
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
    plan = ShardingPlan({evil: {evil: sharding("table_wise", whole(evil, 10, 4, [0]))}})
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
    out = io.StringIO()
    Console(file=out, width=150).print(compare_table(runs[:2]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [["status", "unfinished", "unfinished"], ["steps", "90", "80"]]
    with pytest.raises(ValueError, match="nowhere: not a folder"):
        find_runs(tmp_path / "nowhere")


def test_history_drops_what_was_done_again() -> None:
    lines = [{"step": step, "time": i} for i, step in enumerate([1, 2, 3, 4, 3, 4, 5])]
    standing, undone = history(lines)
    assert [line["time"] for line in standing] == [0, 1, 4, 5, 6]
    assert [line["time"] for line in undone] == [2, 3]


def test_status_and_times(tmp_path: Path) -> None:
    run = read_run(full_run(tmp_path / "run"))
    assert (run.status, run.steps, run.name, len(run.events)) == ("finished", 90, "first", 2)
    assert run.first_time == 1.7e9 + 1 and run.last_time == 1.7e9 + 150


numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - width * 1e-3 <= tick <= high + width * 1e-3 for tick in found)


def test_long_curves_are_thinned_and_smoothed() -> None:
    curve = [(i, float(i % 2)) for i in range(10_001)]
    short = thin(curve, 600)
    assert len(short) <= 600 and short[-1][0] == 10_000
    assert thin(curve[:10], 600) == curve[:10]
    assert moving_average([(i, 3.0) for i in range(50)]) == [(i, 3.0) for i in range(50)]


def test_large_plans_are_cut_short() -> None:
    tables = {f"t{i}": sharding("row_wise", by_rows(f"t{i}", 10_000, 8, range(100))) for i in range(70)}
    section = plan_section(ShardingPlan({"ebc": tables}), {})
    Balanced(section)
    assert "and 10 smaller tables" in section and "t69 on rank 0 to 99" in section
    assert "rank 69: 69 B" in memory_section([{"rank": r, "weights_bytes": r} for r in range(70)])
    assert "busiest rank: 1.50 × the mean" in time_section([{"rank": 0, "ids_s": 0.003}, {"rank": 1, "ids_s": 0.001}])
    assert memory_section([{"rank": 0}])
