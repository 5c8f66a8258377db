"""A user's own metrics, named evaluation sets and the test set of a run, on one rank and on several."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from torchmetrics import Metric
from torchmetrics.classification import BinaryF1Score

from rayrec.models import Batch
from rayrec.train import ConfigError, Display, Trainer, TrainError, evaluate_run, parse_config
from rayrec.train.worker.own_metrics import OwnMetrics, metric_of
from tests.ranks import PerRank, on_ranks
from tests.train.small import config_of, make_job, rank_session, raw_config, write_all

F1 = {"name": "f1", "factory": "torchmetrics.classification:BinaryF1Score", "args": {"threshold": 0.4}}
CURVE = {"name": "exact_auc", "factory": "torchmetrics.classification:BinaryAUROC"}  # keeps all rows
SPREAD = {"name": "spread", "factory": "tests.train.test_own_metrics:Spread"}


class Spread(Metric):
    """The distance of the highest from the lowest probability."""

    full_state_update = False

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.add_state("low", torch.tensor(1.0), dist_reduce_fx="min")
        self.add_state("high", torch.tensor(0.0), dist_reduce_fx="max")

    def update(self, predicted: torch.Tensor, target: torch.Tensor) -> None:
        if self.fails:
            raise ValueError("no such thing")
        self.low, self.high = torch.minimum(self.low, predicted.min()), torch.maximum(self.high, predicted.max())

    def compute(self) -> dict[str, torch.Tensor]:
        return {"width": self.high - self.low}


class Mean(Spread):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")


def figures(group: dist.ProcessGroup, raw: dict[str, Any], batches: list[Any]) -> dict[str, Any]:
    job, session = make_job(raw), rank_session(group)
    own = OwnMetrics(job.config.trainer.metrics, job.config.data_schema, session.device)
    for logits, label in batches:
        own.update(logits, label)
    return own.compute(session.control)


def test_figures_of_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """A rank without any row among them; a label that was not observed does not count."""
    raw = raw_config(write_all(tmp_path, rows=100), trainer__metrics=[F1, CURVE, SPREAD])
    random = torch.Generator().manual_seed(0)
    logits, label = torch.randn(90, generator=random), (torch.rand(90, generator=random) < 0.4).float()
    label[7] = torch.nan
    parts = [(logits[i : i + 30], label[i : i + 30]) for i in (0, 30, 60)]
    (whole,) = on_ranks(1, figures, raw, [(logits, label)])
    seen = ~label.isnan()
    wanted = BinaryF1Score(threshold=0.4)(logits[seen].sigmoid(), label[seen].long())
    assert whole["f1"] == pytest.approx(float(wanted)) and whole["spread"]["width"] > 0.5
    for dealt_out in ([parts[:2], parts[2:]], [parts, []]):
        for found in on_ranks(2, figures, raw, PerRank(dealt_out)):
            assert found["f1"] == pytest.approx(whole["f1"]) and found["spread"] == pytest.approx(whole["spread"])
            assert found["exact_auc"] == pytest.approx(whole["exact_auc"])


def failing(group: dist.ProcessGroup, raw: dict[str, Any], batches: list[Any]) -> str:
    with pytest.raises(TrainError) as caught:
        figures(group, raw, batches)
    return str(caught.value)


def test_a_metric_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    raw = raw_config(write_all(tmp_path, rows=100), trainer__metrics=[{**SPREAD, "args": {"fails": True}}])
    parts = PerRank([[(torch.ones(2), torch.ones(2))], []])
    for message in on_ranks(2, failing, raw, parts):
        assert "trainer.metrics: spread: no such thing" in message


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ({**F1, "args": {"threshhold": 0.4}}, r"trainer\.metrics\.f1\.args: .* does not accept them"),
        ({**F1, "factory": "torchmetrics.classification:F2"}, "has no function 'F2'"),
        ({**F1, "factory": "builtins:dict", "args": {}}, r"returned dict, which is not a torchmetrics\.Metric"),
        ({**SPREAD, "factory": "tests.train.test_own_metrics:Mean"}, "cannot be merged exactly"),
    ],
)
def test_what_is_no_exact_metric_is_refused(metric: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainError, match=text):
        metric_of(config_of(trainer__metrics=[metric]).trainer.metrics[0])


@pytest.mark.parametrize(
    ("metric", "text"),
    [({**F1, "name": "auc"}, "'auc' is already used"), ({**F1, "label": "clik"}, "no label is named 'clik'")],
)
def test_names_of_metrics_and_labels_are_checked(tmp_path: Path, metric: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config(raw_config(tmp_path, trainer__metrics=[metric]))


def test_a_run_scores_its_sets_and_its_test_set(tmp_path: Path) -> None:
    write_all(tmp_path, rows=128)
    whole = str(tmp_path / "eval")
    low = {"path": whole, "filters": [["user", "<", 20]]}
    rows = pq.read_table(whole, columns=["user"])["user"].to_pylist()
    raw = raw_config(tmp_path, trainer__metrics=[F1], data__eval_sets={"low": low, "all": whole}, data__test=whole)
    out = io.StringIO()
    result = Trainer(parse_config(raw), display=Display(Console(file=out, width=300))).fit()
    assert result.eval is not None and result.test is not None
    sets = result.eval["sets"]
    assert sets["low"]["samples"] == sum(user < 20 for user in rows) and sets["all"]["samples"] == 301
    assert sets["all"]["f1"] == result.eval["f1"] == result.test["f1"] > 0 and sets["low"]["f1"] != result.eval["f1"]
    assert result.test["auc"] == result.eval["auc"] and "test set: auc" in out.getvalue()


def test_sets_need_the_main_one_and_code_of_a_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval_sets needs eval"):
        parse_config(raw_config(tmp_path, data__eval=None, data__eval_sets={"x": "y"}))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(trainer__metrics=[F1, SPREAD]).to_dict()))
    with pytest.raises(TrainError, match=r"trainer\.metrics: tests\.train\.test_own_metrics:Spread, which"):
        evaluate_run(tmp_path)


@pytest.mark.parametrize("lower", [False, True])
def test_an_own_figure_stops_early_and_keeps_the_best(tmp_path: Path, lower: bool) -> None:
    """A figure that rises from evaluation to evaluation: the last one is the best, or the first where less is."""
    rising = {"name": "rising", "factory": "tests.train.test_own_metrics:Rising", "lower_is_better": lower}
    changes = {
        "trainer__metrics": [rising],
        "trainer__early_stopping": {"metric": "rising", "patience": 2},
        "trainer__epochs": 4,
        "storage__keep_best": "rising",
    }
    config = parse_config(raw_config(write_all(tmp_path, rows=100), **changes))
    Rising.so_far = -1.0  # the check before the first step computes it too
    result = Trainer(config, display=Display(Console(file=io.StringIO()))).fit()
    assert result.best is not None and result.best["metric"] == "rising"
    assert (result.epochs, result.best["value"]) == ((3, 1.0) if lower else (4, 4.0))
    assert (result.ended is not None and "rising is best" in result.ended) == lower


class Rising(Spread):
    so_far = 0.0

    def compute(self) -> torch.Tensor:  # type: ignore[override]
        Rising.so_far += 1
        return torch.tensor(Rising.so_far)


def test_a_figure_that_no_evaluation_has_is_refused(tmp_path: Path) -> None:
    for changes in ({"storage__keep_best": "f2"}, {"trainer__early_stopping": {"metric": "f2"}}):
        with pytest.raises(ConfigError, match=r"got 'f2'; evaluations of model dlrm have auc, .*, f1"):
            parse_config(raw_config(tmp_path, trainer__metrics=[F1], **changes))


class Falling(Spread):
    """The first evaluation is the best. Damages the first checkpoint of `folder` once the last one is complete."""

    computed = 0
    folder: Path | None = None

    def compute(self) -> torch.Tensor:  # type: ignore[override]
        Falling.computed += 1
        if Falling.folder is not None and any(Falling.folder.glob("step_00000012-*")):
            flip_a_bit(next(Falling.folder.glob("step_00000004-*")))
            Falling.folder = None
        return torch.tensor(float(-Falling.computed))


FALLING = {"name": "falling", "factory": "tests.train.test_own_metrics:Falling"}


def flip_a_bit(checkpoint: Path) -> None:
    data = next(checkpoint.glob("data-*.safetensors"))
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(bytes(raw))


@pytest.mark.parametrize("ema", [None, 0.9], ids=["", "averaged"])
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_the_test_set_is_scored_with_the_checkpoint_that_export_takes(
    tmp_path: Path, ema: float | None, damaged: bool
) -> None:
    """The best one by `keep_best`, not the last weights; a damaged one does not fail a run that is finished."""
    Falling.computed, Falling.folder = 0, tmp_path / "runs" / "small" / "checkpoints" if damaged else None
    write_all(tmp_path, rows=256)
    raw = raw_config(
        tmp_path,
        trainer__metrics=[FALLING],
        trainer__epochs=3,
        storage__keep_best="falling",
        data__test=str(tmp_path / "eval"),
    )
    raw["optimizers"]["dense"]["ema"] = ema
    out = io.StringIO()

    trainer = Trainer(parse_config(raw), display=Display(Console(file=out, width=300)))
    result = trainer.fit()
    lines = [line for line in trainer.folder.read_metrics() if line["kind"] == "eval"]
    assert [line["step"] for line in lines] == [4, 8, 12] and result.best is not None and result.test is not None
    wanted = lines[-1] if damaged else lines[0]
    assert lines[0]["auc"] != lines[-1]["auc"]
    assert result.test["auc"] == wanted["auc"] and result.test["step"] == wanted["step"]
    assert Path(result.test["checkpoint"]).name.startswith(f"step_{wanted['step']:08d}")
    which = "step 12, the last one" if damaged else "step 4, the best by falling"
    assert f"(checkpoint of {which})" in out.getvalue()
    assert f"(checkpoint of {which})" in trainer.folder.report.read_text()
    assert ("data.test is evaluated with the last checkpoint instead" in out.getvalue()) == damaged


def noted(step: int, batch: Batch, logits: torch.Tensor, loss: torch.Tensor) -> None:
    """Writes the rows of a step of this process to a file."""
    assert logits.shape == batch.label.shape and not logits.requires_grad
    with open(os.environ["STEPS_FILE"], "a") as file:
        file.write(f"{step} {batch.rows} {float(loss)}\n")
    if step == int(os.environ.get("FAIL_AT", 0)):
        raise KeyError("no such feature")


def test_a_function_sees_every_step_and_a_metric_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS_FILE", str(tmp_path / "steps"))
    function = f"{__name__}:noted"
    trained = {"trainer__metrics": [F1 | {"training": True}], "trainer__on_batch": function, "trainer__log_every": 4}
    config = parse_config(raw_config(write_all(tmp_path, rows=300), trainer__num_workers=0, **trained))
    trainer = Trainer(config, display=Display(Console(file=io.StringIO())))
    result = trainer.fit()
    steps = [line.split() for line in (tmp_path / "steps").read_text().splitlines()]
    assert [int(step) for step, _, _ in steps] == list(range(1, result.steps + 1))
    assert sum(int(rows) for _, rows, _ in steps) == 300 * result.epochs
    lines = [record for record in trainer.folder.read_metrics() if record["kind"] == "train"]
    assert len(lines) > 2 and all(0 <= line["f1"] <= 1 for line in lines)
    assert len({line["f1"] for line in lines}) > 1

    monkeypatch.setenv("FAIL_AT", "3")
    with pytest.raises(
        TrainError, match=rf"trainer.on_batch: {function} failed at step 3: KeyError: 'no such feature'"
    ):
        Trainer(parse_config(raw_config(tmp_path, trainer__num_workers=0, name="other", **trained))).fit()
    with pytest.raises(TrainError, match=r"trainer.on_batch: module .* has no function 'nothing'"):
        Trainer(
            parse_config(
                raw_config(tmp_path, trainer__num_workers=0, name="none", trainer__on_batch=f"{__name__}:nothing")
            )
        ).fit()
    with pytest.raises(ConfigError, match=r"'loss' is already used"):
        parse_config(raw_config(tmp_path, trainer__metrics=[F1 | {"name": "loss", "training": True}]))
