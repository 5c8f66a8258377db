"""The manifest of a checkpoint: a JSON file with a checksum, written last. A folder without it is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rayrec.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError
from rayrec.checkpoint.ownership import order_of
from rayrec.storage.folder import Folder

MANIFEST = "manifest.json"
VERSION = 2

IdMapping = Mapping[str, Mapping[str, Any]]
"""The rule that maps ids to rows, by feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The place of an increment in its chain.

    Args:
        parent: folder of the checkpoint, full or an increment, whose changes this one has.
        parent_sha256: `index_sha256` of the parent.
        sequence: number of increments since the full checkpoint, this one included.
    """

    parent: str
    parent_sha256: str
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Metadata of a checkpoint.

    Args:
        step: number of training steps.
        attempt: number of the run's attempt that wrote it, from 1.
        time: start of the save, in seconds since 1970.
        world_size: number of ranks that wrote it.
        iteration: the maximum of `updates`; applies to all tables if a checkpoint has no `updates`.
        updates: number of updates of each table inside backward, by its name in the model.
        plan: `ShardingPlan.to_dict()` of the writers; readers may have another plan.
        mapping: rule that maps ids to rows, by feature; None: unknown.
        extra: JSON of the caller.
        index_size, index_sha256: size and checksum of the index, set when the index is written.
        link: of an increment, which has only what changed since its parent; None for a full checkpoint.
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
    link: Link | None = None

    def to_json(self) -> bytes:
        raw = {"version": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        del raw["link"]  # earlier versions of rayrec read full checkpoints, which do not have it
        if self.link is not None:
            raw["link"] = asdict(self.link)
        return json.dumps({**raw, "checksum": _checksum(raw)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            ValueError: the data is not JSON, has another version, or was changed.
        """
        try:
            raw = json.loads(data)
        except ValueError as error:  # includes bytes that are not UTF-8
            raise ValueError(f"it cannot be read as JSON ({error})") from error
        if not isinstance(raw, dict) or raw.get("version") != VERSION:
            version = raw.get("version") if isinstance(raw, dict) else None
            raise ValueError(f"its version is {version!r}; this rayrec reads {VERSION}")
        checksum = raw.pop("checksum", None)
        if checksum != _checksum(raw):
            raise ValueError("its text does not match its checksum")
        del raw["version"]
        try:
            link = raw.pop("link", None)
            return cls(**raw, link=None if link is None else Link(**link))
        except TypeError as error:
            raise ValueError(f"its fields are wrong ({error})") from error


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(raw: Mapping[str, Any]) -> str:
    return sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: path or URI of its folder.
        name: name of the folder.
        step: number of training steps.
        extra: JSON of the caller.
        manifest: all metadata.
    """

    path: str
    name: str
    step: int
    extra: dict[str, Any]
    manifest: Manifest


def read_checkpoint(folder: Folder) -> Checkpoint | None:
    """The checkpoint in a folder; None without a manifest.

    Raises:
        DamagedCheckpointError: the manifest was changed.
        OSError: the manifest cannot be read.
    """
    try:
        manifest = Manifest.from_json(folder.read(MANIFEST))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedCheckpointError(folder.path, [Damage(MANIFEST, str(error))]) from error
    return Checkpoint(folder.path, folder.name, manifest.step, manifest.extra, manifest)


def newer_damaged(checkpoint: Checkpoint, damaged: Iterable[DamagedCheckpointError]) -> list[DamagedCheckpointError]:
    """The damaged checkpoints that are newer than `checkpoint`, oldest first."""
    order = order_of(checkpoint.name) or (0, 0)
    newer = [(error_order, error) for error in damaged if (error_order := order_of(error.name) or (0, 0)) > order]
    return [error for _, error in sorted(newer, key=lambda pair: pair[0])]


def check_mapping(path: str, saved: IdMapping | None, current: IdMapping | None) -> None:
    """Check that ids map to the same rows as when a checkpoint was written. Does nothing if either mapping is unknown.

    Raises:
        CheckpointError: names the first feature that differs, and the difference.
    """
    if saved is None or current is None:
        return
    for feature in sorted({*saved, *current}):
        saved_rule, current_rule = saved.get(feature), current.get(feature)
        if saved_rule is None or current_rule is None:
            owner = "the checkpoint" if saved_rule is None else "the config"
            raise CheckpointError(f"{path}: {owner} has no feature {feature!r}; {_FIX}")
        for name in differing(saved_rule, current_rule):
            raise CheckpointError(
                f"{path}: feature {feature!r}: its ids would mean other rows: {name.replace('_', ' ')} is "
                f"{_short(saved_rule.get(name))} in the checkpoint and {_short(current_rule.get(name))} here; {_FIX}"
            )


def differing(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields in which two mappings of a feature differ.

    Ignores `id_type` if either lacks it (old checkpoints), and the hash of strings if the ids are integers.
    """
    id_types = (saved.get("id_type"), current.get("id_type"))
    names = {*saved, *current} - ({"id_type"} if None in id_types else set())
    names -= {"text_law"} if "integer" in id_types else set()
    return sorted(name for name in names if saved.get(name) != current.get(name))


_FIX = "restore the schema and vocabulary files that it was trained with, or start a new run under another name"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
