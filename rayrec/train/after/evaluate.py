"""Evaluates a checkpoint of a run on the run's evaluation rows or on other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayrec.data import Manifest, manifest_of
from rayrec.data.formats.find_parquet import converting_into
from rayrec.data.formats.text_options import reading_text
from rayrec.data.mapping.fingerprint import mapping_fingerprint
from rayrec.models import Retriever
from rayrec.train.config.file import parse_config
from rayrec.train.driver.console import Display, evaluation_lines
from rayrec.train.driver.run_job import run_job
from rayrec.train.driver.warnings import of_evaluation
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST, choose
from rayrec.train.run.config import EVALUATION_SHARDING, config_of_run
from rayrec.train.run.folder import RunFolder, write_json
from rayrec.train.run.log import Record, RunState
from rayrec.train.setup import build
from rayrec.train.terminal import notice
from rayrec.train.worker.session import Job


def evaluate_run(
    run_dir: str | Path,
    data: str | None = None,
    num_workers: int = 0,
    factory: build.Factory | None = None,
    display: Display | None = None,
    allow_code: bool = False,
    checkpoint: str = NEWEST,
) -> dict[str, Any]:
    """Load a checkpoint of a run, evaluate it, print the metrics and write them to `evaluation.json`.

    A damaged checkpoint is an error; `checkpoint="whole"` skips damaged ones and reports them on stderr.

    Args:
        run_dir: a run folder.
        data: Parquet file, folder or glob; default: the run's `data.eval`.
        num_workers: workers to shard the tables over, independent of the run's own; 0 evaluates in this process.
        factory: makes the model, if the run was given one in Python.
        allow_code: import a `model.factory` that the run folder names.
        checkpoint: see `choose`.

    Returns:
        `auc`, `ne`, `logloss`, `calibration` and `samples` (with several labels, per label in `tasks`), `skipped`,
        `step`, `checkpoint` and `data`.

    Raises:
        ValueError: not a run folder, no checkpoint, no evaluation data, or data that cannot be read.
    """
    display = display or Display()
    folder = RunFolder(Path(run_dir).absolute())
    raw = config_of_run(folder, allow_code=allow_code or factory is not None, data=data)
    job = _job(raw, folder, num_workers, factory, checkpoint)
    state = RunState()

    def handle(record: Record) -> None:
        state.update(record)
        if record.get("event") == "storage":
            notice(record["message"])

    outcome = run_job(job, state, handle, display, previous_attempts=0)
    write_json(folder.path / "evaluation.json", outcome)
    display.say(f"read the checkpoint of step {outcome['step']}: {outcome['checkpoint']}")
    for line in evaluation_lines(f"{outcome['data']} (step {outcome['step']})", outcome):
        display.say(line, style="bold")
    for text in of_evaluation(outcome):
        display.say(f"warning: {text}", style="yellow")
    return outcome


def _job(
    raw: dict[str, Any],
    folder: RunFolder,
    num_workers: int,
    factory: build.Factory | None,
    checkpoint: str,
) -> Job:
    raw["trainer"]["num_workers"] = num_workers
    raw["trainer"]["evaluate"] = "inline"  # which the run's own evaluations need not be
    if num_workers == 0:  # in this process, whatever the run's workers needed
        raw["trainer"] |= {"use_gpu": False, "resources": {}}
    raw["trainer"]["batch_size"] = max(raw["trainer"]["batch_size"], num_workers)
    raw["sharding"] |= EVALUATION_SHARDING
    config = parse_config(raw)
    if config.data.eval is None:
        raise TrainError(f"the config of {folder.path} has no data.eval; name the rows to score with --data")
    selected = choose(folder, checkpoint, notice)
    with converting_into(folder.converted, notice), reading_text(config.data.read.text):
        manifest, trained = Manifest.of(config.data.eval, config.row_schema), None
        if isinstance(build.model(config, "meta", factory), Retriever):
            try:
                trained = manifest_of(config.data.train, config.training_schema)
            except ValueError as error:
                notice(f"popularity metrics are not computed: the training rows cannot be read: {error}")
    mapping = mapping_fingerprint(config.data_schema, build.rows_of(config))
    return Job(
        config=config,
        train=trained or manifest,
        eval=manifest,
        folder=folder.path,
        checkpoints=folder.checkpoints,
        factory=factory,
        mapping=mapping,
        task="evaluate",
        popular=trained is not None,
        checkpoint=None if checkpoint == NEWEST else selected.name,
    )
