"""`Trainer(TrainConfig(...)).fit()` trains and evaluates a model, and writes the run folder."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrec._runtime.cgroup_limits import cpus
from rayrec.checkpoint.ownership import Launch, Lease, request_stop, stop_requested
from rayrec.data import DataError, DataSet, FooterIndex, FooterReading, Manifest, Mix, Shuffle, manifest_of
from rayrec.data.formats.find_parquet import converting_into
from rayrec.data.formats.text_options import reading_text
from rayrec.data.mapping.column_types import fill_id_types
from rayrec.data.mapping.fingerprint import mapping_fingerprint
from rayrec.data.order.periods import Periods
from rayrec.data.stream.time_windows import in_time_order
from rayrec.models import Retriever
from rayrec.storage.folder import open_folder
from rayrec.storage.retries import Patience
from rayrec.storage.secrets import without_secrets
from rayrec.train.config.checks import unread_inputs
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.driver import warnings
from rayrec.train.driver.callbacks import Callback, Callbacks, RunInfo
from rayrec.train.driver.cluster import connected
from rayrec.train.driver.console import Display
from rayrec.train.driver.recorder import Lines, Recorder
from rayrec.train.driver.run_job import run_job
from rayrec.train.driver.trackers import trackers_of
from rayrec.train.errors import Interrupted, TrainError
from rayrec.train.report import write_report
from rayrec.train.run.choice import best_so_far
from rayrec.train.run.config import refuse_code_from_elsewhere, reopen_files
from rayrec.train.run.folder import (
    RunFolder,
    leased,
    newest_checkpoint,
    refuse_other_config,
    write_json,
    write_yaml,
)
from rayrec.train.run.mirror import Mirror
from rayrec.train.run.paths import resolved
from rayrec.train.run.resolved import ResolvedValues, with_versions
from rayrec.train.run.result import Result
from rayrec.train.setup import build
from rayrec.train.setup.init_from import warm_start, with_row_laws
from rayrec.train.setup.init_vectors import initial_vectors
from rayrec.train.worker.follow import Chunk, chunk_of, follower_of
from rayrec.train.worker.limits import is_raised
from rayrec.train.worker.own_metrics import metric_of
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.session import TEST, Job


class _NothingNewError(Exception):
    """A followed run ended well before, and has no new rows."""

    def __init__(self, why: str, result: Result) -> None:
        super().__init__(why)
        self.result = result


class Trainer:
    """Trains one config, or resumes the run of the same name.

    Args:
        config: what to train.
        factory: Makes the model instead of `config.model`; called as
            `factory(tables=..., num_dense=..., device=..., **config.model.args)`.
        fresh: Rename the folder of an earlier run with this name instead of resuming it.
        root: Base folder of relative paths in the config. Default: the working folder.
        display: Shows progress.
        allow_code: In a Ray job, import a `model.factory` that was not submitted with it.
        callbacks: Called in this process during the run, see `rayrec.train.Callback`.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        factory: build.Factory | None = None,
        fresh: bool = False,
        root: Path | None = None,
        display: Display | None = None,
        allow_code: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if factory is None:
            refuse_code_from_elsewhere(config, Path.cwd(), allow_code=allow_code)
        self._given = resolved(config, root)
        self.config = self._given  # `fit` adds the resolved values
        self.factory, self.fresh = factory, fresh
        self.display = display or Display()
        self.callbacks = Callbacks([*trackers_of(config), *callbacks], self._warn)
        self.folder = RunFolder.at(self.config.storage.path, self.config.name)
        self._lease: Lease  # set during `fit`
        self._earlier_values: ResolvedValues  # resolved by earlier launches
        self.mirror = Mirror(self.folder)
        self._warnings: list[str] = []
        self._periods: Periods | None = None
        self._ordered: Manifest | None = None  # the training rows in the order of time
        self._progress: str | None = None
        self._starts_over = False  # progressive training without a checkpoint trains all periods, again if need be

    def fit(self) -> Result:
        """Train to the last epoch, evaluate, report.

        Raises:
            ValueError: invalid input (`DataError`) or settings, storage that cannot be written (`StorageError`), too
                few CPUs or GPUs (`ResourceError`), a failed run (`TrainError`), Ctrl-C (`Interrupted`).
                The message names the cause and the fix. Committed checkpoints are kept.
        """
        if self.fresh:
            self._set_aside()
        self.folder.create()
        text = reading_text(self._given.data.read.text)
        reopen_files()
        with self.folder.locked(), converting_into(self.folder.converted, self.display.say), text:
            self.mirror.pull()
            self._earlier_values = ResolvedValues.of(self.folder.read_config())
            self.config = with_versions(self._earlier_values.fill(self._given))
            self._count_epochs()
            finished = self._finished()
            if finished is not None:
                self._show(finished)
                return finished
            with leased(self.folder, self._warn) as self._lease:
                self._check_earlier()
                try:
                    job = self._job(self._lease.launch)
                except _NothingNewError as ended:
                    self._warn(f"run {self.config.name} is finished for now: {ended}")
                    self._show(ended.result)
                    return ended.result
                write_yaml(self.folder.given, self._given.to_dict())
                write_yaml(self.folder.config, self.config.to_dict())
                return self._run(job)

    def _run(self, job: Job) -> Result:
        recorder = Recorder(self.folder, self.display, on_checkpoint=self._push, on_record=self.callbacks.handle)
        run_id, path = self.folder.run_id(), self.folder.path
        self._push()  # the id tells another launch whose records these are
        stop = partial(request_stop, open_folder(job.checkpoints))
        info = RunInfo(id=run_id, name=self.config.name, folder=path, config=self.config, stop=stop)
        self.callbacks.call("on_start", info)
        try:
            outcome = run_job(job, recorder.state, recorder, self.display, self.folder.last_attempt())
        except TrainError as error:
            recorder.close()
            self._report_failure(error, recorder)
            advised = self._with_advice(error)
            self.callbacks.call("on_end", None, advised)
            self.callbacks.close(self.config.trainer.grace_s)
            raise advised from error.__cause__
        recorder.close()
        texts = tuple(
            dict.fromkeys([*warnings.at_end(self.config, outcome), *self._warnings, *self.callbacks.warnings])
        )
        result = Result(
            folder=self.folder.path,
            **outcome,
            recoveries=recorder.recoveries,
            warnings=texts,
            best=best_so_far(self.folder),
        )
        self._write_result(result)
        with self.display.writing(self.folder.report):
            write_report(self.folder.path)
        self.callbacks.call("on_end", result, None)
        self.callbacks.close(self.config.trainer.grace_s)
        late = [text for text in self.callbacks.warnings if text not in texts]
        if late:
            result = replace(result, warnings=(*texts, *late))
            self._write_result(result)
        self._push()
        self._show(result)
        return result

    def _write_result(self, result: Result) -> None:
        """Write `result.json`. A full disk does not make a finished run a failed one."""
        try:
            write_json(self.folder.result, result.to_dict())
        except OSError as error:
            self._warn(
                f"Could not write {self.folder.result} ({error.strerror}). The run is finished, and its last "
                "checkpoint is complete; make room and run the same command again to write the result."
            )

    def _push(self) -> None:
        with suppress(OSError):  # `push` reports it
            if not self._lease.held:
                return  # another launch has taken over the files
        self.mirror.push(self._warn)

    def _warn(self, text: str) -> None:
        self.display.say(text, style="yellow")

    def _job(self, launch: Launch) -> Job:
        """The job for the workers. Checks data and model before any worker starts."""
        config = self.config = with_row_laws(self.config)
        footers, reading = self._footers()
        train, evaluation = self._data(reading)
        config, data = self.config, self.config.data  # with resolved id types
        data_sets = {**data.eval_sets, **({} if data.test is None else {TEST: data.test})}
        sets = {name: Manifest.of(data_set, config.row_schema, reading) for name, data_set in data_sets.items()}
        for metric in config.trainer.metrics:
            metric_of(metric)
        if config.trainer.on_batch is not None:
            build.import_factory(config.trainer.on_batch, "trainer.on_batch")
        footers.save()
        model = build.model(config, "meta", self.factory)
        build.given_plan(config, config.trainer.least_workers)
        self._report_data(train, evaluation)
        evaluated = frozenset(
            int(record["step"])
            for record in self.folder.read_metrics()
            if record["kind"] == "eval" and not record.get("partial")
        )
        mapping = mapping_fingerprint(config.data_schema, build.rows_of(config))
        return Job(
            config=config,
            train=train,
            eval=evaluation,
            folder=self.folder.path,
            checkpoints=self.folder.checkpoints,
            launch=launch,
            factory=self.factory,
            evaluated_steps=evaluated,
            calibration=build.calibration(config),
            mapping=mapping,
            warm_start=warm_start(config, mapping),
            vectors=initial_vectors(config, mapping) if self._starts_from_vectors() else (),
            periods=self._periods,
            sets=sets,
            popular=isinstance(model, Retriever)
            and self._periods is None
            and config.data.follow is None
            and model.item not in config.data_schema.dynamic,
            period_rows={} if self._periods is None else train.parts[0].rows_by(self._periods.column),
        )

    def _footers(self) -> tuple[FooterIndex, FooterReading]:
        """The index of footers in the run folder, and how to read others."""
        footers, read = FooterIndex.open(self.folder.footers), self.config.data.read
        connect = connected if self.config.trainer.num_workers else nullcontext
        return footers, FooterReading(footers, Patience(read.retries, read.patience_s), connect)

    def _starts_from_vectors(self) -> bool:
        """Whether tables have initial vectors, and no checkpoint replaces them."""
        return any(table.vectors for table in self.config.tables) and newest_checkpoint(self.folder) is None

    def _data(self, reading: FooterReading) -> tuple[Manifest | Mix, Manifest | None]:
        """Manifests of the training and evaluation rows. Also resolves id types in `self.config`."""
        data, schema = self.config.data, self.config.row_schema
        rows = (data.shuffle if isinstance(data.shuffle, Shuffle) else Shuffle()).rows
        if self._ordered is not None:
            self._keep_id_types(self._ordered)
            return self._ordered, self._ordered
        if data.progressive is not None and isinstance(data.train, DataSet):
            manifest = Manifest.of(data.train, schema, reading, rows, data.progressive)
            self._keep_id_types(manifest)
            return manifest, manifest
        if data.follow is not None:
            train: Manifest | Mix = self._first_chunk()
        else:
            train = manifest_of(data.train, self.config.training_schema, reading, rows)
        self._keep_id_types(train.parts[0])
        return train, None if data.eval is None else Manifest.of(data.eval, self.config.row_schema, reading)

    def _first_chunk(self) -> Manifest:
        """The first rows to train on of a followed folder; waits for them."""
        latest = newest_checkpoint(self.folder)
        number = chunk_of(latest)
        checkpoints, launch = self.folder.checkpoints, self._lease.launch
        root = open_folder(checkpoints)

        def stopped() -> bool:
            with suppress(OSError):  # asked again at the next look
                return stop_requested(root, launch)
            return False

        follower = follower_of(self.config, checkpoints, self.folder.path, self.display.say)
        with closing(follower):
            found = follower.wait(number, stopped)
            if found is None:
                raise Interrupted(f"stopped while it waited for rows in {follower.awaited}", signal.SIGTERM)
            if isinstance(found, Chunk):
                return found.manifest
            raw = self.folder.read_result()
            if latest is not None and raw is not None and raw["steps"] == latest.step:
                raise _NothingNewError(found, Result.from_dict(self.folder.path, raw))
            fix = "add rows, or change the limit"
            raise DataError(f"data.follow: nothing to train on: {found}", file=follower.awaited, fix=fix)

    def _keep_id_types(self, trained: Manifest) -> None:
        of_rows, schema = fill_id_types(self.config.row_schema, dict(trained.columns)), self.config.data_schema
        filled = {feature.name: feature for feature in of_rows.sparse}
        sparse = [filled.get(feature.name, feature) for feature in schema.sparse]
        schema = schema.model_copy(update={"sparse": sparse, "column_types": of_rows.column_types})
        self.config = self.config.model_copy(update={"data_schema": schema})

    def _report_data(self, train: Manifest | Mix, evaluation: Manifest | None) -> None:
        text = f"training on {train.rows:,} rows in {train.num_files:,} files"
        if any(manifest.leaves_out for manifest in train.parts):
            text += " (before filters)"
        if self.config.data.negative_rate < 1:
            text += f" (negatives at a rate of {self.config.data.negative_rate:g})"
        if evaluation is not None:
            text += f", evaluation on {evaluation.rows:,} rows in {evaluation.num_files:,} files"
            text += " (before filters)" if evaluation.leaves_out else ""
        self.display.say(f"run {self.config.name}: {text}")
        local = not os.environ.get("RAY_ADDRESS")
        self._warnings = warnings.at_start(self.config, train.rows, cpus() if local else None)
        self._show_warnings(self._warnings)

    def _show_warnings(self, texts: Sequence[str]) -> None:
        for text in texts:
            self._warn(f"warning: {text}")

    def _count_epochs(self) -> None:
        """Set the number of epochs of training in periods: epochs started so far, plus one per remaining period."""
        if not self.config.data.windowed:
            return
        latest, periods = newest_checkpoint(self.folder), self._periods_now()
        position = START if latest is None else Position.from_dict(latest.extra["position"])
        position = position.among(periods)
        assert position.cursor.only is not None, "it is among periods"
        epochs = position.epoch + 1 + len(periods.remaining(position.cursor.only[1]))
        trainer = self.config.trainer.model_copy(update={"epochs": epochs})
        self.config = self.config.model_copy(update={"trainer": trainer})
        self._periods, self._progress = periods, periods.report(position.cursor.only, position.trained)
        self._starts_over = latest is None

    def _periods_now(self) -> Periods:
        """The periods of the training rows."""
        data, schema = self.config.data, self.config.data_schema
        assert isinstance(data.train, DataSet), "checked with the config"
        if data.progressive is not None:
            return Periods.of(data.train, data.progressive, schema.text_columns)
        assert data.windows is not None and schema.timestamp is not None, "checked with the config"
        footers, reading = self._footers()
        manifest = Manifest.of(data.train, schema, reading)
        footers.save()
        self._ordered, periods = in_time_order(manifest, schema.timestamp, data.windows, reading.patience)
        return periods

    def _finished(self) -> Result | None:
        """The result of an earlier launch that completed all epochs; None if there is more to train."""
        raw = self.folder.read_result()
        trainer = self.config.trainer
        if raw is None or self._starts_over or is_raised(raw.get("limit"), trainer):
            return None
        if self.config.data.follow is not None and not raw.get("limit"):
            return None
        if raw["epochs"] < trainer.epochs and not raw.get("ended"):
            return None
        self._refuse_other_config()
        hint = "raise trainer.epochs to train more"
        if self._progress is not None:
            hint = f"it is {self._progress}"
        if raw.get("ended"):
            hint = f"it ended early ({raw['ended']})"
        if raw.get("limit"):
            hint += "; increase the limit to continue it"
        self._warn(
            f"run {self.config.name} is already finished ({raw['epochs']} epochs); {hint}, or start over with --fresh"
        )
        return Result.from_dict(self.folder.path, raw)

    def _refuse_other_config(self) -> dict[str, Any] | None:
        """Refuse a config that differs from the last launch in a fixed field; returns the last launch's config.

        Both configs are filled with resolved values first, so they compare equal if only one sets a resolved value.
        """
        earlier = self.folder.read_given()
        if earlier is None:
            return None
        with suppress(ValueError):  # a config of another version is compared unchanged
            earlier = self._earlier_values.fill(TrainConfig(**earlier)).to_dict()
        refuse_other_config(self.folder, earlier, self._earlier_values.fill(self._given).to_dict())
        return earlier

    def _check_earlier(self) -> None:
        """Refuse a different config if the run has a committed checkpoint, and inputs that a new run does not read."""
        if newest_checkpoint(self.folder) is None:
            config = self.config
            unread = None if self.factory else unread_inputs(config.model, config.tables, config.data_schema)
            if unread is not None:
                raise TrainError(unread)
            return
        earlier = self._refuse_other_config()
        if earlier is None:
            return
        old, new = earlier["trainer"]["batch_size"], self.config.trainer.batch_size
        if old != new:
            self._warn(
                f"batch size changed from {old:,} to {new:,} rows; learning-rate schedules count steps of the new size"
            )

    def _set_aside(self) -> None:
        if not self.folder.path.exists():
            return
        with self.folder.locked():
            with leased(self.folder, self._warn):  # fails if another launch is running
                earlier = Mirror(self.folder)
                earlier.pull()
                earlier.push(self._warn)  # records that a killed driver did not copy
            backup = self.folder.set_aside()
        if backup is not None:
            self._warn(f"moved the earlier run to {backup}")

    def _report_failure(self, error: TrainError, recorder: Recorder) -> None:
        kind = "interrupted" if isinstance(error, Interrupted) else "failed"
        position = {"time": time.time(), "step": recorder.state.step, "attempt": recorder.state.attempt}
        record = {"kind": "event", **position, "event": kind, "message": without_secrets(str(error))}
        lines = Lines(self.folder.metrics, self.display)
        lines.add(json.dumps(record))
        lines.close()
        with self.display.writing(self.folder.report):
            write_report(self.folder.path)
        self._push()

    def _with_advice(self, error: TrainError) -> TrainError:
        """The error with advice on how to resume, if a checkpoint exists."""
        try:
            latest = newest_checkpoint(self.folder) if self._lease.held else None
        except (ValueError, OSError):  # the storage itself failed, which `error` reports
            return error
        if latest is None:
            return error
        advice = f"the checkpoint of step {latest.step} is intact; run the same command again to resume from it"
        if isinstance(error, Interrupted):
            return Interrupted(f"{error}\n{advice}", error.signal)
        return type(error)(f"{error}\n{advice}")

    def _show(self, result: Result) -> None:
        folder = self.folder
        paths = {
            "run folder": folder.path,
            "checkpoint": result.checkpoint,
            **({} if result.best is None else {f"best by {result.best['metric']}": result.best["checkpoint"]}),
            "report": folder.report,
            "TensorBoard": f"tensorboard --logdir {folder.tensorboard}",
        }
        self.display.summary(result.to_dict(), {name: str(path) for name, path in paths.items()})
        self._show_warnings(result.warnings)
