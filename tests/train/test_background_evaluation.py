"""Evaluations in the background: the figures of inline ones, and what happens where they fail or end late."""

from __future__ import annotations

import io
import json
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray
import torch
from rich.console import Console
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.storage.parallel import actor_here
from rayrec.train import ConfigError, Display, Result, RunFolder, Trainer, parse_config
from rayrec.train.driver.evaluations import MOST_PENDING, Evaluations
from rayrec.train.run.log import Mailbox, Record, RunState
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.session import Session, session_of
from tests.train.small import Silent, fit_in, flat, make_job, raw_config, write_all

EVALUATING = "CheckpointEvaluator.evaluate"  # in Ray's title of the process
NOT_FIGURES = {"kind", "time", "attempt"}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    if ray.is_initialized():
        ray.shutdown()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


class Waits(nn.Module):
    """A model that takes its time to train, and waits in the process that evaluates in the background: for some seconds
    a batch, or while a file exists."""

    def __init__(self, inner: nn.Module, step_s: float, evaluating: float | Path) -> None:
        super().__init__()
        self.inner, self.step_s, self.evaluating = inner, step_s, evaluating

    def forward(self, batch: Batch) -> Any:
        if self.training:
            time.sleep(self.step_s)
        elif EVALUATING in Path("/proc/self/cmdline").read_text():
            if isinstance(self.evaluating, float):
                time.sleep(self.evaluating)
            else:
                while self.evaluating.exists():
                    time.sleep(0.05)
        return self.inner(batch)


def waits(step_s: float = 0.0, evaluating: float | Path = 0.0) -> Callable[..., nn.Module]:
    return lambda **given: Waits(DLRM(**given), step_s, evaluating)


def fit(folder: Path, factory: Any = None, **changes: Any) -> tuple[Result, list[Record], str]:
    """The result of a run, its metrics, and what it shows."""
    text = io.StringIO()
    display = Display(Console(file=text, width=200))
    result = Trainer(parse_config(raw_config(folder, **changes)), factory=factory, display=display).fit()
    return result, list(RunFolder(result.folder).read_metrics()), text.getvalue()


def figures(records: list[Record]) -> dict[tuple[int, bool], Record]:
    """The metrics of each evaluation, by step and whether it read the first rows only."""
    evals = [record for record in records if record["kind"] == "eval"]
    assert [record["step"] for record in evals] == sorted(record["step"] for record in evals)
    return {
        (record["step"], record.get("partial", False)): flat(
            {key: value for key, value in record.items() if key not in NOT_FIGURES}
        )
        for record in evals
    }


def events(records: list[Record], event: str) -> list[Record]:
    return [record for record in records if record.get("event") == event]


class Inline:
    """A run that was evaluated inline, with all its checkpoints."""

    def __init__(self, folder: Path) -> None:
        write_all(folder)
        self.raw = raw_config(folder, trainer__eval_every=8, storage__keep=20, storage__keep_best="auc")
        self.folder = folder
        self.result, self.records, _ = fit(
            folder, waits(), trainer__eval_every=8, storage__keep=20, storage__keep_best="auc"
        )

    def checkpoint(self, step: int) -> str:
        return f"step_{step:08}-0001"


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Inline:
    return Inline(tmp_path_factory.mktemp("inline"))


def pause_of(raw: dict[str, Any]) -> Path:
    """While this file exists, the process of `one_driver` waits."""
    return Path(raw["storage"]["path"]).with_name("pause")


