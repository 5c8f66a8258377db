"""Errors of checkpoints: damage, another owner of the folder, no whole checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_DESCRIPTIONS = {
    "table": "table {name!r}",
    "table_state": "optimizer state of table {name!r}",
    "dense": "parameter {name!r}",
    "dense_state": "optimizer state of {name!r}",
    "rng": "random state of rank {name}",
    "tensor": "{name!r}",
}


def named(key: str) -> str:
    """Description of a tensor of the checkpoint, by its key."""
    kind, _, name = key.partition("/")
    return _DESCRIPTIONS.get(kind, "{name!r}").format(name=name or key)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a checkpoint that were changed.

    Args:
        file: name in the checkpoint's folder.
        what: description of the problem.
        key: key of the affected tensor, if any.
        rows: affected rows of the tensor, [start, stop).
    """

    file: str
    what: str
    key: str | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", rows [{self.rows[0]}, {self.rows[1]})"
        tensor = "" if self.key is None else f" ({named(self.key)}{rows})"
        return f"{self.file}{tensor}: {self.what}"


class CheckpointError(ValueError):
    """A checkpoint cannot be used, in general or by this run."""


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing or were changed."""

    def __init__(self, path: str, damages: Sequence[Damage]) -> None:
        super().__init__(path, tuple(damages))
        self.path, self.damages = path, tuple(damages)

    def __str__(self) -> str:
        text = "; ".join(map(str, self.damages[:3]))
        if len(self.damages) > 3:
            text += f"; and {len(self.damages) - 3} more"
        return f"the checkpoint {self.path} is damaged: {text}"

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return self.path.partition("?")[0].rpartition("/")[2]


class NoWholeCheckpointError(CheckpointError):
    """All checkpoints are damaged."""


class RemovedCheckpointError(CheckpointError):
    """A checkpoint was removed while it was read, because its run has newer ones."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.path} was removed while it was read, because its run continues; run the command "
            f"again to read a newer one, or raise storage.keep of the run"
        )


class DamagedScoresError(CheckpointError):
    """The file with the metrics of checkpoints is damaged, so the best one is unknown."""


class FencedError(CheckpointError):
    """A later attempt of the run owns the folder, so this attempt may not commit or remove checkpoints."""


class TakenOverError(FencedError):
    """Another launch of the run has taken over the folder, so this launch ends.

    Args:
        path: path of the folder.
        launch: description of the other launch.
    """

    def __init__(self, path: str, launch: str) -> None:
        super().__init__(path, launch)
        self.path, self.launch = path, launch

    def __str__(self) -> str:
        return f"another driver ({self.launch}) took over {self.path}; this one exits"


class NotSharedError(CheckpointError):
    """Processes of the run see different folders at the same path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.problem}. All nodes must see the same folder: set storage.path to a file system (NFS, "
            f"Lustre) that is mounted on every node, or to a URI such as s3://bucket/runs"
        )


class InUseError(CheckpointError):
    """Another launch of the run is alive."""


def no_whole(path: str, damaged: Sequence[object]) -> NoWholeCheckpointError:
    """The error for a folder in which every checkpoint is damaged."""
    reasons = "; ".join(map(str, damaged))
    return NoWholeCheckpointError(
        f"all checkpoints in {path} are damaged: {reasons}; restore one from a copy, or start over with --fresh"
    )
