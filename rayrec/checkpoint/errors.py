"""What can be wrong with a checkpoint, as types: damage, another owner of the folder, none that is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WHAT = {
    "table": "table {name!r}",
    "table_state": "optimizer state of table {name!r}",
    "dense": "parameter {name!r}",
    "dense_state": "optimizer state of {name!r}",
    "rng": "random state of rank {name}",
    "tensor": "{name!r}",
}


def named(key: str) -> str:
    """What a key of the checkpoint stands for, as a user would say it."""
    kind, _, name = key.partition("/")
    return WHAT.get(kind, "{name!r}").format(name=name or key)


@dataclass(frozen=True, slots=True)
class Damage:
    """A place where a checkpoint's bytes are not what was written.

    Args:
        file: inside the checkpoint's folder.
        what: is wrong there.
        key: of the tensor that it hits, if a tensor is hit.
        rows: of the tensor, [first, last + 1).
    """

    file: str
    what: str
    key: str | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", rows [{self.rows[0]}, {self.rows[1]})"
        hit = "" if self.key is None else f" ({named(self.key)}{rows})"
        return f"{self.file}{hit}: {self.what}"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, or not by this run."""


class DamagedCheckpointError(CheckpointError):
    """Bytes of a checkpoint are missing, or others than were written."""

    def __init__(self, path: str, damages: Sequence[Damage]) -> None:
        super().__init__(path, tuple(damages))
        self.path, self.damages = path, tuple(damages)

    def __str__(self) -> str:
        first = "; ".join(map(str, self.damages[:3]))
        more = f"; and {len(self.damages) - 3} more places" if len(self.damages) > 3 else ""
        return f"the checkpoint {self.path} is damaged: {first}{more}"

    @property
    def name(self) -> str:
        """Of the checkpoint's folder."""
        return self.path.partition("?")[0].rpartition("/")[2]


class NoWholeCheckpointError(CheckpointError):
    """There are checkpoints, but none of them is whole."""


class RemovedCheckpointError(CheckpointError):
    """A checkpoint was removed while it was read: the run that goes on has newer ones."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.path} was removed while it was read, as its run goes on; run the command again, "
            f"which reads a newer one, or raise storage.keep of the run"
        )


class DamagedScoresError(CheckpointError):
    """It is not known which checkpoint is the best."""


class FencedError(CheckpointError):
    """A later attempt of the run has taken over the folder: this one may not commit or remove anything."""


class TakenOverError(FencedError):
    """That attempt is of another launch, so this launch is over.

    Args:
        path: of the folder.
        launch: the other one.
    """

    def __init__(self, path: str, launch: str) -> None:
        super().__init__(path, launch)
        self.path, self.launch = path, launch

    def __str__(self) -> str:
        return f"{self.path} was taken over by another launch of the run ({self.launch}); this one ends"


class InUseError(CheckpointError):
    """Another launch of the run is still going."""


def no_whole(path: str, damaged: Sequence[object]) -> NoWholeCheckpointError:
    """The error of a folder in which every checkpoint is damaged."""
    reasons = "; ".join(map(str, damaged))
    return NoWholeCheckpointError(
        f"{path} has no whole checkpoint: {reasons}; restore one from a copy, or start over with --fresh"
    )
