"""The work of `rayrec checkpoint`: verify, describe, convert, copy and prune checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from rayrec.checkpoint.contents import DENSE, DENSE_STATE, MAP, TABLE, TABLE_STATE
from rayrec.checkpoint.errors import (
    CheckpointError,
    Damage,
    DamagedCheckpointError,
    InUseError,
    RemovedCheckpointError,
)
from rayrec.checkpoint.format import SavedTensor, header, host_bytes
from rayrec.checkpoint.increments import AnyReader, Chain
from rayrec.checkpoint.manifest import MANIFEST, Checkpoint, newer_damaged, read_checkpoint
from rayrec.checkpoint.ownership import Lease, order_of
from rayrec.checkpoint.rectangles import PIECE_BYTES
from rayrec.checkpoint.retention import Best, checkpoint_names, remove_old
from rayrec.checkpoint.store import CheckpointStore
from rayrec.storage.copying import copy_folder
from rayrec.storage.folder import open_folder


def store_of(path: str) -> tuple[CheckpointStore, str | None]:
    """(store, name of the checkpoint or None) for the path or URI of a run folder, its folder of checkpoints, or a
    checkpoint.

    Raises:
        CheckpointError: `path` is something else.
        OSError: `path` cannot be read.
    """
    folder = open_folder(path.rstrip("/"))
    names = folder.names()
    if MANIFEST in names:
        return CheckpointStore(folder.parent()), folder.name
    if any(order_of(name) for name in names):
        return CheckpointStore(folder), None
    if "checkpoints" in names:
        return CheckpointStore(folder.sub("checkpoints")), None
    raise CheckpointError(f"{path} is neither a checkpoint (it has no {MANIFEST}) nor a run with checkpoints")


def find(path: str) -> tuple[CheckpointStore, Checkpoint]:
    """The checkpoint at a path or URI; for a run, its newest one.

    Raises:
        CheckpointError: `path` has no checkpoint, or the manifest of the newest one is damaged.
        OSError: `path` cannot be read.
    """
    store, name = store_of(path)
    damaged: list[DamagedCheckpointError] = []
    if name is not None:
        checkpoint = read_checkpoint(store.root.sub(name))
    else:
        checkpoints, damaged = store.candidates()
        checkpoint = next(iter(checkpoints), None)
    if checkpoint is None:
        raise CheckpointError(f"{path} has no complete checkpoint")
    if newer := newer_damaged(checkpoint, damaged):
        raise CheckpointError(f"{newer[-1]}; the newest with a whole manifest is {checkpoint.path}") from newer[-1]
    return store, checkpoint


def verify(path: str) -> Iterator[tuple[str, list[Damage]]]:
    """(path, damage) of each checkpoint at a path or URI, newest first."""
    store, name = store_of(path)
    checkpoints, damaged = store.listing() if name is None else ([find(path)[1]], [])
    for error in damaged:
        yield error.path, list(error.damages)
    for checkpoint in reversed(checkpoints):
        try:
            damages = store.damages(checkpoint)
        except RemovedCheckpointError:  # by its run, which continues
            continue
        yield checkpoint.path, damages
    if not checkpoints and not damaged:
        raise CheckpointError(f"{path} has no complete checkpoint")


def describe(path: str) -> list[str]:
    """Lines that describe a checkpoint."""
    store, checkpoint = find(path)
    manifest = checkpoint.manifest
    with store.reader(checkpoint) as reader:
        tensors = reader.index.tensors
        total = sum(file.size for file in reader.index.files.values())
        files = len(reader.index.files)
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.time))
    lines = [
        f"{checkpoint.path}: step {manifest.step}, attempt {manifest.attempt}, {saved_at}",
        f"written by {manifest.world_size} ranks; {total / 1e6:,.1f} MB in {files} data files",
    ]
    for title, kind in (("tables", TABLE), ("layers", DENSE)):
        by_name = {key.partition("/")[2]: saved for key, saved in tensors.items() if key.startswith(f"{kind}/")}
        lines.append(f"{len(by_name)} {title}, {sum(math.prod(saved.size) for saved in by_name.values()):,} numbers")
        for name, saved in by_name.items():
            size, dtype = " x ".join(map(str, saved.size)) or "number", str(saved.dtype).removeprefix("torch.")
            lines.append(f"  {name}: {size} {dtype}")
    other_keys = [key for key in tensors if not key.startswith((f"{TABLE}/", f"{DENSE}/"))]
    lines.append(f"{len(other_keys)} other tensors: optimizer states, random states, metrics")
    for feature, mapping in sorted((manifest.mapping or {}).items()):
        lines.append(f"ids of {feature}: " + ", ".join(f"{name} {value}" for name, value in mapping.items()))
    return lines


def convert(path: str, out: Path, optimizer: bool) -> tuple[Checkpoint, int, int]:
    """Write a checkpoint to one file; returns (checkpoint, number of tensors, bytes of the file).

    Raises:
        CheckpointError: `path` has no checkpoint, or it is damaged.
        OSError: the file cannot be written.
    """
    store, checkpoint = find(path)
    with store.reader(checkpoint) as reader:
        count = to_safetensors(reader, out, optimizer)
    return checkpoint, count, out.stat().st_size


def copy(path: str, out: str) -> Checkpoint:
    """Copy a checkpoint, or the newest one of a run, into a folder under its own name; returns the copy.

    With an increment, all checkpoints of its chain that it needs are copied.

    Args:
        path, out: paths or URIs, also of different storage.

    Raises:
        CheckpointError: `path` has no checkpoint, or `out` has one of this name.
        RemovedCheckpointError: the run removed the checkpoint meanwhile.
        OSError: a file cannot be read or written.
    """
    store, checkpoint = find(path)
    with store.reader(checkpoint) as reader:
        needed = [one.folder.name for one in reader.readers[:-1]] if isinstance(reader, Chain) else []
    for name in needed:
        target = open_folder(out.rstrip("/")).sub(name)
        if MANIFEST not in target.names():
            copy_folder(store.root.sub(name), target, last=[MANIFEST])
    source, target = store.root.sub(checkpoint.name), open_folder(out.rstrip("/")).sub(checkpoint.name)
    if MANIFEST in target.names():
        raise CheckpointError(f"{target.path} exists; remove it, or copy into another folder")
    try:
        copy_folder(source, target, last=[MANIFEST])
    except BaseException:
        with suppress(OSError):
            target.remove_all()
        if MANIFEST not in source.names():
            raise RemovedCheckpointError(checkpoint.path) from None
        raise
    copied = read_checkpoint(target)
    if copied is None:
        raise RemovedCheckpointError(checkpoint.path)
    return copied


def prune(path: str, keep: int, best: Best | None, notify: Callable[[str], object]) -> list[str]:
    """Remove all but the newest checkpoints and the best one; returns the names of those that were removed.

    Args:
        path: path or URI of a run that is not training, or of a folder of checkpoints.
        keep: number of newest checkpoints to keep.
        notify: called with a line when another process may hold the checkpoints.

    Raises:
        CheckpointError: `path` is a single checkpoint, a run is training, or a manifest is damaged. Nothing is removed.
        OSError: the folder cannot be read or written.
    """
    store, name = store_of(path)
    if name is not None:
        raise CheckpointError(f"{path} is a single checkpoint; give its run")
    try:
        lease = Lease(store.root, notify).take()
    except InUseError as error:
        raise CheckpointError(f"{error}. A run that trains keeps the newest storage.keep checkpoints itself") from None
    with lease:
        if damaged := store.listing()[1]:
            text = f"{damaged[0]}; nothing was removed, as older checkpoints may be needed instead of it"
            raise CheckpointError(f"{text}. Remove {damaged[0].path} first")
        before = checkpoint_names(store.root)
        remove_old(store.root, keep, best)
        remaining = set(store.root.names())
    return [name for name in before if name not in remaining]


def unsharded_names(reader: AnyReader, optimizer: bool = False) -> dict[str, str]:
    """Keys in the checkpoint, by the name in the `state_dict` of the unsharded model.

    For tables with dynamic ids there is also `dynamic_ids.TABLE`, the id in each row. An empty row has an id of another
    bucket.

    Args:
        optimizer: include optimizer states, as `optimizer.NAME.STATE`.
    """
    names = {}
    for key in reader.index.tensors:
        kind, _, name = key.partition("/")
        if kind == TABLE:
            names[f"{name}.weight"] = key
        elif kind == DENSE:
            names[name] = key
        elif kind == MAP and name.endswith("/identity"):
            names[f"dynamic_ids.{name.removesuffix('/identity')}"] = key
        elif kind in (TABLE_STATE, DENSE_STATE) and optimizer:
            names[f"optimizer.{name.replace('/', '.')}"] = key
    return names


def to_safetensors(reader: AnyReader, path: Path, optimizer: bool = False) -> int:
    """Write one safetensors file; returns its number of tensors. Needs memory for 64 MiB of a tensor.

    Raises:
        DamagedCheckpointError: the checkpoint was changed; no file is written.
        OSError: the file cannot be written.
    """
    names = unsharded_names(reader, optimizer)
    order = sorted(names, key=lambda name: -reader.index.tensors[names[name]].dtype.itemsize)
    saved = {name: reader.index.tensors[names[name]] for name in order}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(header((name, tensor.dtype, tensor.size) for name, tensor in saved.items()))
            for name, tensor in saved.items():
                for rows in _runs(tensor):
                    file.write(host_bytes(reader.tensor(names[name], rows)))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(saved)


def _runs(tensor: SavedTensor) -> list[slice]:
    """Ranges of rows of at most 64 MiB."""
    if not tensor.size or not tensor.size[0]:
        return [slice(None)]
    count = tensor.size[0]
    nbytes = tensor.dtype.itemsize * max(1, torch.Size(tensor.size).numel())
    length = max(1, PIECE_BYTES * count // nbytes)
    return [slice(start, min(count, start + length)) for start in range(0, count, length)]
