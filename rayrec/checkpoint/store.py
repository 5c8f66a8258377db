"""Checkpoints in a folder: one folder a step, committed by a manifest that is written last."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from rayrec.checkpoint import contents
from rayrec.checkpoint.rectangles import LoadPlanner, SavePlanner
from rayrec.distributed import DistributedModelParallel, comm
from rayrec.distributed.kernel import updating

MANIFEST = "manifest.json"
VERSION = 1
_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: its folder.
        step: training steps behind it.
        extra: what the caller saved with it (JSON).
        manifest: everything the manifest says.
    """

    path: Path
    step: int
    extra: dict[str, Any]
    manifest: dict[str, Any]


class CheckpointStore:
    """The checkpoints of a run: `root/step_00000100/`, on a file system that every rank sees.

    A checkpoint belongs to no plan and no world size: tables and optimizer state are stored as whole tensors in
    pieces, and each rank reads the rectangles that it needs.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def save(
        self,
        step: int,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        group: comm.Group = None,
    ) -> Checkpoint:
        """Writes and commits a checkpoint; every rank calls it. What was there of the same step is replaced.

        Args:
            step: training steps so far.
            extra: JSON; rank 0's is stored.
            group: a CPU (gloo) group of all ranks; None for one process.

        Raises:
            OSError or dcp.CheckpointException, on every rank: the folder cannot be written. Earlier ones are intact.
        """
        folder = self.root / f"step_{step:08d}"
        first = group is None or group.rank() == 0
        _on_first_rank(lambda: _fresh(folder), first, group)
        state = contents.to_save(model, dense_optimizer)
        alone = group is None or group.size() == 1
        dcp.save(
            state,
            storage_writer=FileSystemWriter(folder, single_file_per_rank=True),
            planner=SavePlanner(),
            process_group=None if alone else group,
            no_dist=alone,
        )
        manifest: dict[str, Any] = {
            "version": VERSION,
            "step": step,
            "time": time.time(),
            "world_size": 1 if group is None else group.size(),
            "iteration": max((kernel.iteration for kernel in updating(model.kernels())), default=0),
            "plan": model.plan.to_dict(),
            "extra": dict(extra or {}),
        }
        manifest["iteration"] = max(comm.all_gather_object(manifest["iteration"], group))
        _on_first_rank(lambda: _write_manifest(folder, manifest), first, group)
        return Checkpoint(folder, step, manifest["extra"], manifest)

    def all(self) -> list[Checkpoint]:
        """Committed checkpoints, the oldest first. Folders without a readable manifest are not checkpoints."""
        found = []
        if not self.root.is_dir():
            return []
        for folder in sorted(self.root.iterdir()):
            match = _FOLDER.fullmatch(folder.name)
            manifest = _read_manifest(folder) if match else None
            if match and manifest:
                found.append(Checkpoint(folder, int(match[1]), manifest["extra"], manifest))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """The committed checkpoint of the highest step."""
        return next(reversed(self.all()), None)

    def load(
        self,
        checkpoint: Checkpoint,
        model: DistributedModelParallel,
        dense_optimizer: torch.optim.Optimizer | None = None,
        group: comm.Group = None,
    ) -> None:
        """Fills model and optimizer, whatever their plan and world size; every rank calls it.

        Raises:
            ValueError: the checkpoint does not fit the model; names the table or parameter.
        """
        reader = FileSystemReader(checkpoint.path)
        loading = contents.Loading(model, dense_optimizer, reader.read_metadata().state_dict_metadata)
        alone = group is None or group.size() == 1
        dcp.load(
            loading.state,
            storage_reader=reader,
            planner=LoadPlanner(),
            process_group=None if alone else group,
            no_dist=alone,
        )
        loading.finish()
        for kernel in updating(model.kernels()):
            kernel.iteration = checkpoint.manifest["iteration"]

    def prune(self, keep: int) -> None:
        """Removes all but the `keep` newest committed checkpoints, and what earlier crashes left behind them.

        Only one process of a run may call this, and not while another saves.
        """
        committed = self.all()
        kept = {checkpoint.path for checkpoint in committed[-max(keep, 1) :]}
        newest = committed[-1].step if committed else -1
        for folder in list(self.root.iterdir()) if self.root.is_dir() else []:
            match = _FOLDER.fullmatch(folder.name)
            if match and folder not in kept and int(match[1]) <= newest:
                (folder / MANIFEST).unlink(missing_ok=True)  # no longer a checkpoint, even if removal is cut short
                shutil.rmtree(folder, ignore_errors=True)


def _on_first_rank(action: Any, first: bool, group: comm.Group) -> None:
    """Runs `action` on rank 0; its OSError is raised on every rank."""
    error: OSError | None = None
    if first:
        try:
            action()
        except OSError as caught:
            error = caught
    error = comm.broadcast_object(error, group)
    if error is not None:
        raise error


def _fresh(folder: Path) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    temporary = folder / f".{MANIFEST}"
    with temporary.open("w") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return manifest if manifest.get("version") == VERSION else None
