"""Learning rates are reduced when evaluations stop improving: on all ranks at once, and the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM, Batch
from rayrec.train import ConfigError, parse_config
from rayrec.train.worker.dense_update import Rates
from rayrec.train.worker.plateau import Plateau
from tests.ranks import on_ranks
from tests.train.small import config_of, fit_on_rank, raw_config, write_all
from tests.train.test_alone import Told, job_of, run, saved, stopped

NEVER_BETTER = {"metric": "logloss", "patience": 2, "min_delta": 10.0, "factor": 0.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("plateau"), rows=300)


def rates(told: Told) -> dict[int, float]:
    """The dense learning rate of each step as a multiple of the configured one."""
    return {line["step"]: line["lr"]["dense"] / 0.01 for line in told.all("train")}


@given(st.lists(st.sampled_from([0.5, 0.6, 0.7]), max_size=12), st.integers(1, 4))
def test_each_stretch_without_improvement_reduces_once(values: list[float], patience: int) -> None:
    config: Any = config_of(
        optimizers__plateau={"metric": "auc", "patience": patience, "factor": 0.5, "min_factor": 0.2}
    ).optimizers.plateau
    plateau, best, since, reductions = Plateau(), -1.0, 0, 0
    for step, value in enumerate(values):
        plateau = Plateau.from_dict(plateau.after({"auc": value}, step + 1, config).to_dict())
        since = 0 if value > best else since + 1
        best = max(best, value)
        if since == patience:
            since, reductions = 0, reductions + 1
        assert plateau.reductions == reductions
        assert plateau.factor(config) == max(0.2, 0.5**reductions) and plateau.factor(None) == 1


def test_a_run_trains_on_with_reduced_rates(data: Path, tmp_path: Path) -> None:
    job = job_of(data, tmp_path, optimizers__plateau=NEVER_BETTER, trainer__eval_every=1, trainer__log_every=1)
    _, told = run(job)
    reductions = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3, 9: 3, 10: 4}
    assert rates(told) == pytest.approx({step: 0.5**number for step, number in reductions.items()})
    assert told.steps("event", "plateau") == [3, 5, 7, 9]
    (first, *_) = [r["message"] for r in told.all("event") if r["event"] == "plateau"]
    assert first.startswith("learning rates times 0.5 after step 3: logloss has not improved in 2 evaluations")


def plateau_of(outcome: dict[str, Any]) -> dict[str, Any]:
    """The state in the last checkpoint."""
    state: dict[str, Any] = CheckpointStore(Path(outcome["checkpoint"]).parent).all()[-1].extra["position"]["plateau"]
    return state


class Dies(DLRM):
    """Its process dies in a step of training."""

    at = 10**9

    def forward(self, batch: Batch) -> Any:
        Dies.at -= self.training
        if Dies.at == 0:
            raise OSError("a lost worker")
        return super().forward(batch)


@pytest.mark.parametrize("every, checkpoint_every, keep_best", [(1, 1, None), (2, None, "logloss")])
def test_a_resumed_run_has_the_same_rates_and_weights(
    data: Path, tmp_path: Path, every: int, checkpoint_every: int | None, keep_best: str | None
) -> None:
    """Also if the checkpoint was saved before the evaluation of its step, which then counts once."""
    changes: dict[str, Any] = {
        "optimizers__plateau": {**NEVER_BETTER, "patience": 1}, "trainer__eval_every": every, "trainer__log_every": 1,
        "trainer__checkpoint_every": checkpoint_every, "storage": {"keep_best": keep_best, "keep": 99},
    }  # fmt: skip
    Dies.at = 10**9
    whole, undisturbed = run(job_of(data, tmp_path / "whole", **changes))
    job = replace(job_of(data, tmp_path / "died", **changes), factory=Dies)
    for died_at in (4, 4):  # after three more steps each
        Dies.at = died_at
        with pytest.raises(OSError, match="a lost worker"):
            run(job)
    Dies.at = 10**9
    resumed, told = run(job)
    assert rates(told) == {step: rate for step, rate in rates(undisturbed).items() if step in rates(told)}
    assert resumed["eval"] == whole["eval"] and plateau_of(resumed) == plateau_of(whole)


@pytest.mark.parametrize("stop_at", [7, 8, 9])
def test_a_stopped_run_has_the_same_rates(data: Path, tmp_path: Path, stop_at: int) -> None:
    """Also if the stop interrupted an evaluation, which is then repeated."""
    changes = {"trainer__eval_every": 1, "trainer__eval_rows": 64, "trainer__log_every": 1}
    job = job_of(data, tmp_path, optimizers__plateau=NEVER_BETTER, **changes)
    stopped(job, stop_at)
    told = run(job)[1]
    reductions = {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3, 9: 3, 10: 4}
    begin = saved(job)[0] + 1
    assert rates(told) == pytest.approx({step: 0.5 ** reductions[step] for step in range(begin, 11)})


def _rates_of_rank(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[tuple[float, float]]:
    seen: list[tuple[float, float]] = []
    set_rates = Rates.set

    def noted(rates: Rates, step: int, optimizer: Any, dense: float, sparse: float) -> None:
        seen.append((dense, sparse))
        set_rates(rates, step, optimizer, dense, sparse)

    with mock.patch.object(Rates, "set", noted):
        fit_on_rank(group, raw)
    return seen


def test_ranks_reduce_together(data: Path, tmp_path: Path) -> None:
    changes = {"optimizers__plateau": NEVER_BETTER, "trainer__eval_every": 2}
    raw = raw_config(data, storage={"path": str(tmp_path), "background": False}, **changes)
    first, second = on_ranks(2, _rates_of_rank, raw)
    assert first == second and len(first) == 10
    assert first[-1] == pytest.approx((0.01 * 0.25, 0.1 * 0.25))


def test_what_a_plateau_needs(tmp_path: Path) -> None:
    raw = raw_config(tmp_path, optimizers__plateau={"metric": "acu"})
    with pytest.raises(ConfigError, match=r"optimizers\.plateau\.metric: got 'acu'; did you mean 'auc'"):
        parse_config(raw)
    raw = raw_config(tmp_path, optimizers__plateau={"metric": "auc"}, data__eval=None)
    with pytest.raises(ConfigError, match=r"optimizers\.plateau: it watches evaluations: set data\.eval"):
        parse_config(raw)
