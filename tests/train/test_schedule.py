"""Learning rates over the steps: the shapes by hand, and that both optimizers really get them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.train import ConfigError, parse_config
from tests.train.small import config_of, learner_of, make_job, raw_config, write_all
from tests.train.test_loop import batches


def schedule_of(**options: Any) -> Any:
    return config_of(optimizers__dense={"schedule": options}).optimizers.dense.schedule


def factors(steps: list[int], **options: Any) -> list[float]:
    return [schedule_of(**options).factor(step) for step in steps]


def test_shapes_by_hand() -> None:
    assert factors([0, 999]) == [1, 1]
    assert factors([0, 1, 3, 4], warmup_steps=4) == [0.25, 0.5, 1, 1]
    assert factors([0, 1], warmup_steps=2, warmup_from=0.5) == [0.75, 1]
    assert factors([0, 5, 10, 99], kind="linear", decay_steps=10, end=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
    assert factors([9, 10, 20, 25], kind="step", decay_steps=10, gamma=0.5) == [1, 0.5, 0.25, 0.25]
    assert factors([0, 5, 10], kind="cosine", decay_steps=10) == pytest.approx([1, 0.5, 0])
    quarter = (1 - math.cos(0.75 * math.pi)) / 2
    assert factors([5], kind="cosine", decay_steps=20) == pytest.approx([quarter])
    # MLPerf's DLRM: a line up, a plateau, then a square down
    mlperf = {"kind": "polynomial", "warmup_steps": 10, "decay_from": 20, "decay_steps": 10, "power": 2.0}
    assert factors([4, 9, 15, 20, 25, 30, 99], **mlperf) == pytest.approx([0.5, 1, 1, 1, 0.25, 0, 0])


@given(
    st.sampled_from(["constant", "linear", "step", "cosine", "polynomial"]),
    st.integers(0, 100), st.integers(0, 100), st.integers(1, 100), st.integers(1, 50), st.integers(0, 10_000),
)  # fmt: skip
def test_shares_of_a_run_are_steps_of_it(kind: str, warm: int, begin: int, decay: int, scale: int, step: int) -> None:
    """Of a run of 100 times `scale` steps."""
    steps = {"warmup_steps": warm, "decay_from": begin, "decay_steps": decay}
    shares = schedule_of(kind=kind, **{name: f"{percent}%" for name, percent in steps.items()})
    counted = schedule_of(kind=kind, **{name: percent * scale for name, percent in steps.items()})
    assert shares.factor(step, 100 * scale) == counted.factor(step)
    assert (shares.shares, counted.shares) == ([*steps], [])


def test_a_share_is_a_step_at_least() -> None:
    short = schedule_of(kind="cosine", warmup_steps="0.5%", decay_steps="0.5%")
    assert [short.factor(step, 10) for step in (0, 1)] == [1, 0], "a decay has a step at least"


@pytest.mark.parametrize("share", ["101%", "-1%", "5", "%", "5 percent", "1e1%", 0.05])
def test_other_shares_are_refused(tmp_path: Path, share: Any) -> None:
    raw = raw_config(tmp_path)
    raw["optimizers"]["dense"]["schedule"] = {"warmup_steps": share}
    with pytest.raises(ConfigError, match=r"optimizers\.dense\.schedule\.warmup_steps"):
        parse_config(raw)


@pytest.mark.parametrize(
    "changes", [{"negative_rate": 0.5}, {"progressive": "day", "eval": None}, {"train": {"filters": [["row", "<", 5]]}}]
)
def test_a_share_needs_a_known_number_of_steps(tmp_path: Path, changes: dict[str, Any]) -> None:
    raw = raw_config(tmp_path, optimizers__sparse={"schedule": {"warmup_steps": "5%"}})
    assert parse_config(raw).optimizers.sparse.schedule.shares == ["warmup_steps"]
    path = raw["data"]["train"]
    raw["data"] |= changes
    if "train" in changes:
        raw["data"]["train"] = {"path": path, **changes["train"]}
    with pytest.raises(ConfigError, match=r"schedule\.warmup_steps: the steps of a run .* set trainer\.max_steps"):
        parse_config(raw)
    raw["trainer"]["max_steps"] = 100
    parse_config(raw)


def test_a_decay_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cosine' needs `decay_steps`"):
        schedule_of(kind="cosine")


def test_dense_and_sparse_follow_their_own_schedules(tmp_path: Path) -> None:
    """With a factor of 0 nothing changes; the other half of the model does."""
    import torch

    write_all(tmp_path, rows=100)
    for still in ("dense", "sparse"):
        raw = raw_config(tmp_path)
        raw["optimizers"] = {
            "dense": {"kind": "sgd", "lr": 0.1, "max_gradient_norm": 1.0},
            "sparse": {"kind": "adam", "lr": 0.1},
        }
        learner = learner_of(make_job(raw))
        tables = [item.weight for table in learner.model.tables().values() for item in table.local]
        dense = list(learner.model.other_parameters().values())
        before = {"sparse": [w.detach().clone() for w in tables], "dense": [p.detach().clone() for p in dense]}
        learner.rates.set(0, learner.optimizer, *((0.0, 0.1) if still == "dense" else (0.1, 0.0)))
        learner.step(batches([32], 1)[0], 1.0)
        after = {"sparse": tables, "dense": dense}
        moved = {
            kind: any(not torch.equal(old, new) for old, new in zip(before[kind], after[kind], strict=True))
            for kind in before
        }
        assert moved == {"dense": still != "dense", "sparse": still != "sparse"}


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    import torch

    write_all(tmp_path, rows=100)
    steps = []
    for bound in (None, 1e-3):
        raw = raw_config(tmp_path)
        raw["optimizers"]["dense"] = {"kind": "sgd", "lr": 1.0, "max_gradient_norm": bound}
        learner = learner_of(make_job(raw))
        dense = list(learner.model.other_parameters().values())
        before = [p.detach().clone() for p in dense]
        learner.step(batches([32], 1)[0], 1.0)
        moved = [(new.detach() - old).norm() for new, old in zip(dense, before, strict=True)]
        steps.append(torch.stack(moved).norm())
    assert steps[0] > 0.01
    assert float(steps[1]) == pytest.approx(1e-3, rel=1e-3)
