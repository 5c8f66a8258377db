"""The versions of one model: loading, expected duration of a batch, and replacement by newer versions under load."""

from __future__ import annotations

import getpass
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from rayrec.data import empty_batch
from rayrec.inference import ExportError, Model
from rayrec.inference.artifact import PARITY, read_index
from rayrec.inference.export_store import CURRENT, ExportStore, Files, files_of, version_of
from rayrec.inference.scorer import Scorer
from rayrec.models import Batch
from rayrec.serve.limits import Limits
from rayrec.serve.requests import Reader
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage.cache import CACHE_BYTES, Held
from rayrec.storage.folder import open_folder
from rayrec.storage.secrets import without_secrets

AUDIT = "audit.jsonl"
_WARM_UP_ROWS = 100
# Pause before a refused version is loaded again although its files did not change: the cause may have passed. Doubles.
RETRY_S, MAX_RETRY_S = 10.0, 3600.0
MIN_FIXED_SHARE = 0.1  # a larger batch is not worthwhile once its fixed cost is below this share of its duration
MAX_INLINE_S = 0.02  # expected duration of a batch above which a thread scores it instead of the event loop


class LoadedVersion(Protocol):
    """A loaded version of an export."""

    @property
    def version(self) -> str: ...
    @property
    def folder(self) -> Path: ...


