"""One model's versions: what is loaded, how long it takes to score, and the watch for newer ones, which take over under
load or not at all."""

from __future__ import annotations

import getpass
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayrec.data import empty_batch
from rayrec.inference import ExportError, Model
from rayrec.inference.artifact import PARITY
from rayrec.inference.exports import CURRENT, Exports, Files, files_of, version_of
from rayrec.inference.scorer import Scorer
from rayrec.models import Batch
from rayrec.serve.limits import Limits
from rayrec.serve.requests import Reader
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage.cache import CACHE_BYTES, Held
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import without_secrets

AUDIT = "audit.jsonl"
_MANY = 100  # rows that show what a row costs
PAUSE_S, LONGEST_S = 10.0, 3600.0  # before a refused version is read again as it is: the reason may have passed
ENOUGH = 0.1  # fixed costs below this share of a batch's time are not worth a larger batch
DEADLINE_S = 0.02  # the rows of several requests together are planned to take no longer, nor is an event loop kept


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version that answers requests."""

    version: str
    folder: Path
    model: Model
    reader: Reader
    quantiles: dict[str, list[float]]
    pace: Pace
    export: Held


def switch(place: Path | str, version: str | None = None) -> tuple[str, str]:
    """Names in the file `current` of a folder of exports which of them is served; services look at it soon. A line in
    `audit.jsonl` says when and who. Returns the folder's name before and now.

    Args:
        version: a folder below `place`; None: the last by name before the one that is served now.

    Raises:
        ExportError: there is no such version, or it is damaged or outside its limits.
    """
    exports, there = Exports(place, 0), open_folder(place)
    names, before = list(exports.names())[::-1], exports.newest().name
    earlier = names[: names.index(before)] if before in names else names
    if version is None and not earlier:
        raise ExportError(f"{there.path} holds nothing older than {before}; there are {', '.join(names)}")
    now = earlier[-1] if version is None else version
    if now not in names:
        raise ExportError(f"{there.path} has no version {now!r}; there are {', '.join(names)}")
    check_version(there.sub(now).path)
    there.write(CURRENT, f"{now}\n".encode())
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "user": getpass.getuser(), "from": before, "to": now}
    earlier_lines = there.read(AUDIT) if AUDIT in there.names() else b""
    there.write(AUDIT, earlier_lines + f"{json.dumps(line)}\n".encode())
    return before, now


def check_version(place: Path | str, cache_bytes: int = CACHE_BYTES) -> Path:
    """That what a place stands for is whole and within its limits, without loading it; returns its folder here.

    Raises:
        ExportError: it is not.
    """
    exports = Exports(place, cache_bytes)
    folder = exports.open(exports.newest()).folder
    _check_parity(folder, json.loads((folder / PARITY).read_text(encoding="utf-8")))
    return folder


def _check_parity(folder: Path, parity: Mapping[str, Any]) -> None:
    if not parity.get("within_limits"):
        problems = "; ".join(parity.get("problems", [])) or "it has no parity"
        raise ExportError(f"{folder}: its scores are outside their limits ({problems}); export it anew")


def load(export: Held, limits: Limits) -> Loaded:
    """Loads and warms a version whose files are checked.

    Raises:
        ExportError: its parity was outside its limits.
        ValueError: its mapping is damaged, or it does not score.
    """
    folder, model = export.folder, Model(export.folder, checksums=False)
    _check_parity(folder, model.parity())
    scorer = Scorer(model)
    empty_batch(scorer.schema)  # loads what the first request would wait for
    seconds = {rows: _warm(model, rows) for rows in (2, 1, _MANY)}
    row_s = (seconds[_MANY] - seconds[1]) / (_MANY - 1)
    inputs = model.index.inputs
    reader = Reader(scorer.mapping, inputs.keys, limits, inputs.context or ())
    quantiles = dict(model.parity().get("quantiles", {}))
    pace = Pace(seconds[1], row_s, limits.batch_ms / 1e3)
    return Loaded(model.version, folder, model, reader, quantiles, pace, export)


def _warm(model: Model, rows: int) -> float:
    """Scores rows of zeros a few times; returns the least seconds."""
    inputs = model.index.inputs
    ids = torch.zeros(rows * len(inputs.keys), dtype=torch.int64)
    weights = torch.ones(len(ids)) if inputs.weighted else None
    sparse = KeyedJaggedTensor(list(inputs.keys), ids, weights, lengths=torch.ones_like(ids))
    batch, took = Batch(torch.zeros(rows, inputs.num_dense), sparse, torch.zeros(rows)), []
    for _ in range(3):
        begin = time.perf_counter()
        logits = model.score(batch)
        took.append(time.perf_counter() - begin)
    if not bool(logits.isfinite().all()):
        raise ExportError(f"{model.folder}: a row of zeros scores {logits.flatten()[0]}; look at its training")
    return min(took)


class Versions:
    """The version of one place that answers now.

    Args:
        place: an export, or a folder of exports; a path or URI.
        on_change: called with "loaded" or "refused", the version, and its folder or the reason.

    Raises:
        ExportError, ValueError: the first version cannot be loaded.
    """

    def __init__(
        self,
        place: Path | str,
        limits: Limits,
        on_change: Callable[[str, str, str], object],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._limits, self._on_change = limits, on_change
        self._exports = Exports(place, cache_bytes)
        self.refused: dict[str, str] = {}
        self.active = load(self._exports.open(self._exports.newest()), limits)
        self._turn = threading.Lock()
        self._refused_files: Files = ()
        self._pause_s = self._again_at = 0.0

    def refresh(self) -> bool:
        """Loads what is newest now, and lets it take over; what fails is read again once one of its files changes, or a
        pause is over, twice as long each time. Returns whether another took over."""
        with self._turn:
            version = place = without_secrets(str(self._exports.place))
            files: Files = ()
            try:
                export = self._exports.newest()
                version = version_of(export)
                self.refused.pop(place, None)
                if version == self.active.version:
                    return False
                files = files_of(export)
                if files == self._refused_files and time.monotonic() < self._again_at:
                    return False  # reading all of it again would find the same
                loaded = load(self._exports.open(export), self._limits)
            except Exception as error:  # whatever is wrong with a new version, the old one answers
                if self.refused.get(version) != str(error):
                    self._on_change("refused", version, str(error))
                self.refused[version] = str(error)
                same, self._refused_files = files == self._refused_files, files
                self._pause_s = min(2 * self._pause_s, LONGEST_S) if same else PAUSE_S
                self._again_at = time.monotonic() + self._pause_s
                return False
            self.active = loaded  # requests that began with the old version end with it
            self.refused.clear()
            self._on_change("loaded", loaded.version, str(loaded.folder))
            return True


class Pace:
    """Seconds of a batch: a fixed part, measured on every batch, and a row's, measured when a version is loaded.

    Args:
        fixed_s: the first guess.
        row_s: of the model.
        longest_s: that a batch of several requests may take.
    """

    def __init__(self, fixed_s: float, row_s: float, longest_s: float = DEADLINE_S) -> None:
        self._longest_s = longest_s
        self._fixed_s, self._row_s = max(fixed_s, 0.0), max(row_s, 1e-9)

    def observe(self, rows: int, seconds: float) -> None:
        """A batch has been scored."""
        self._fixed_s += 0.05 * (max(seconds - rows * self._row_s, 0.0) - self._fixed_s)

    def seconds(self, rows: int) -> float:
        """Of a batch, as far as is known."""
        return self._fixed_s + rows * self._row_s

    def most_rows(self) -> int:
        """Of a batch of several requests: beyond, it gains nothing, or takes too long."""
        worth = self._fixed_s * (1 - ENOUGH) / (ENOUGH * self._row_s)
        return max(1, round(min(worth, self._longest_s / self._row_s)))