class Driver:
    """The driver's part of background evaluations of a run, with its mailbox."""

    def __init__(self, raw: dict[str, Any], factory: Any) -> None:
        self.mailbox = actor_here(Mailbox)
        self.pause = pause_of(raw)
        self.evaluations = Evaluations(replace(make_job(raw), factory=factory), self.mailbox, RunState())
        self.records: list[Record] = []
        self._earlier = 0  # outcomes of earlier tests

    def __enter__(self) -> Driver:
        self.evaluations.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.evaluations.close()
        ray.kill(self.mailbox)

    def request(self, step: int, checkpoint: str, max_rows: int | None = None) -> None:
        self.evaluations({"kind": "evaluate", "step": step, "epoch": 0, "checkpoint": checkpoint, "max_rows": max_rows})

    def outcomes(self, count: int, seconds: float = 180.0) -> list[Record]:
        until = time.monotonic() + seconds
        while len(outcomes := ray.get(self.mailbox.outcomes.remote(self._earlier))) < count:
            assert time.monotonic() < until, f"{outcomes} after {seconds} s"
            time.sleep(0.1)
        self.records += ray.get(self.mailbox.take.remote())
        return list(outcomes)

    def anew(self) -> Driver:
        """For another test, which requests other evaluations."""
        self._earlier += len(ray.get(self.mailbox.outcomes.remote(self._earlier)))
        ray.get(self.mailbox.take.remote())
        self.records = []
        return self

    def said(self, event: str) -> list[str]:
        return [record["message"] for record in events(self.records, event)]


