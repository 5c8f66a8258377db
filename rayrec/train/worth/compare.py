"""One pass over a log in the order of time: every variant scores a batch, then trains on it.

All variants read the same rows, and those whose features are mapped alike share the batches. So their losses are
paired: what makes a window hard or easy is equal for all, and cancels out in their difference.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rayrec.data import DataSet, Manifest, in_time_order
from rayrec.data import Mapping as RowMapping
from rayrec.data.arrays.arrow_types import decoded, micros_of
from rayrec.data.arrays.buffers import I64
from rayrec.data.formats.find_parquet import converting_into
from rayrec.data.formats.text_options import reading_text
from rayrec.data.mapping.column_types import fill_id_types
from rayrec.data.source.slices import RowGroupStreams
from rayrec.data.stream.reading import read_window
from rayrec.models import Batch, Retriever
from rayrec.storage.retries import Patience
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.report.worth import worth_page
from rayrec.train.run.folder import write_json
from rayrec.train.run.log import Mailbox
from rayrec.train.setup import build
from rayrec.train.worker.learner import make_learner
from rayrec.train.worker.lockstep import StepInput
from rayrec.train.worker.session import Job, Session, session_alone
from rayrec.train.worth.variants import Variant

_LEAST_BLOCKS = 3  # that an error is estimated from
F64 = np.ndarray[Any, np.dtype[np.float64]]


def compare(
    variants: Sequence[Variant],
    folder: Path,
    *,
    rows: int | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train variants side by side, and write `worth.json` and `worth.html`.

    Args:
        variants: the first is what the others are compared with.
        folder: folder of the two files.
        rows: rows of the log to read; default: all.

    Returns:
        For each variant: `name`, `ne`, `seconds` of scoring and training, and `windows` with the NE of each. For all
        but the first also `difference`, the NE minus that of the first, and its standard `error`; the same of the later
        half of the windows, `late_difference` and `late_error`; and of each window. An error is None for less than
        three windows, or batches of a window.

    Raises:
        ValueError: configs without `order: time`, of other rows or batches, of a retriever or a label that is a number;
            data that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = variants[0].config
    for variant in variants:
        _check(variant, first)
    # Operators of a small model take less time than threads need to begin.
    torch.set_num_threads(1 if isinstance(first.trainer.threads_per_worker, str) else first.trainer.threads_per_worker)
    with converting_into(str(folder / "converted"), on_progress), reading_text(first.data.read.text):
        log, configs = _log([variant.config for variant in variants])
        session = session_alone(Mailbox())
        steps = math.ceil(min(log.rows, rows or log.rows) / first.trainer.batch_size)
        learned = [
            _Training(replace(variant, config=config), log, session, steps, folder)
            for variant, config in zip(variants, configs, strict=True)
        ]
        mappings = [RowMapping(config.training_schema, build.rows_of(config)) for config in configs]
        alike = [next(n for n, other in enumerate(configs) if _mapped_alike(config, other)) for config in configs]
        told = None
        for window, table, times in _batches(log, first, rows):
            if window != told and told is not None:
                on_progress(f"{told}: " + ", ".join(f"{one.name} {one.ne(told):.4f}" for one in learned))
            told, batches = window, dict[int, Batch]()
            for one, number in zip(learned, alike, strict=True):
                if number not in batches:
                    batches[number] = mappings[number].to_batch(table)
                one.take(window, batches[number], times)
    figures = _figures(learned)
    write_json(folder / "worth.json", {"variants": figures})
    (folder / "worth.html").write_text(worth_page(first.name, figures), encoding="utf-8")
    return figures


def _check(variant: Variant, first: TrainConfig) -> None:
    config, subject = variant.config, f"variant {variant.name!r}"
    if config.data.order != "time" or config.data.windows is None or config.data_schema.timestamp is None:
        raise TrainError(f"{subject}: needs data.order: time, data.windows and schema.timestamp")
    if (config.data.train, config.data.windows) != (first.data.train, first.data.windows):
        raise TrainError(f"{subject}: data.train and data.windows must be those of the config")
    if config.trainer.batch_size != first.trainer.batch_size:
        raise TrainError(f"{subject}: trainer.batch_size must be that of the config, because the batches are shared")
    if config.data.negative_rate < 1:
        raise TrainError(f"{subject}: trains on all rows; remove data.negative_rate")
    if config.data_schema.label_kinds[0] == "number":
        raise TrainError(f"{subject}: the first label is a number, which has no NE")
    if isinstance(build.model(config, "meta"), Retriever):
        raise TrainError(f"{subject}: {config.model.name} is a retriever, which has no NE; give a ranker")


def _log(configs: Sequence[TrainConfig]) -> tuple[Manifest, list[TrainConfig]]:
    """The rows in the order of time, with the columns of all configs; and the configs with their types of ids."""
    data = configs[0].data
    assert isinstance(data.train, DataSet) and data.windows is not None, "checked with the config"
    manifests = [Manifest.of(data.train, config.data_schema) for config in configs]
    columns = dict(chain.from_iterable(manifest.columns for manifest in manifests))
    filled = [
        config.model_copy(update={"data_schema": fill_id_types(config.data_schema, columns)}) for config in configs
    ]
    timestamp = configs[0].data_schema.timestamp
    assert timestamp is not None, "checked with the config"
    patience = Patience(data.read.retries, data.read.patience_s)
    ordered, _ = in_time_order(manifests[0], timestamp, data.windows, patience)
    return replace(ordered, columns=tuple(columns.items())), filled


def _mapped_alike(config: TrainConfig, other: TrainConfig) -> bool:
    return config.training_schema == other.training_schema and build.rows_of(config) == build.rows_of(other)


def _batches(log: Manifest, config: TrainConfig, most: int | None) -> Iterator[tuple[str, pa.Table, I64]]:
    """Consecutive rows of one window with their times, in µs since 1970."""
    windows, timestamp, size = config.data.windows, config.data_schema.timestamp, config.trainer.batch_size
    assert windows is not None and timestamp is not None, "checked with the config"
    done, left = 0, most if most is not None else log.rows
    table: pa.Table | None = None
    with closing(RowGroupStreams()) as streams:
        for number in range(len(log.windows)):
            more, problems = read_window(log, number, streams)
            if problems:
                raise problems.error(int(problems.rows()[0]))
            table = more if table is None else pa.concat_tables([table, more])
            times = micros_of(decoded(table.column(timestamp.column).combine_chunks()), timestamp.unit)
            by_time = windows.seconds is not None
            of_row = (
                times // (1_000_000 * (windows.seconds or 1))
                if by_time
                else ((done + np.arange(len(table))) // (windows.rows or 1))
            )
            start, is_last = 0, number == len(log.windows) - 1
            while start < len(table) and left > 0:
                stop = min(start + size, int(np.searchsorted(of_row, of_row[start], side="right")), start + left)
                if stop == len(table) < start + size and not is_last:
                    break  # its batch may go on
                window = int(of_row[start])
                shown = (
                    str(np.datetime64(window * (windows.seconds or 1), "s"))
                    if by_time
                    else (f"row {window * (windows.rows or 1):,}")
                )
                yield shown, table.slice(start, stop - start).combine_chunks(), times[start:stop]
                start, left = stop, left - (stop - start)
            table, done = table.slice(start), done + start
            if left <= 0:
                return


@dataclass(frozen=True, slots=True)
class _Window:
    """Sums of each batch of a window."""

    losses: list[float]
    weights: list[float]
    positives: list[float]

    def entropy(self) -> float:
        """Log loss of the base rate, times the weight of the rows."""
        weight = sum(self.weights)
        rate = sum(self.positives) / weight if weight else 0.0
        return -weight * (rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0


class _Training:
    """A variant that trains on the batches that it has scored, once they are as old as its delay."""

    def __init__(self, variant: Variant, log: Manifest, session: Session, steps: int, folder: Path) -> None:
        config = variant.config
        job = Job(config=config, train=log, eval=None, folder=folder, checkpoints=str(folder))
        self.name, self._config, self._delay_us, self._steps = variant.name, config, variant.delay_us, steps
        self._learner = make_learner(job, session)
        self._waiting: deque[tuple[int, Batch]] = deque()
        self._step, self.seconds, self.windows = 0, 0.0, dict[str, _Window]()

    def take(self, window: str, batch: Batch, times: I64) -> None:
        """Trains on the batches that are due at the first time of this one, and scores it."""
        start = time.perf_counter()
        while self._waiting and self._waiting[0][0] + self._delay_us <= times[0]:
            self._train(self._waiting.popleft()[1])
        self._score(window, batch)
        self._waiting.append((int(times[-1]), batch))
        self.seconds += time.perf_counter() - start

    def ne(self, window: str) -> float:
        sums = self.windows[window]
        return sum(sums.losses) / entropy if (entropy := sums.entropy()) else math.nan

    def _train(self, batch: Batch) -> None:
        learner, dense, sparse = self._learner, self._config.optimizers.dense, self._config.optimizers.sparse
        if learner.dynamic is not None:
            batch = next(learner.dynamic.trained(iter([_input(batch)]), lambda: self._step)).batch
        at = self._step, self._steps
        rates = dense.lr * dense.schedule.factor(*at), sparse.lr * sparse.schedule.factor(*at)
        learner.rates.set(self._step, learner.optimizer, *rates)
        learner.step(batch, 1.0, self._step)
        self._step += 1

    def _score(self, window: str, batch: Batch) -> None:
        learner = self._learner
        if learner.dynamic is not None:
            batch = next(learner.dynamic.found(iter([_input(batch)]))).batch
        learner.model.eval()
        logits = learner.score(batch).double()
        learner.model.train()
        label = batch.label.double()
        logits, label = (each[:, 0] if each.dim() > 1 else each for each in (logits, label))
        weight = torch.ones_like(label) if batch.weight is None else batch.weight.double()
        weight = torch.where(label.isnan(), 0.0, weight)  # a label that was not observed
        label = label.nan_to_num()
        sums = self.windows.setdefault(window, _Window([], [], []))
        sums.losses.append(float(binary_cross_entropy_with_logits(logits, label, weight, reduction="sum")))
        sums.weights.append(float(weight.sum()))
        sums.positives.append(float((label * weight).sum()))


def _input(batch: Batch) -> StepInput:
    return StepInput(batch=batch, rows=batch.rows, weight=float(batch.rows), share=1.0, cursor=None, wait_s=0.0)


def _figures(trained: Sequence[_Training]) -> list[dict[str, Any]]:
    first = trained[0]
    names = [name for name, window in first.windows.items() if window.entropy()]
    if not names:
        raise TrainError("no window has rows with both labels")
    entropies = np.array([first.windows[name].entropy() for name in names])
    late, figures = slice(len(names) // 2, None), []
    for one in trained:
        losses = np.array([sum(one.windows[name].losses) for name in names])
        values = {"name": one.name, "ne": float(losses.sum() / entropies.sum()), "seconds": one.seconds}
        by_window: list[dict[str, Any]] = [{"window": name, "ne": one.ne(name)} for name in names]
        if one is not first:
            paired = losses - np.array([sum(first.windows[name].losses) for name in names])
            values["difference"], values["error"] = _ratio(paired, entropies)
            values["late_difference"], values["late_error"] = _ratio(paired[late], entropies[late])
            for line, name, entropy in zip(by_window, names, entropies, strict=True):
                here = np.array(one.windows[name].losses) - np.array(first.windows[name].losses)
                weights = np.array(first.windows[name].weights)
                line["difference"], line["error"] = _ratio(here, entropy * weights / weights.sum())
        figures.append({**values, "windows": by_window})
    return figures


def _ratio(parts: F64, of: F64) -> tuple[float, float | None]:
    """The ratio of two sums, and its standard error by the jackknife over their terms."""
    ratio, count = float(parts.sum() / of.sum()), len(parts)
    if count < _LEAST_BLOCKS:
        return ratio, None
    without = (parts.sum() - parts) / (of.sum() - of)
    return ratio, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()))
