"""The manifest of a checkpoint: written last, and what makes a folder a checkpoint. JSON, with its own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rayrec.checkpoint.attempt import order_of
from rayrec.checkpoint.errors import Damage, DamagedCheckpointError
from rayrec.storage.folder import Folder

MANIFEST = "manifest.json"
VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    Args:
        step: training steps behind it; `attempt`: of the run that wrote it, from 1.
        time: when it was begun, seconds since 1970.
        world_size: ranks that wrote it.
        iteration: the largest of `updates`; of every table in a checkpoint that has no `updates`.
        updates: how often each table was updated inside backward, by its name in the model.
        plan: `ShardingPlan.to_dict()` of the writers; a reader needs no such plan.
        mapping: what maps an id to a row, by feature; None where the writer did not say.
        extra: what the caller saved with it.
        index_size, index_sha256: of the index; known when it is written.
    """

    step: int
    attempt: int
    time: float
    world_size: int
    iteration: int
    plan: dict[str, Any]
    mapping: dict[str, Any] | None
    extra: dict[str, Any]
    updates: dict[str, int] = field(default_factory=dict)
    index_size: int = 0
    index_sha256: str = ""

    def to_json(self) -> bytes:
        raw = {"version": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        return json.dumps({**raw, "checksum": _checksum(raw)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            ValueError: it is none, of another version, or changed since.
        """
        try:
            raw = json.loads(data)
        except ValueError as error:  # also bytes that are no text
            raise ValueError(f"it cannot be read as JSON ({error})") from error
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            version = raw.get("version") if isinstance(raw, dict) else None
            raise ValueError(f"its version is {version!r}; this rayrec reads {VERSION}")
        checksum = raw.pop("checksum", None)
        if checksum != _checksum(raw):
            raise ValueError("its text does not match its checksum")
        del raw["version"]
        try:
            return cls(**raw)
        except TypeError as error:
            raise ValueError(f"its fields are others ({error})") from error


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(raw: Mapping[str, Any]) -> str:
    return sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: its folder, a path or URI; `name`: the folder's.
        step: training steps behind it.
        extra: what the caller saved with it (JSON).
        manifest: all that is known of it without reading tensors.
    """

    path: str
    name: str
    step: int
    extra: dict[str, Any]
    manifest: Manifest


def read_checkpoint(folder: Folder) -> Checkpoint | None:
    """The checkpoint in a folder of its own; None where there is no manifest.

    Raises:
        DamagedCheckpointError: its manifest is not what was written.
        OSError: it cannot be read.
    """
    try:
        manifest = Manifest.from_json(folder.read(MANIFEST))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedCheckpointError(folder.path, [Damage(MANIFEST, str(error))]) from error
    return Checkpoint(folder.path, folder.name, manifest.step, manifest.extra, manifest)


def newer_damaged(checkpoint: Checkpoint, damaged: Iterable[DamagedCheckpointError]) -> list[DamagedCheckpointError]:
    """Those of the damaged ones that are newer than a checkpoint, the oldest first."""
    at = order_of(checkpoint.name) or (0, 0)
    found = [(order, error) for error in damaged if (order := order_of(error.name) or (0, 0)) > at]
    return [error for _, error in sorted(found, key=lambda one: one[0])]
