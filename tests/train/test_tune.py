"""A search: what is varied, what is refused, and a whole one on Ray that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.train.config.file import ConfigError, load_config, parse_config
from rayrec.train.tune.space import check_space, space_of, with_values
from tests.train.small import raw_config, write_all

RAW = raw_config(Path("/nowhere"))


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("optimizers.sparse.lr", "write it as FIELD=SPACE"),
        ("optimizers.sparse.lr=0.1", "is none of"),
        ("optimizers.sparse.lr=[]", "is none of"),
        ("optimizers.sparse.lr=log(0,1)", "above 0"),
        ("optimizers.sparse.lr=uniform(2,1)", "low must be below high"),
        ("optimizers.sparse.lr=uniform(1)", "two numbers"),
        ("trainer.batch_size=int(1.5,2)", "two whole numbers"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused(param: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        space_of([param])


def test_nothing_to_vary_and_a_field_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to search over"):
        space_of([])
    with pytest.raises(ConfigError, match="given twice"):
        space_of(["trainer.seed=[1]", "trainer.seed=[2]"])


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("optimizers.sparse.rate=[0.1]", "optimizers.sparse.rate"),
        ("optimizers.sparse.kind=[adam, best]", "'best'"),
        ("optimizers.sparse.lr=uniform(-1,1)", "with -1"),
        ("trainer.batch_size=int(0,64)", "with 0"),
    ],
)
def test_each_choice_and_both_ends_must_make_a_config(param: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_space(RAW, space_of([param]))


def test_draws_land_in_their_fields_and_bounds() -> None:
    space = space_of(
        ["optimizers.sparse.lr=log(0.001,0.1)", "trainer.seed=int(1,3)", "optimizers.sparse.kind=[adam, sgd]"]
    )
    check_space(RAW, space)
    drawn = [{field: domain.sample() for field, domain in space.items()} for _ in range(200)]
    assert {values["trainer.seed"] for values in drawn} == {1, 2, 3}
    assert all(0.001 <= values["optimizers.sparse.lr"] <= 0.1 for values in drawn)
    below = sum(values["optimizers.sparse.lr"] < 0.01 for values in drawn)
    assert 60 < below < 140, "half of the draws of a logarithmic range lie below its geometric middle"
    config = parse_config(with_values(RAW, drawn[0]))
    assert config.optimizers.sparse.kind == drawn[0]["optimizers.sparse.kind"]
    assert config.trainer.seed == drawn[0]["trainer.seed"]


def test_a_drawn_value_stays_what_it_is() -> None:
    (domain,) = (space := space_of(["optimizers.dense.max_gradient_norm=[null]"])).values()
    check_space(RAW, space)
    config = parse_config(with_values(RAW, {"optimizers.dense.max_gradient_norm": domain.sample()}))
    assert config.optimizers.dense.max_gradient_norm is None


def run(folder: Path, *more: str) -> subprocess.Popen[str]:
    words = ["tune", "config.yaml", "--param", "optimizers.sparse.lr=[0.0001,0.02,0.3]", "--trials", "4", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "rayrec.cli", *words, "--concurrent", "1"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(folder: Path) -> dict[str, float]:
    """Trials with a result → when it was written."""
    return {path.parent.name: path.stat().st_mtime for path in folder.glob("runs/small-tune/trial-*/result.json")}


@pytest.mark.long
def test_a_search_that_is_killed_goes_on(tmp_path: Path) -> None:
    write_all(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config(tmp_path, trainer__epochs=3)))
    first = run(tmp_path)
    until = time.monotonic() + 200
    while not finished(tmp_path) and time.monotonic() < until and first.poll() is None:
        time.sleep(0.2)
    before = finished(tmp_path)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert before
    second = run(tmp_path)
    shown, _ = second.communicate(timeout=300)
    assert second.returncode == 0, shown
    assert "going on with the search that was stopped" in shown
    told: dict[str, Any] = json.loads((tmp_path / "runs/small-tune/trials.json").read_text())
    assert len(told["trials"]) == 4
    assert not [trial for trial in told["trials"] if trial["error"]]
    scores = [trial["score"] for trial in told["trials"]]
    assert scores == sorted(scores, reverse=True)
    after = finished(tmp_path)
    assert {name: after[name] for name in before} == before, "what was finished was trained again"
    best = load_config(tmp_path / "runs/small-tune/best.yaml")
    assert best.optimizers.sparse.lr == told["trials"][0]["values"]["optimizers.sparse.lr"]
