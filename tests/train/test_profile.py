"""A run's trace by torch's profiler, and its best checkpoint, in the result and the report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rayrec.train import ConfigError, Trainer, evaluate_run, parse_config
from tests.train.small import raw_config, write_all


def test_a_trace_of_the_steps_and_the_best_checkpoint_are_kept_and_linked(tmp_path: Path) -> None:
    raw = raw_config(write_all(tmp_path, rows=256), trainer__profile={"steps": [3, 4]}, storage__keep_best="ne")
    raw["trainer"] |= {"epochs": 3, "checkpoint_every": 100}
    raw["storage"]["keep"] = 1
    result = Trainer(parse_config(raw)).fit()
    trace = result.folder / "profile" / "steps-3-4.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    scores = {}
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "eval":
            scores[record["step"]] = record["ne"]
    best = evaluate_run(result.folder, checkpoint="best")
    step = min(scores, key=lambda step: scores[step])
    assert result.best == {"metric": "ne", "value": scores[step], "step": step, "checkpoint": best["checkpoint"]}
    assert json.loads((result.folder / "result.json").read_text())["best"] == result.best
    page = (result.folder / "report.html").read_text()
    assert "href='profile/steps-3-4.json.gz'" in page and "Best checkpoint" in page and f"step {step}" in page


@pytest.mark.parametrize("steps", [[5, 4], [1, 101], [0, 3], [1]])
def test_steps_that_cannot_be_profiled_are_refused(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.profile"):
        parse_config(raw_config(tmp_path, trainer__profile={"steps": steps}))
