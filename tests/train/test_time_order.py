"""Training in the order of time: each window is evaluated before the model trains on it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch.testing import assert_close

from rayrec.cli import run
from rayrec.data import DataSet, Manifest, in_time_order
from rayrec.storage.retries import Patience
from rayrec.train import Display, Trainer, parse_config
from tests.train import small
from tests.train.row_log import noted, train_noted, with_row_ids
from tests.train.test_exactly_once import committed, launch_on_ranks
from tests.train.test_progressive import fit

WINDOWS = 6
ROWS = 90


def write(folder: Path, windows: int, first: int = 0) -> None:
    """Rows at times that ascend, `ROWS` an hour, over files that end inside windows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = small.table(ROWS * WINDOWS * 2, seed=0)
    times = pa.array([1_700_002_800 + row * 3600 // ROWS for row in range(len(rows))])
    rows = rows.set_column(rows.schema.get_field_index("at"), "at", times)
    folder.mkdir(exist_ok=True)
    start, stop = first * ROWS, windows * ROWS
    for number, (begin, end) in enumerate(((start, start + 130), (start + 130, stop))):
        part = rows.slice(begin, end - begin)
        pq.write_table(part, folder / f"{first}-{number}.parquet", row_group_size=40)


def raw_of(folder: Path, **windows: Any) -> dict[str, Any]:
    raw = with_row_ids(folder, 2 * WINDOWS * ROWS, trainer__batch_size=32)
    raw["schema"]["timestamp"] = {"column": "at"}
    raw["data"] |= {"train": str(folder / "log"), "eval": None, "order": "time", "windows": windows}
    return raw


def evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "small" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "eval"]


@pytest.mark.parametrize("windows", [{"time": "1h"}, {"rows": ROWS}])
def test_a_window_is_evaluated_before_it_is_trained_on(tmp_path: Path, windows: Any) -> None:
    write(tmp_path / "log", WINDOWS)
    raw = raw_of(tmp_path, **windows)
    result = fit(raw, tmp_path / "first")
    assert result.epochs == WINDOWS - 1
    steps = noted(tmp_path / "first", 0)
    assert [row for step in steps for row in step] == list(range((WINDOWS - 1) * ROWS)), "the last is evaluated only"
    assert [len(step) for step in steps] == [32, 32, 26] * (WINDOWS - 1)
    told = evaluations(tmp_path)
    assert [(record["epoch"], record["samples"]) for record in told] == [(n, ROWS) for n in range(WINDOWS - 1)]
    starts = [f"2023-11-14T{n:02}:00:00" for n in range(24)] + [f"2023-11-15T{n:02}:00:00" for n in range(24)]
    if "time" in windows:
        assert [record["window"] for record in told] == starts[24:][: WINDOWS - 1]
    else:
        assert told[0]["window"] == "row 90 (row 90 of 0-0.parquet)"
        assert told[1]["window"] == "row 180 (row 50 of 0-1.parquet)"
    report = result.folder.joinpath("report.html").read_text()
    assert "evaluated window" in report and told[-1]["window"] in report
    write(tmp_path / "log", WINDOWS + 2, first=WINDOWS)
    assert fit(raw, tmp_path / "second").epochs == WINDOWS + 1
    later = [row for step in noted(tmp_path / "second", 0) for row in step]
    assert later == list(range((WINDOWS - 1) * ROWS, (WINDOWS + 1) * ROWS)), "the run goes on with the new windows"


def test_evaluations_every_few_windows_and_of_a_share(tmp_path: Path) -> None:
    write(tmp_path / "log", WINDOWS)
    raw = raw_of(tmp_path, time="1h", eval_every=2, eval_share=0.3)
    result = Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit()
    told = evaluations(tmp_path)
    assert [record["epoch"] for record in told] == [1, 3, 4], "the last window is always evaluated"
    assert all(ROWS * 0.3 <= record["samples"] <= ROWS * 0.3 + 32 for record in told)
    assert result.eval == {name: value for name, value in told[-1].items() if name in result.eval}
    assert run(["evaluate", str(result.folder), "--data", str(tmp_path / "log")]) == 0


def test_a_stop_in_the_middle_of_a_window_changes_nothing(tmp_path: Path) -> None:
    """The second launch has other row groups after the current window: files may be added."""
    write(tmp_path / "log", WINDOWS)
    raw = raw_of(tmp_path, time="1h")
    raw["trainer"]["max_steps"] = 7
    fit(raw, tmp_path / "first")
    raw["trainer"]["max_steps"] = None
    result = fit(raw, tmp_path / "second")
    rows = [row for part in ("first", "second") for step in noted(tmp_path / part, 0) for row in step]
    assert rows == list(range((WINDOWS - 1) * ROWS))
    whole = raw_of(tmp_path, time="1h") | {"name": "whole"}
    assert fit(whole, tmp_path / "whole").eval == result.eval


def launch(group: dist.ProcessGroup, raw: dict[str, Any], log: str, dies: dict[int, int]) -> str:
    """Train in windows; says whether this rank got to the end, or heard of another rank's death."""
    job = small.make_job(raw)
    data, schema = job.config.data, job.config.data_schema
    assert isinstance(data.train, DataSet) and data.windows is not None and schema.timestamp is not None
    manifest, periods = in_time_order(Manifest.of(data.train, schema), schema.timestamp, data.windows, Patience(0, 0))
    windows = {"periods": periods, "period_rows": manifest.rows_by(periods.column)}
    return train_noted(replace(job, train=manifest, eval=manifest, **windows), group, log, dies)


@pytest.mark.long
def test_ranks_that_are_killed_in_a_window_go_on_in_it_on_any_number_of_ranks(tmp_path: Path) -> None:
    """One of them, or all, by SIGKILL; rows in the order of time, and the model of a run that nothing happened to."""
    write(tmp_path / "log", WINDOWS)
    raw = raw_of(tmp_path, time="1h")
    raw["trainer"] |= {"checkpoint_every": 2, "epochs": WINDOWS - 1}
    steps: list[list[int]] = []
    launches: list[tuple[int, dict[int, int]]] = [
        (2, {1: 3}),
        (3, {0: 4, 1: 4, 2: 4}),
        (1, {0: 3}),
        (5, {3: 3}),
        (3, {}),
    ]
    for number, (world, dies) in enumerate(launches):
        before, log = committed(tmp_path), tmp_path / f"launch-{number}"
        launch_on_ranks(world, raw, str(log), dies, how=launch)
        by_rank = [noted(log, rank) for rank in range(world)]
        steps += [[row for lines in by_rank for row in lines[step]] for step in range(committed(tmp_path) - before)]
    assert [len(step) for step in steps] == [32, 32, 26] * (WINDOWS - 1)
    assert [row for step in steps for row in sorted(step)] == list(range((WINDOWS - 1) * ROWS))
    launch_on_ranks(1, raw | {"name": "whole"}, str(tmp_path / "whole"), {}, how=launch)
    weights = []
    for name in ("small", "whole"):
        file = tmp_path / f"{name}.safetensors"
        assert run(["checkpoint", "convert", str(tmp_path / "runs" / name), str(file)]) == 0
        weights.append(load_file(file))
    assert_close(*weights, rtol=1e-3, atol=1e-4)  # sums of other ranks are rounded differently


def test_what_cannot_be_in_order_of_time_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", 2)
    for changes, message in (
        ({"windows": None}, "order: time needs either rows"),
        ({"windows": {"rows": 1, "time": "1d"}}, "order: time needs either rows"),
        ({"windows": {"time": "1w"}}, "data.windows.time"),
        ({"order": None, "windows": {"rows": 10}}, "need order: time"),
        ({"shuffle": {"windows": 2}}, "keeps the order of the rows"),
        ({"eval": str(tmp_path)}, "none in eval"),
        ({"progressive": "day"}, "a folder is a window of its own"),
    ):
        raw = raw_of(tmp_path, time="1h")
        raw["data"] |= changes
        with pytest.raises(ValueError, match=message):
            parse_config(raw)
    raw = raw_of(tmp_path, time="1h")
    del raw["schema"]["timestamp"]
    with pytest.raises(ValueError, match=r"time needs schema\.timestamp"):
        parse_config(raw)
    with pytest.raises(ValueError, match="nothing to train on; the newest window is used for evaluation only"):
        Trainer(parse_config(raw_of(tmp_path, time="100d")), display=Display(Console(file=io.StringIO()))).fit()