def evaluators() -> list[psutil.Process]:
    """The processes of this test's Ray that evaluate."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if EVALUATING in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_evaluator() -> None:
    until = time.monotonic() + 120
    while not (running := evaluators()):
        assert time.monotonic() < until, "no process evaluates"
        time.sleep(0.05)
    for process in running:
        process.kill()
        with suppress(psutil.Error):
            process.wait(60)


@pytest.fixture(scope="module")
def one_driver(inline: Inline) -> Iterator[Driver]:
    """Its process that evaluates takes some seconds to start."""
    with Driver(inline.raw, waits(evaluating=pause_of(inline.raw))) as driver:
        yield driver


@pytest.fixture
def driver(one_driver: Driver) -> Driver:
    return one_driver.anew()


def test_a_checkpoint_has_the_figures_of_its_inline_evaluation(inline: Inline, driver: Driver) -> None:
    expected = figures(inline.records)
    steps = sorted(step for step, _ in expected)
    assert len(steps) >= 4
    for number, step in enumerate(steps, start=1):
        driver.request(step, inline.checkpoint(step))
        outcome = driver.outcomes(number)[-1]
        assert outcome["scores"]["auc"] == expected[step, False]["auc"]
    assert figures(driver.records) == expected


@pytest.mark.long
def test_a_killed_evaluator_is_replaced_and_given_up_after_the_third(inline: Inline) -> None:
    with Driver(inline.raw, waits(evaluating=1.0)) as driver:
        driver.request(8, inline.checkpoint(8))
        kill_evaluator()
        (outcome,) = driver.outcomes(1)
        assert outcome["scores"] is not None, [record.get("message") for record in driver.records]
        assert driver.said("eval_restarted") == ["The process that evaluates step 8 was lost; starting another."]
        driver.request(16, inline.checkpoint(16))
        for _ in range(3):
            kill_evaluator()
        assert driver.outcomes(2)[-1]["scores"] is None
        (failed,) = driver.said("eval_failed")
        assert failed.startswith("The evaluation of step 16 failed (the process was lost 3 times")
        driver.request(24, inline.checkpoint(24))  # the next one has a new process
        assert driver.outcomes(3)[-1]["scores"]["samples"] == 301


def test_a_damaged_and_a_removed_checkpoint_are_named(inline: Inline, driver: Driver) -> None:
    checkpoints = inline.folder / "runs" / "small" / "checkpoints"
    copy = shutil.copytree(checkpoints / inline.checkpoint(8), checkpoints / inline.checkpoint(7))
    parts = list(copy.glob("*.safetensors"))
    for part in parts:
        content = part.read_bytes()
        part.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    for step in (7, 9, 16):
        driver.request(step, inline.checkpoint(step), max_rows=400)
    damaged, removed, whole = driver.outcomes(3)
    texts = driver.said("eval_failed")
    shutil.rmtree(copy)
    assert damaged["scores"] is removed["scores"] is None
    assert whole["scores"]["samples"] == 301
    assert parts and "step 7 failed" in texts[0] and "is damaged" in texts[0]
    assert "step 9 failed" in texts[1] and "was removed" in texts[1]


def test_the_oldest_is_skipped_where_evaluations_are_slower_than_steps(inline: Inline, driver: Driver) -> None:
    driver.pause.touch()
    driver.request(8, inline.checkpoint(8), max_rows=350)  # one that was not asked for yet
    until = time.monotonic() + 120
    while not evaluators():
        assert time.monotonic() < until
        time.sleep(0.05)
    steps = (12, 16, 18, 24)
    for step in steps:
        driver.request(step, inline.checkpoint(step), max_rows=350)
    driver.pause.unlink()
    outcomes = driver.outcomes(5)
    assert [text.split(":")[0] for text in driver.said("eval_skipped")] == [
        "Skipped the evaluation of step 12", "Skipped the evaluation of step 16",
    ]  # fmt: skip
    assert len(steps) - 2 == MOST_PENDING
    assert [outcome["step"] for outcome in outcomes] == [12, 16, 8, 18, 24]


def test_workers_that_restart_hear_what_there_is_before_their_checkpoint(inline: Inline) -> None:
    with Driver(inline.raw, waits(evaluating=0.3)) as driver:
        driver.request(8, inline.checkpoint(8))
        assert driver.outcomes(1)[0]["scores"]
        driver.request(16, inline.checkpoint(16))
        driver.request(24, inline.checkpoint(24))
        ray.get(driver.mailbox.begin.remote(True))
        driver.evaluations({"kind": "begin", "resumed_step": 16})
        outcomes = driver.outcomes(3)
        driver.request(16, inline.checkpoint(16))  # as the workers do, which return to it
        assert driver.outcomes(4) == [*outcomes, outcomes[2]]  # told again, without another evaluation
    assert [(outcome["step"], outcome.get("pending", False)) for outcome in outcomes] == [
        (8, False), (16, True), (16, False),
    ]  # fmt: skip


BACKGROUND = {"trainer__num_workers": 2, "trainer__evaluate": "background", "trainer__eval_every": 8}


class Answering(Silent):
    """A sink that answers each request for an evaluation at once, with the next of some AUCs; without one, never."""

    def __init__(self, *aucs: float) -> None:
        super().__init__()
        self._aucs, self.outcomes = iter(aucs), deque[Record]()

    def put(self, record: Record) -> None:
        super().put(record)
        if record["kind"] == "evaluate" and (auc := next(self._aucs, None)) is not None:
            self.outcomes.append({**record, "scores": {"auc": auc}})

    @property
    def requested(self) -> list[int]:
        return [record["step"] for record in self.records if record["kind"] == "evaluate"]

    def session(self) -> Session:
        control = Control(0, 1, None, lambda: False, lambda: bool(self.outcomes))
        return replace(session_of(torch.device("cpu"), None, control, self), evaluated=self.outcomes)


def test_a_launch_evaluates_what_the_launch_before_left_and_counts_it(tmp_path: Path) -> None:
    write_all(tmp_path)
    early = {"metric": "auc", "patience": 2}
    changes = {**BACKGROUND, "trainer__hang_s": 0.5, "trainer__early_stopping": early, "storage__keep": 1}
    lost, late = Answering(), Answering(0.9, *[0.5] * 9)
    fit_in(lost.session(), make_job(raw_config(tmp_path, **changes, trainer__epochs=1)))
    assert lost.requested == [8, 16]
    outcome = fit_in(late.session(), make_job(raw_config(tmp_path, **changes, trainer__epochs=4)))
    evaluated = list(dict.fromkeys(late.requested))  # the driver does not repeat one
    assert evaluated[:3] == [8, 16, 24], "the checkpoint of step 8 was kept, as it was not evaluated"
    ended = events(late.records, "ended")
    assert len(ended) == 1 and "of step 24" in ended[0]["message"], "step 8 is the best; 16 and 24 are no better"
    assert 24 <= outcome["steps"] < 32


@pytest.mark.long(minutes=4)
def test_a_run_has_the_figures_and_the_best_checkpoint_of_an_inline_run(tmp_path: Path) -> None:
    write_all(tmp_path)
    changes = {**BACKGROUND, "storage__keep": 2, "storage__keep_best": "auc"}
    inline, inline_records, _ = fit(tmp_path, waits(), **{**changes, "name": "inline", "trainer__evaluate": "inline"})
    result, records, text = fit(tmp_path, waits(step_s=0.8), **changes)
    expected, scored = figures(inline_records), figures(records)
    assert scored.keys() == expected.keys()
    for key, metrics in expected.items():
        assert scored[key] == pytest.approx(metrics, rel=1e-6), key
    assert result.eval is not None and inline.eval is not None
    assert result.eval["auc"] == scored[32, False]["auc"] == pytest.approx(inline.eval["auc"])
    # The lines of later steps come first: training does not wait.
    order = [(record["kind"], record["step"]) for record in records if record["kind"] in ("train", "eval")]
    assert order.index(("train", 12)) < order.index(("eval", 8))
    checkpoints = result.folder / "checkpoints"
    scores = json.loads((checkpoints / "scores.json").read_text())
    best = max(scores, key=lambda name: scores[name]["auc"])
    assert result.best is not None and result.best["checkpoint"].endswith(best)
    assert inline.best is not None and inline.best["step"] == result.best["step"]
    whole = {path.name for path in checkpoints.glob("step_*") if (path / "manifest.json").exists()}
    assert whole == {best, "step_00000032-0001", "step_00000030-0001"}
    assert "in the background" not in text and "missing" not in text


@pytest.mark.long
def test_early_stopping_counts_late_evaluations_and_says_so(tmp_path: Path) -> None:
    write_all(tmp_path, 3000)
    early = {"metric": "auc", "patience": 2, "min_delta": 0.5}
    changes = {**BACKGROUND, "trainer__eval_every": 6, "trainer__early_stopping": early}
    result, records, _ = fit(tmp_path, waits(step_s=0.4), **changes)
    (ended,) = events(records, "ended")
    assert "has not improved in 2 evaluations (trainer.early_stopping)" in ended["message"]
    # The third one is of step 18, or of a later one: a slow process skips evaluations of which newer ones wait.
    steps = [step for step, _ in figures(records)]
    assert ended["message"].endswith(f", the last of them in the background, of step {steps[2]}")
    assert 18 <= steps[2] < result.steps < 94
    assert figures(records)[result.steps, False]["samples"] == 301  # of the last step, which the run waits for


@pytest.mark.long
def test_a_run_that_ends_before_its_evaluations_says_which_are_missing(tmp_path: Path) -> None:
    write_all(tmp_path)
    changes = {**BACKGROUND, "trainer__epochs": 1, "trainer__hang_s": 12.0}
    result, records, text = fit(tmp_path, waits(evaluating=600.0), **changes)
    missing = events(records, "eval_missing")
    assert [record["step"] for record in missing] == [8, 16]
    assert missing[0]["message"] == (
        "The evaluation of step 8 is missing: the run waited 12 s for it (trainer.hang_s). Evaluate the checkpoint "
        "with `rayrec evaluate --checkpoint 8`."
    )
    assert missing[1]["message"] in text
    assert result.steps == 16 and result.eval is None
    until = time.monotonic() + 120  # Ray ends the process of a killed actor a little later
    while evaluators() and time.monotonic() < until:
        time.sleep(0.1)
    assert not evaluators()


def test_it_needs_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_workers: 0 trains in this process, without Ray"):
        parse_config(raw_config(tmp_path, trainer__evaluate="background"))
