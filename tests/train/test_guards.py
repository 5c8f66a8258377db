"""What ends a run early, or keeps it going: evaluations, guards, and their state over a resume."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.train import TrainError
from rayrec.train.worker.guards import Best, Guards
from tests.train.small import config_of, write_all
from tests.train.test_fit import records, shown, trainer


def ends(values: list[float | None], **given: Any) -> tuple[Best, list[bool]]:
    config, best, ended = config_of(trainer__early_stopping=given).trainer.early_stopping, Best(), []
    for number, value in enumerate(values):
        best = Best.from_dict(best.after({given.get("metric", "auc"): value}, number + 1, config).to_dict())
        ended.append(best.end(config) is not None)
    return best, ended


def test_patience_counts_evaluations_without_improvement() -> None:
    best, ended = ends([0.7, 0.71, 0.705, 0.709, 0.7], patience=3)
    assert (best.value, best.step, ended) == (0.71, 2, [False, False, False, False, True])
    best, ended = ends([0.9, 0.8, 0.85, 0.84], metric="ne", patience=2)
    assert (best.value, ended) == (0.8, [False, False, False, True])
    assert ends([0.7, 0.705, 0.709], patience=2, min_delta=0.01)[1] == [False, False, True]
    assert ends([None, None], patience=2)[1] == [False, True]


def test_an_evaluation_of_a_step_counts_once() -> None:
    config = config_of(trainer__early_stopping={"patience": 2}).trainer.early_stopping
    best = Best().after({"auc": 0.7}, 5, config)
    assert best.after({"auc": 0.8}, 5, config) == best


def test_as_good_as_before_is_no_improvement() -> None:
    for metric in ("auc", "ne"):
        best, ended = ends([0.5, 0.5, 0.5], metric=metric, patience=2)
        assert (best, ended) == (Best(value=0.5, step=1, stale=2), [False, False, True])
    best, _ = ends([0.5, 0.75, 1.0], patience=9, min_delta=0.25)
    assert (best.value, best.step, best.stale) == (1.0, 3, 0), "0.75 is 0.25 more than 0.5, not more than that; 1.0 is"
    best, _ = ends([0.5, None, 0.5, 0.625], patience=9)
    assert (best.value, best.step, best.stale) == (0.625, 4, 0)
    assert ends([None, 0.5, None], patience=9)[0] == Best(value=0.5, step=2, stale=1)


def test_the_end_says_what_was_best() -> None:
    config = config_of(trainer__early_stopping={"metric": "ne", "patience": 2}).trainer.early_stopping
    assert Best(value=0.5, step=3, stale=1).end(config) is None
    assert Best(value=0.5, step=3, stale=2).end(config) == (
        "ne is best at step 3 (0.5000) and has not improved in 2 evaluations (trainer.early_stopping)"
    )
    assert Best(stale=2).end(config) == (
        "ne was never defined and has not improved in 2 evaluations (trainer.early_stopping)"
    )
    assert (Best(), Best.from_dict(None)) == (Best(value=None, step=0, stale=0), Best())


def test_a_figure_at_its_bound_is_good_and_what_is_not_guarded_too() -> None:
    guards = Guards(config_of(trainer__guards={"patience": 1, "max_ne": 1.0, "min_auc": 0.5}).trainer.guards)
    guards.check(1, {"ne": 1.0, "auc": 0.5})
    Guards(config_of(trainer__guards={"patience": 1}).trainer.guards).check(1, {"ne": 9.0, "auc": 0.1})
    with pytest.raises(TrainError) as caught:
        guards.check(2, {"ne": 1.25, "auc": 0.5})
    assert str(caught.value) == (
        "ended early at step 2 after 1 logging lines in a row: NE 1.25 is above 1.0: no better than a constant; lower "
        "the learning rates (trainer.guards.max_ne)"
    )


@pytest.mark.parametrize(
    ("limits", "bad", "text"),
    [
        ({"max_ne": 1.0}, {"ne": 1.2}, "NE 1.2 is above 1.0"),
        ({"min_auc": 0.505}, {"auc": 0.5}, "AUC 0.5 is below 0.505"),
    ],
)
def test_so_many_bad_lines_in_a_row_end_the_run(limits: dict[str, Any], bad: dict[str, Any], text: str) -> None:
    guards = Guards(config_of(trainer__guards=dict(patience=2, after_steps=10, **limits)).trainer.guards)
    good = {"ne": 0.8, "auc": 0.7}
    for step, line in ((5, bad), (10, bad), (11, bad), (12, good), (13, bad)):
        guards.check(step, line)
    with pytest.raises(TrainError, match=text):
        guards.check(14, bad)


def test_an_area_that_may_be_large_enough_does_not_end_the_run() -> None:
    """Narrow logits, as of first steps, share bins: `auc_error` bounds the distance of the true area."""
    guards = Guards(config_of(trainer__guards={"patience": 1, "min_auc": 0.505}).trainer.guards)
    guards.check(1, {"ne": 1.0, "auc": 0.5, "auc_error": 0.1})
    with pytest.raises(TrainError, match=r"AUC 0\.4 is below"):
        guards.check(2, {"ne": 1.0, "auc": 0.4, "auc_error": 0.1})


def test_none_of_it_is_looked_at_where_it_is_not_defined() -> None:
    guards = Guards(config_of(trainer__guards={"patience": 1, "max_ne": 1.0, "min_auc": 0.505}).trainer.guards)
    guards.check(1, {"ne": None, "auc": None})


def test_evaluations_within_an_epoch_stop_a_run_that_gets_no_better(tmp_path: Path) -> None:
    """A learning rate of almost 0: nothing ever improves on the first evaluation by so much."""
    write_all(tmp_path)
    changes: dict[str, Any] = {
        "trainer__eval_every": 3,
        "trainer__eval_rows": 100,
        "trainer__early_stopping": {"metric": "logloss", "patience": 2, "min_delta": 0.1},
        "optimizers__dense": {"kind": "sgd", "lr": 1e-6},
        "optimizers__sparse": {"kind": "sgd", "lr": 1e-6},
    }
    result = trainer(tmp_path, **changes).fit()
    evals = records(result.folder, "eval")
    assert [(line["step"], line["samples"], line.get("partial")) for line in evals] == [
        (3, 128, True), (6, 128, True), (9, 128, True), (9, 301, None)
    ]  # fmt: skip
    assert result.steps == 9 and result.eval is not None and result.eval["samples"] == 301
    assert "logloss is best at step 3" in (result.ended or "")
    assert "ends at step 9" in shown(tmp_path)
    again = trainer(tmp_path, **changes).fit()
    assert again == result


def test_evaluations_do_not_disturb_training(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    plain = trainer(tmp_path, name="plain").fit()
    often = trainer(tmp_path, name="often", trainer__eval_every=2).fit()
    assert often.eval == plain.eval
    lines = [[(line["step"], line["loss"]) for line in records(run.folder, "train")] for run in (plain, often)]
    assert lines[0] == lines[1]
    steps = [line["step"] for line in records(often.folder, "eval")]
    assert {2, 4, 6, 8, 10} <= set(steps)


@pytest.mark.parametrize(("step", "every"), [(3, 3), (10, 1000)], ids=["on the way", "at the end"])
def test_parameters_that_are_not_finite_never_reach_a_checkpoint(tmp_path: Path, step: int, every: int) -> None:
    """The loss of a step is finite, and its update is not."""
    write_all(tmp_path, rows=300)

    class Breaks(DLRM):
        calls = 0

        def forward(self, batch: Batch) -> Any:
            Breaks.calls += 1
            loss, logits = super().forward(batch)
            if Breaks.calls == step:
                next(self.over_arch.parameters()).register_hook(lambda grad: torch.full_like(grad, torch.inf))
            return loss, logits

    with pytest.raises(TrainError, match="the loss is not finite"):
        changes = {"trainer__checkpoint_every": every, "optimizers__dense": {"kind": "sgd"}, "data__eval": None}
        trainer(tmp_path, factory=Breaks, **changes).fit()
    assert not list((tmp_path / "runs" / "small" / "checkpoints").glob("step_*"))


class BreaksAt(DLRM):
    """Its parameters are not finite after the steps that are listed, counted over all models of a test."""

    steps: tuple[int, ...] = ()
    calls = 0

    def forward(self, batch: Batch) -> Any:
        loss, logits = super().forward(batch)
        if self.training:
            BreaksAt.calls += 1
            if BreaksAt.calls in BreaksAt.steps:
                next(self.over_arch.parameters()).register_hook(lambda grad: torch.full_like(grad, torch.inf))
        return loss, logits


HALVED: dict[str, Any] = {
    "trainer__checkpoint_every": 2,
    "trainer__log_every": 1,
    "optimizers__dense": {"kind": "sgd", "lr": 0.02},
    "data__eval": None,
}


def test_training_goes_back_with_half_the_learning_rate_where_it_may(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    BreaksAt.calls, BreaksAt.steps = 0, (4, 8)  # steps 4 and 6 of the run: back to steps 2 and 4
    changes = {**HALVED, "trainer__guards": {"halvings": 2}}
    made: list[weakref.ref[nn.Module]] = []

    def make(**given: Any) -> nn.Module:
        assert not [model for model in made if model() is not None], "tables are not there twice"
        model = BreaksAt(**given)
        made.append(weakref.ref(model))
        return model

    result = trainer(tmp_path, factory=make, **changes).fit()
    assert len(made) >= 3
    assert (result.steps, result.epochs, result.train["samples"]) == (10, 2, 600)
    halved = [event for event in records(result.folder, "event") if event["event"] == "halved"]
    assert [event["message"].rpartition(" ")[2] for event in halved] == ["0.5", "0.25"]
    rates = {line["step"]: line["lr"]["dense"] for line in records(result.folder, "train")}  # the last of each step
    assert [rates[step] for step in range(1, 11)] == [0.02] * 2 + [0.01] * 2 + [0.005] * 6
    longer = trainer(tmp_path, factory=BreaksAt, **changes, trainer__epochs=3).fit()
    assert {line["lr"]["dense"] for line in records(longer.folder, "train") if line["step"] > 10} == {0.005}


def test_halving_ends_where_it_does_not_help(tmp_path: Path) -> None:
    write_all(tmp_path, rows=300)
    BreaksAt.calls, BreaksAt.steps = 0, tuple(range(3, 100))
    with pytest.raises(TrainError, match="the loss is not finite"):
        trainer(tmp_path, factory=BreaksAt, **HALVED, trainer__guards={"halvings": 2}).fit()
    assert len([event for event in records(tmp_path / "runs" / "small", "event") if event["event"] == "halved"]) == 2
