"""Logged rows and late labels: each row once with the right label, whatever arrives when, and however often killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec import cli
from rayrec.data import DataError, DataUnavailable, FileChanged, FileJoin, JoinSpec, LabelJoin

WINDOW, KEEP = 30, 200
RULES = ("correct", "drop", "reweigh")
KEY = ["_request", "_row"]


def spec(late: Any, **more: Any) -> JoinSpec:
    return JoinSpec(window_s=WINDOW, keep_s=KEEP, late=late, late_share=0.25 if late == "reweigh" else None, **more)


class Log(NamedTuple):
    rows: pa.Table
    events: pa.Table


def log_of(seed: int, requests: int = 12) -> Log:
    """Requests of one to three rows, with no, one or several events each, early and late; and events without a row."""
    rng = random.Random(seed)
    keys = [(f"r{number}", row) for number in range(requests) for row in range(rng.randint(1, 3))]
    at = {f"r{number}": rng.randint(0, 300) for number in range(requests)}
    rows = {
        "_request": [request for request, _ in keys],
        "_row": [row for _, row in keys],
        "_time": [at[request] + 0.25 for request, _ in keys],
        "_score": [round(rng.random(), 3) for _ in keys],
        "item": [rng.randint(0, 9) for _ in keys],
    }
    events = [
        (request, row, at[request] + 0.25 + rng.choice([0, 1, 29.5, WINDOW, 30.5, 90, KEEP, 200.5, 400]))
        for request, row in keys
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    events += [("nobody", number, 50.0 * number) for number in range(rng.randint(0, 3))]
    columns = zip(*events, strict=True) if events else ([], [], [])
    of_events = dict(zip((*KEY, "_time"), map(list, columns), strict=True))
    types = pa.schema([("_request", pa.string()), ("_row", pa.int64()), ("_time", pa.float64())])
    return Log(pa.table(rows), pa.table(of_events, schema=types))


def batch_join(log: Log, late: str) -> list[tuple[Any, ...]]:
    """The join of the whole log with pandas: (request, row, item, label, weight, time at which the label was known)."""
    rows, events = log.rows.to_pandas(), log.events.to_pandas()
    events = events.merge(rows[[*KEY, "_time"]], on=KEY, suffixes=("", "_of_row"))
    delay = events["_time"] - events["_time_of_row"]
    in_time = set(events[delay <= WINDOW][KEY].itertuples(index=False, name=None))
    later = events[(delay > WINDOW) & (delay <= KEEP)].groupby(KEY)["_time"].min().to_dict()
    output = []
    for row in rows.itertuples(index=False):
        request, number, time, score, item = row
        key, p = (request, number), min(score, 0.95)
        label = int(key in in_time)
        weight = 1.0 if label or late != "reweigh" else (1 - p) / (1 - p * 0.75)
        output.append((*key, item, label, weight, time + WINDOW))
        if not label and key in later and late != "drop":
            output.append((*key, item, 1, 1 / (1 - p) if late == "correct" else 1.0, later[key]))
    return sorted((*known[:4], round(known[4], 9), known[5]) for known in output)


def as_rows(tables: list[pa.Table]) -> list[tuple[Any, ...]]:
    found = pd.concat([table.to_pandas() for table in tables])
    known = found["_label_time"].astype("datetime64[us, UTC]").astype("int64") / 1e6
    columns = (found["_request"], found["_row"], found["item"], found["label"], found["_weight"].round(9), known)
    return sorted(zip(*map(list, columns), strict=True))


def taken_up(join: LabelJoin) -> LabelJoin:
    """By another process."""
    facts, state = json.loads(json.dumps(join.facts)), {}
    for name, table in join.state.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        state[name] = pa.ipc.open_file(sink.getvalue()).read_all()
    return LabelJoin.restored(join.spec, facts, state)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), late=st.sampled_from(RULES))
def test_a_stream_in_time_equals_the_batch_join_of_the_whole_log(seed: int, late: str) -> None:
    log, rng = log_of(seed), random.Random(seed)
    join, output = LabelJoin(spec(late)), []
    things = [(time, "row", number) for number, time in enumerate(log.rows["_time"].to_pylist())]
    things += [(time, "event", number) for number, time in enumerate(log.events["_time"].to_pylist())]
    # Rows and events of up to 40 s are in any order; the watermark is what all of them have passed.
    things.sort(key=lambda thing: thing[0] // 40 * 40 + 40 * rng.random())
    least = np.minimum.accumulate([thing[0] for thing in reversed(things)])[::-1]
    for number, (_, kind, at) in enumerate(things):
        if kind == "row":
            join.feed_rows(log.rows.slice(at, 1))
        else:
            join.feed_events(log.events.slice(at, 1))
        if number + 1 < len(things) and rng.random() < 0.4:
            output.append(join.advance(int(least[number + 1] * 1e6) - 1))
        if rng.random() < 0.2:
            join = taken_up(join)
    output.append(join.advance((1 << 62) - 1))
    parts = [table for table in output if table is not None]
    assert as_rows(parts) == batch_join(log, late)
    known = [time for table in parts for time in table["_label_time"].to_pylist()]
    assert known == sorted(known)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), late=st.sampled_from(RULES))
def test_in_any_order_of_arrival_each_row_comes_once_and_no_label_is_wrong(seed: int, late: str) -> None:
    log, rng = log_of(seed), random.Random(seed)
    join, output, times = LabelJoin(spec(late)), [], log.events.to_pandas().groupby(KEY)["_time"].min().to_dict()
    things = [("row", at) for at in range(len(log.rows))] + [("event", at) for at in range(len(log.events))]
    things += rng.sample(things, 5)  # some come twice
    rng.shuffle(things)
    repeated = len([thing for thing in set(things) if thing[0] == "row" and things.count(thing) > 1])
    keys = list(log.rows.select(KEY).to_pandas().itertuples(index=False, name=None))
    for number, (kind, at) in enumerate(things):
        if kind == "row":
            join.feed_rows(log.rows.slice(at, 1))
        else:
            join.feed_events(log.events.slice(at, 1))
        if rng.random() < 0.3:
            # So far that rows and events come late, but no event is forgotten before its row comes.
            missing = {keys[at] for kind, at in things[number + 1 :] if kind == "row"}
            limit = min([times[key] + WINDOW for key in missing & times.keys()], default=150)
            output.append(join.advance(int(1e6 * min(rng.randint(0, 150), limit)) - 1))
            join = taken_up(join)
    output.append(join.advance((1 << 62) - 1))
    rows = pa.concat_tables([table for table in output if table is not None]).to_pandas()
    first, again = rows[~rows.duplicated(KEY)], rows[rows.duplicated(KEY)]
    assert sorted(first[KEY].itertuples(index=False, name=None)) == sorted(keys)
    assert not again.duplicated(KEY).any() and (again["label"] == 1).all()
    assert join.counts["repeated_rows"] == repeated
    expected = batch_join(log, "reweigh")  # its last row of a key has the final label
    final = {(request, row): label for request, row, _, label, *_ in expected}
    final |= dict.fromkeys({(request, row) for request, row, _, label, *_ in expected if label}, 1)
    last = rows[~rows.duplicated(KEY, keep="last")]
    found = dict(zip(last[KEY].itertuples(index=False, name=None), last["label"].tolist(), strict=True))
    if late == "drop":
        assert again.empty
        counted = join.counts["positives"] + join.counts["late_positives"]
        assert counted == sum(final.values()) and all(final[key] >= label for key, label in found.items())
    else:
        assert found == final


def test_weights_give_the_loss_of_the_final_labels() -> None:
    """With `correct` the gradient of both rows is that of the positive; with `reweigh` the expectation is."""
    p, d = 0.3, 0.25
    rows = pa.table({"_request": ["a"], "_row": [0], "_time": [1.0], "_score": [p]})
    event = pa.table({"_request": ["a"], "_row": [0], "_time": [100.0]})

    def weights(late: str, events: list[pa.Table]) -> list[tuple[int, float]]:
        join = LabelJoin(spec(late))
        join.feed_rows(rows)
        for one in events:
            join.feed_events(one)
        done = join.advance((1 << 62) - 1)
        assert done is not None and join.counts["without_row"] == 0
        return list(zip(done["label"].to_pylist(), done["_weight"].to_pylist(), strict=True))

    def gradient(given: list[tuple[int, float]]) -> float:
        return sum(weight * (p - label) for label, weight in given)

    assert gradient(weights("correct", [event])) == pytest.approx(p - 1)
    early = weights("reweigh", [event.set_column(2, "_time", pa.array([2.0]))])
    expected = p * (1 - d) * gradient(early) + p * d * gradient(weights("reweigh", [event]))
    expected += (1 - p) * gradient(weights("reweigh", []))
    assert expected == pytest.approx(0)  # the score is right, so the loss is at its least


def test_several_labels_of_a_row_are_corrected_one_by_one() -> None:
    rows = pa.table({"_request": [7], "_row": [0], "_time": pa.array([0], pa.timestamp("s"))})
    for label in ("click", "buy"):
        rows = rows.append_column(f"_score_{label}", pa.array([0.5]))
    events = pa.table({
        "_request": [7] * 3, "_row": [0] * 3, "_time": pa.array([5, 50, 60], pa.timestamp("s")),
        "kind": ["click", "view", "buy"],
    })  # fmt: skip
    join = LabelJoin(spec("correct", labels=("click", "buy"), kind="kind"))
    join.feed_rows(rows)
    join.feed_events(events)
    done = join.advance((1 << 62) - 1)
    assert done is not None
    assert done.select(["click", "buy", "_weight"]).to_pylist() == [
        {"click": 1, "buy": 0, "_weight": 1.0},
        {"click": None, "buy": 1, "_weight": 2.0},
    ]
    assert join.counts["other_events"] == 1


def write(log: Log, folder: Path, seed: int, parts: int = 3) -> None:
    """As files whose rows are in the order of time."""
    for name, table in (("log", log.rows), ("events", log.events)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        table = table.sort_by("_time")
        cuts = sorted(random.Random(seed).randint(0, len(table)) for _ in range(parts - 1))
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(table)], strict=True)):
            pq.write_table(table.slice(start, stop - start), folder / name / f"{number}.parquet")


def join_files(folder: Path, late: str, out: str = "out", final: bool = True) -> Any:
    joined = FileJoin(folder / "log", folder / "events", folder / out, spec(late), commit_rows=8)
    with joined as join:
        return join.run(final=final)


def parts_of(folder: Path) -> list[pa.Table]:
    return [pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: the join waits for the disk at each change."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)


def test_columns_with_dictionaries_are_held_and_times_may_be_texts(in_memory: Path) -> None:
    for name in ("log", "events"):
        (in_memory / name).mkdir()
    for number, names in enumerate(("abcd", "efgh")):
        rows = {"_request": list(names), "_row": [0] * 4, "city": pa.array(list(names)).dictionary_encode()}
        times = [f"1970-01-01T00:00:0{at}.5Z" for at in range(4)]
        # Each row group has a dictionary of its own.
        pq.write_table(pa.table({**rows, "_time": times}), in_memory / f"log/{number}.parquet", row_group_size=2)
        assert join_files(in_memory, "drop", final=False).waiting == 4 * (number + 1)
    assert join_files(in_memory, "drop").rows == 8
    (output,) = parts_of(in_memory / "out")
    assert sorted(output["city"].to_pylist()) == list("abcdefgh")


def test_a_join_that_is_killed_before_any_change_of_a_file_writes_each_row_once(in_memory: Path) -> None:
    log = log_of(5, requests=8)
    write(log, in_memory, 5, parts=2)
    expected = batch_join(log, "correct")
    join_files(in_memory, "correct")
    assert as_rows(parts_of(in_memory / "out")) == expected
    words = [sys.executable, "-m", "tests.data.killed_join", str(in_memory), json.dumps(spec("correct").to_dict()), "8"]
    subprocess.run(words, check=True, timeout=120)
    *killed, _ = sorted(in_memory.glob("out-*"), key=lambda path: int(path.name[4:]))
    for out in killed:
        join_files(in_memory, "correct", out.name)
        assert as_rows(parts_of(out)) == expected, out
        assert list(out.rglob(".*")) == [], out
    assert len(killed) > 10


def test_the_command_reads_what_has_arrived_and_waits_for_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(3)
    write(log, tmp_path / "all", 3, parts=4)
    for name in ("log", "events"):
        (tmp_path / name).mkdir()
    folders = [str(tmp_path / name) for name in ("log", "events")]
    line = ["data", "join", *folders, "--out", str(tmp_path / "out"), "--window", "30s", "--late", "reweigh"]
    line += ["--keep", "200s", "--late-share", "0.25", "--lateness", "0s", "--json"]
    for number in range(4):
        for name in ("log", "events"):
            (tmp_path / "all" / name / f"{number}.parquet").rename(tmp_path / name / f"{number}.parquet")
        assert cli.run(line) == 0
    assert cli.run(line) == 0
    *_, last, again = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert last["waiting"] > 0 == again["files"] == again["rows"]
    assert cli.run([*line, "--final"]) == 0
    assert as_rows(parts_of(tmp_path / "out")) == batch_join(log, "reweigh")
    assert cli.run(["data", "join", *folders, "--out", str(tmp_path / "out"), "--window", "1h"]) != 0
    assert "keep_s, late, late_share, window_s" in capsys.readouterr().err


def test_a_file_that_is_half_written_or_has_changed_is_named(tmp_path: Path) -> None:
    log = log_of(4)
    write(log, tmp_path, 4)
    whole, first = (tmp_path / "log/2.parquet").read_bytes(), tmp_path / "log/0.parquet"
    (tmp_path / "log/2.parquet").write_bytes(whole[: len(whole) // 2])
    other = pq.read_table(first)
    pq.write_table(other.set_column(4, "item", pa.array(["?"] * len(other))), tmp_path / "log/3.parquet")
    with pytest.raises(DataError, match=r"was int64 in earlier rows, and is string.*log/3\.parquet.*'item'"):
        join_files(tmp_path, "drop", final=False)
    states = [path.name for path in (tmp_path / "out/_join").iterdir()]
    (tmp_path / "log/3.parquet").unlink()
    with pytest.raises(DataUnavailable, match=r"not complete.*log/2\.parquet.*hidden name"):
        join_files(tmp_path, "drop", final=False)
    assert [path.name for path in (tmp_path / "out/_join").iterdir()] == states  # nothing was read
    (tmp_path / "log/2.parquet").write_bytes(whole)
    os.utime(first, (1, 1))
    with pytest.raises(FileChanged, match=r"log/0\.parquet"):
        join_files(tmp_path, "drop")
    (tmp_path / "log/0.parquet").unlink()  # as the service removes old files
    done = join_files(tmp_path, "drop")
    assert done.files == 0 and done.counts["rows"] == len(log.rows) and done.counts["events"] == len(log.events)
    with (
        FileJoin(tmp_path / "log", tmp_path / "events", tmp_path / "out", spec("drop")),
        pytest.raises(DataError, match="another process"),
    ):
        join_files(tmp_path, "drop")
