"""Records of long runs: their report, their copy in storage and lists of them stay small and quick.

A generator writes the files; the numbers of the long tests are those of a run of 10^7 steps, 10^5 checkpoints and 1,000
tables. Their seconds are of one core's time, as others may use the machine.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.cli import run
from rayrec.distributed import ParameterSharding, Shard, ShardingPlan, Span
from rayrec.train import write_report
from rayrec.train.report.run import BRIEF_BYTES, MOST_EVENTS, MOST_LINES, Thinned, read_run


def metrics(steps: int, log_every: int, checkpoint_every: int, tables: int) -> Iterator[str]:
    """Lines of metrics.jsonl, as a run writes them."""
    touched = json.dumps({f"table{i}": {"ids": 4096, "rows": 1234, "top": 0.0123} for i in range(tables)})
    for step in range(log_every, steps + 1, log_every):
        loss = 0.45 + 0.2 * math.exp(-5 * step / steps)
        more = f', "tables": {touched}' if step % (log_every * 1000) == 0 else ""
        yield (
            f'{{"time": {1.7e9 + step / 4}, "attempt": 1, "kind": "train", "step": {step}, "epoch": 0, "samples": '
            f'{step * 4096}, "loss": {loss:.6f}, "ne": {loss + 0.3:.6f}, "auc": {1.2 - loss:.6f}, "calibration": 1.01, '
            f'"samples_per_second": 16384.5, "data_wait_fraction": 0.01, "exchange_fraction": 0.2, "stall_fraction": '
            f'0.001, "lr": {{"dense": 0.001, "sparse": 0.05}}, "gradient_norm": 1.25{more}}}\n'
        )
        if step % checkpoint_every == 0:
            yield (
                f'{{"time": {1.7e9 + step / 4}, "attempt": 1, "kind": "event", "step": {step}, "epoch": 0, "event": '
                f'"checkpoint", "message": "checkpoint of step {step} in 1.2 s"}}\n'
            )
            if step % (50 * checkpoint_every) == 0:
                yield (
                    f'{{"time": {1.7e9 + step / 4}, "attempt": 1, "kind": "eval", "step": {step}, "epoch": 0, "auc": '
                    f'{1.2 - loss:.6f}, "ne": 0.8, "logloss": {loss:.6f}, "calibration": 1.0, "samples": 100000}}\n'
                )


def write_run(folder: Path, steps: int, log_every: int, checkpoint_every: int, tables: int) -> Path:
    """A run folder that has ended."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(metrics(steps, log_every, checkpoint_every, tables))
    names = [f"table{i}" for i in range(tables)]
    shards = {
        name: ParameterSharding(
            sharding_type="table_wise",
            compute_kernel="fused",
            shards=(Shard(table=name, rows=Span(0, 99), cols=Span(0, 16), rank=i % 8),),
        )
        for i, name in enumerate(names)
    }
    (folder / "plan.json").write_text(json.dumps(ShardingPlan({"": shards}).to_dict()))
    described = "".join(f"- {{name: {name}, rows: 99, dim: 16, features: [{name}]}}\n" for name in names)
    (folder / "config.yaml").write_text(f"name: {folder.name}\ntables:\n{described}")
    (folder / "result.json").write_text(json.dumps({"steps": steps, "world_size": 8, "samples_per_second": 1e5}))
    return folder


def test_an_even_choice_has_the_first_and_the_last() -> None:
    for seen in (0, 1, 7, 10, 11, 1000):
        few = Thinned[int](10, tail=3)
        for item in range(seen):
            few.add(item)
        kept = list(few)
        assert few.seen == seen and len(kept) <= 13 and kept == sorted(set(kept))
        assert kept[:1] == [*range(seen)][:1] and kept[-3:] == [*range(seen)][-3:]
        assert seen > 10 or kept == [*range(seen)]
        gaps = {after - before for before, after in zip(kept, kept[1:-3], strict=False)}
        assert len(gaps) <= 1, "evenly"


def test_a_report_of_a_long_run_is_not_longer(tmp_path: Path) -> None:
    short = write_report(write_run(tmp_path / "short", 30_000, 2, 4, 3)).stat().st_size
    long = write_report(write_run(tmp_path / "long", 60_000, 2, 4, 3)).stat().st_size
    assert long < 1.3 * short < 1e6
    long_run = read_run(tmp_path / "long")
    assert (len(long_run.train), len(long_run.evals), long_run.num_events) == (7501, 300, 15_000)
    assert MOST_LINES >= len(long_run.train) > MOST_LINES / 2 and len(long_run.events) <= MOST_EVENTS + 1
    assert long_run.steps == long_run.train[-1]["step"] == long_run.events[-1]["step"] == 60_000
    assert "14,800 earlier events are in metrics.jsonl" in (tmp_path / "long" / "report.html").read_text()


def test_a_brief_look_at_a_run_finds_how_it_stands(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 8_000, 1, 100, 3)
    assert (folder / "metrics.jsonl").stat().st_size > 10 * BRIEF_BYTES
    whole_run, brief = read_run(folder), read_run(folder, brief=True)
    for fact in ("name", "status", "first_time", "last_time", "steps"):
        assert getattr(brief, fact) == getattr(whole_run, fact)
    assert brief.train[-1] == whole_run.train[-1] and len(brief.train) < 100 and not brief.problems
    few = write_run(tmp_path / "b", 20, 10, 10, 1)
    assert read_run(few, brief=True).train == read_run(few).train


MAKE = """
import json, re, sys, time
from pathlib import Path
from rayrec.train.report import write_report
def peak_mb():  # ru_maxrss would count the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
before, began = peak_mb(), time.process_time()
write_report(Path(sys.argv[1]))
took, peak, began = time.process_time() - began, peak_mb(), time.process_time()
for line in open(Path(sys.argv[1]) / "metrics.jsonl"):
    json.loads(line)
print(took, time.process_time() - began, peak, before)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_report_of_ten_million_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 10_000_000, 20, 100, 1000)
    done = subprocess.run([sys.executable, "-c", MAKE, str(folder)], capture_output=True, text=True, check=True)
    seconds, parsing, peak_mb, before_mb = map(float, done.stdout.split())
    size = (folder / "report.html").stat().st_size
    print(f"{seconds:.1f} s, lines alone {parsing:.1f} s, {peak_mb:.0f} MB at most, {before_mb:.0f} MB of imports")
    assert seconds <= 4 * parsing and peak_mb <= 500 and size <= 5e6


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_list_of_a_thousand_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1000):
        write_run(tmp_path / f"run{number}", 20_000, 20, 1000, 20)
    began = time.process_time()
    assert run(["runs", "list", str(tmp_path)]) == 0
    seconds, began = time.process_time() - began, time.process_time()
    for number in range(20):
        read_run(tmp_path / f"run{number}")
    whole = 50 * (time.process_time() - began)
    print(f"{seconds:.1f} s, reading them whole {whole:.1f} s")
    assert sum(" run" in line for line in capsys.readouterr().out.splitlines()) >= 1000 and seconds <= 0.8 * whole
