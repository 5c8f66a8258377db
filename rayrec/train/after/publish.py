"""Publishes a run to the folder that services follow: as a delta of the version before, or as a full export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rayrec.checkpoint import Checkpoint
from rayrec.inference.artifact import (
    INDEX,
    ExportError,
    ExportIndex,
    check_listed,
    copy_files,
    new_version,
    read_index,
    scratch_folder,
)
from rayrec.inference.delta import DELTA, Delta, is_small, read_delta, write_delta
from rayrec.inference.export_options import AUTO, ExportOptions
from rayrec.inference.export_store import ExportStore, natural_order
from rayrec.storage.cache import Held
from rayrec.train.after.export import find_checkpoint, trained_of, write_export
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.run.config import config_of_run
from rayrec.train.run.folder import RunFolder
from rayrec.train.terminal import notice


@dataclass(frozen=True, slots=True)
class Published:
    """What was published.

    Args:
        folder: the new version; None if the newest version is of this checkpoint, with these options.
        delta: of the version before; None for a full export.
        step: training steps of the checkpoint.
        nbytes: bytes of the new folder.
    """

    folder: Path | None
    delta: Delta | None
    step: int
    nbytes: int = 0


def publish_run(
    source: str | Path,
    out: str | Path,
    options: ExportOptions | None = None,
    data: str | None = None,
    max_ne: float | None = None,
    allow_code: bool = False,
    checkpoint: str = NEWEST,
) -> Published:
    """Adds a version to a folder of exports: what changed since the newest version there, or all of it.

    A checkpoint is published once for each choice of options; tables of any format are as `AUTO` chose them. A full
    export comes first, after a version that cannot be opened, after changes of the whole model, and when the deltas
    since the last one would have half of its bytes, or be more than 100.

    Args:
        source: a run folder, or a checkpoint inside it; or an export, of `rayrec index` as well, to add as it is. Of an
            index, a delta has the new, moved and deleted items together with the changes of the query tower.
        out: folder of exports on this machine; created if missing.
        data: rows to compare scores on; default: the run's `data.eval`.
        max_ne: publish only if the newest normalized entropy that the run has measured is at most this.
        checkpoint: see `choose`; only for a run folder.

    Raises:
        TrainError: the entropy is above the limit, or was not measured.
        ValueError: see `export_run`.
    """
    root, path = Path(out).absolute(), Path(source).absolute()
    if (path / INDEX).exists():
        return _publish(read_index(path), lambda folder: _copy(path, folder), root, _newest(root))
    folder, selected = find_checkpoint(path, checkpoint)
    _check_entropy(folder, selected, max_ne)
    newest = _newest(root)
    run = config_of_run(folder, allow_code=allow_code)["name"]
    before = None if newest is None or newest.export is None else read_index(newest.export.folder)
    if before is not None and _is_of(before, run, selected, options or ExportOptions()):
        return Published(None, None, selected.step)
    trained = trained_of(folder, selected, data, allow_code=allow_code)
    return _publish(None, lambda folder: write_export(trained, folder, options), root, newest)


def _is_of(index: ExportIndex, run: str, checkpoint: Checkpoint, options: ExportOptions) -> bool:
    """Whether an export is the one that these options make of a checkpoint.

    Names of checkpoints, and of runs in other folders, repeat; a rewound run has the same time again.
    """
    origin = index.origin
    if (run, checkpoint.name, checkpoint.manifest.time) != tuple(map(origin.get, ("run", "checkpoint", "time"))):
        return False
    formats = options.tables == AUTO or all(place.format is options.format_of(place.dim) for place in index.places)
    made = (index.targets[-1:], index.dense, index.calibration, index.search)
    return formats and made == ([options.target], options.dense, options.calibrate, None)


class _Newest(NamedTuple):
    """The newest version in a folder of exports.

    Args:
        export: the export that it is; None if it cannot be opened.
    """

    folder: Path
    export: Held | None


def _publish(
    index: ExportIndex | None, make: Callable[[Path], object], root: Path, newest: _Newest | None
) -> Published:
    """Adds an export to a folder.

    Args:
        index: of the export, if it exists.
        make: writes the export to a folder.
    """
    held, delta = None if newest is None else newest.export, None
    root.mkdir(parents=True, exist_ok=True)
    with scratch_folder(root / "publishing") as scratch:
        if held is not None and index is not None and read_index(held.folder).version == index.version:
            return Published(None, None, index.origin.get("step", 0))
        make(made := scratch / "export")
        index = read_index(made)
        if newest is not None and held is not None:
            after = read_delta(newest.folder) if (newest.folder / DELTA).exists() else None
            delta = write_delta(held.folder, made, scratch / "delta", after, index.trained_to)
            if is_small(delta, index):
                made = scratch / "delta"
            else:
                delta = None
        nbytes = sum(path.stat().st_size for path in made.rglob("*") if path.is_file())
        target = root / _name_after(None if newest is None else newest.folder.name)
        made.rename(target)
    return Published(target, delta, index.origin.get("step", 0), nbytes)


def _name_after(newest: str | None) -> str:
    """A folder's name, from the time, that is after the newest one."""
    name = new_version()
    return name if newest is None or natural_order(newest) < natural_order(name) else f"{newest}-1"


def _newest(root: Path) -> _Newest | None:
    """The newest version, whatever `current` says; None without any."""
    store = ExportStore(root)
    name = next(store.names(), None) if root.exists() else None
    if name is None:
        return None
    try:
        return _Newest(root / name, store.open(ExportStore(root / name).newest()))
    except ExportError as error:
        notice(f"{error}; a full export is published after it")
        return _Newest(root / name, None)


def _copy(export: Path, folder: Path) -> None:
    index = read_index(export)
    check_listed(export, index.files)
    folder.mkdir()
    copy_files(export, [*index.files, INDEX], folder)


def _check_entropy(folder: RunFolder, checkpoint: Checkpoint, max_ne: float | None) -> None:
    if max_ne is None:
        return
    measured = [
        line for line in folder.read_metrics() if line.get("ne") is not None and line.get("step", 0) <= checkpoint.step
    ]
    if not measured:
        raise TrainError(
            f"{folder.path} has measured no normalized entropy up to step {checkpoint.step}: nothing published"
        )
    if not measured[-1]["ne"] <= max_ne:
        raise TrainError(
            f"not published: the normalized entropy at step {measured[-1]['step']} of {folder.path} is "
            f"{measured[-1]['ne']:.4f}, above the limit of {max_ne:g}; services keep their version"
        )