LoadedT = TypeVar("LoadedT", bound=LoadedVersion)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded version.

    Args:
        quantiles: Of the scores in evaluation, by label.
        export: Keeps the version's files in the cache.
    """

    version: str
    folder: Path
    model: Model
    reader: Reader
    quantiles: dict[str, list[float]]
    pace: Pace
    export: Held


def switch(path: Path | str, version: str | None = None) -> tuple[str, str]:
    """Sets the version that services load from a folder of exports, by writing its file `current`.

    Adds a line with time and user to `audit.jsonl`. Returns the names of the old and the new version.

    Args:
        version: A folder below `path`; None: the version before the current one, by name.

    Raises:
        ExportError: The version is missing, damaged or outside its limits.
    """
    exports, folder = ExportStore(path, 0), open_folder(path)
    names, old = list(exports.names())[::-1], exports.newest().name
    earlier = names[: names.index(old)] if old in names else names
    if version is None and not earlier:
        raise ExportError(f"{folder.path} has no version older than {old}; it has {', '.join(names)}")
    new = earlier[-1] if version is None else version
    if new not in names:
        raise ExportError(f"{folder.path} has no version {new!r}; it has {', '.join(names)}")
    check_version(folder.sub(new).path)
    folder.write(CURRENT, f"{new}\n".encode())
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "user": getpass.getuser(), "from": old, "to": new}
    audit_log = folder.read(AUDIT) if AUDIT in folder.names() else b""
    folder.write(AUDIT, audit_log + f"{json.dumps(line)}\n".encode())
    return old, new


def check_version(path: Path | str, cache_bytes: int = CACHE_BYTES) -> Path:
    """Checks an export, or the newest of a folder, without loading it: checksums and parity. Returns its local folder.

    Raises:
        ExportError: The export is missing, damaged or outside its limits.
    """
    exports = ExportStore(path, cache_bytes)
    folder = exports.open(exports.newest()).folder
    if read_index(folder).targets:
        check_parity(folder)
    return folder


def check_scores(folder: Path) -> None:
    """
    Raises:
        ExportError: The export does not score rows.
    """
    export = read_index(folder)
    if not export.targets or export.inputs.query is not None:
        raise ExportError(f"{folder} is {export.kind}, which does not score rows: serve it with --index, or `index:`")


def check_parity(folder: Path) -> None:
    """
    Raises:
        ExportError: The outputs of the export are outside their limits.
    """
    parity = json.loads((folder / PARITY).read_text(encoding="utf-8"))
    if not parity.get("within_limits"):
        problems = "; ".join(parity.get("problems", [])) or "its parity was not measured"
        raise ExportError(f"{folder}: its scores are outside their limits ({problems}); export the run again")


def load(export: Held, limits: Limits, folder: Path | None = None) -> Loaded:
    """Loads and warms up a version; its checksums must have been checked.

    Args:
        folder: Where it is; default: the folder of `export`, which may also have it in a folder below.

    Raises:
        ExportError: Its parity is outside its limits, or the score of a row of zeros is not finite.
        ValueError: Its mapping is damaged.
    """
    folder = folder or export.folder
    check_scores(folder)
    check_parity(folder)
    model = Model(folder, checksums=False)
    scorer = Scorer(model)
    empty_batch(scorer.schema)  # loads libraries that the first request would wait for
    seconds = {rows: _warm(model, rows) for rows in (2, 1, _WARM_UP_ROWS)}
    row_s = (seconds[_WARM_UP_ROWS] - seconds[1]) / (_WARM_UP_ROWS - 1)
    inputs = model.index.inputs
    reader = Reader(scorer.mapping, inputs.keys, limits, inputs.context or ())
    quantiles = dict(model.parity().get("quantiles", {}))
    pace = Pace(seconds[1], row_s, limits.batch_ms / 1e3)
    return Loaded(model.version, folder, model, reader, quantiles, pace, export)


def _warm(model: Model, rows: int) -> float:
    """Scores rows of zeros a few times; returns the shortest duration in seconds."""
    inputs = model.index.inputs
    ids = torch.zeros(rows * len(inputs.keys), dtype=torch.int64)
    weights = torch.ones(len(ids)) if inputs.weighted else None
    sparse = KeyedJaggedTensor(list(inputs.keys), ids, weights, lengths=torch.ones_like(ids))
    batch, durations = Batch(torch.zeros(rows, inputs.num_dense), sparse, torch.zeros(rows)), []
    for _ in range(3):
        begin = time.perf_counter()
        logits = model.score(batch)
        durations.append(time.perf_counter() - begin)
    if not bool(logits.isfinite().all()):
        raise ExportError(f"{model.folder}: the logit of a row of zeros is {logits.flatten()[0]}; check its training")
    return min(durations)


class Versions(Generic[LoadedT]):
    """The active version of a model or index, and its replacement by newer ones.

    Args:
        path: An export, or a folder of exports; a path or URI.
        load: Loads a version whose checksums have been checked.
        on_change: Called with "loaded" or "refused", the version, and its folder or the reason.

    Raises:
        ExportError, ValueError: The first version cannot be loaded.
    """

    def __init__(
        self,
        path: Path | str,
        load: Callable[[Held], LoadedT],
        on_change: Callable[[str, str, str], object],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._load, self._on_change = load, on_change
        self._exports = ExportStore(path, cache_bytes)
        self.refused: dict[str, str] = {}
        self.active = load(self._exports.open(self._exports.newest()))
        self._lock = threading.Lock()
        self._refused_files: Files = ()
        self._gap: str | None = None
        self._retry_s = self._retry_at = 0.0

    def refresh(self) -> bool:
        """Replaces the active version by the newest one; returns whether it did.

        A version that cannot be loaded is refused. It is tried again when one of its files changes, or after a pause,
        which doubles each time.
        """
        with self._lock:
            version = path = without_secrets(str(self._exports.path))
            files: Files = ()
            try:
                export = self._exports.newest()
                self._tell_gap(self._exports.gap)
                version = version_of(export)
                self.refused.pop(path, None)
                if version == self.active.version:
                    return False
                files = files_of(export)
                if files == self._refused_files and time.monotonic() < self._retry_at:
                    return False
                loaded = self._load(self._exports.open(export))
            except Exception as error:  # whatever is wrong with the new version, the old one stays active
                if self.refused.get(version) != str(error):
                    self._on_change("refused", version, str(error))
                self.refused[version] = str(error)
                unchanged, self._refused_files = files == self._refused_files, files
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S) if unchanged else RETRY_S
                self._retry_at = time.monotonic() + self._retry_s
                return False
            self.active = loaded  # requests in progress keep the old version
            self.refused = {} if self._gap is None else {"delta": self._gap}
            self._on_change("loaded", loaded.version, str(loaded.folder))
            return True

    def _tell_gap(self, gap: str | None) -> None:
        """Reports once that newer deltas wait for a lost one, or for a full export."""
        if gap is not None and gap != self._gap:
            self._on_change("refused", "delta", gap)
        if gap is not None:
            self.refused["delta"] = gap
        elif self._gap is not None:
            self.refused.pop("delta", None)
        self._gap = gap


class Pace:
    """Expected duration of a batch: a fixed cost, updated with every batch, and a cost per row, measured at loading.

    Args:
        fixed_s: Initial fixed cost.
        row_s: Cost per row.
        max_s: Maximum expected duration of a batch of several requests.
    """

    def __init__(self, fixed_s: float, row_s: float, max_s: float = MAX_INLINE_S) -> None:
        self._max_s = max_s
        self._fixed_s, self._row_s = max(fixed_s, 0.0), max(row_s, 1e-9)

    def observe(self, rows: int, seconds: float) -> None:
        """Updates the fixed cost with a scored batch."""
        self._fixed_s += 0.05 * (max(seconds - rows * self._row_s, 0.0) - self._fixed_s)

    def seconds(self, rows: int) -> float:
        """Expected duration of a batch."""
        return self._fixed_s + rows * self._row_s

    def max_rows(self) -> int:
        """Rows of a batch of several requests above which a larger batch is not worthwhile, or takes too long."""
        worthwhile = self._fixed_s * (1 - MIN_FIXED_SHARE) / (MIN_FIXED_SHARE * self._row_s)
        return max(1, round(min(worthwhile, self._max_s / self._row_s)))
