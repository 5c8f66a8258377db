"""What can go wrong with a run, and which of it is worth another attempt."""

from __future__ import annotations

import sys

from rayrec.data.errors import DataUnavailable


class TrainError(ValueError):
    """A run that ended before its end; the message names the cause and what to do."""


class ResourceError(TrainError):
    """Ray has not the CPUs or GPUs that the run needs."""


class StorageError(TrainError):
    """The run folder cannot be made, written or used."""


class Interrupted(TrainError):
    """The run was stopped from outside.

    Args:
        signal: number of the signal that requested it; a command ends with 128 + it.
    """

    def __init__(self, message: str, signal: int = 2) -> None:
        super().__init__(message)
        self.signal = signal


# An error that comes out of here is what a rank sees of the others: torch raises most of them as plain RuntimeErrors.
_EXCHANGES = ("torch.distributed.", "rayrec.distributed.comm.")


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a rank sees of another rank's end, so not a cause of its own.

    Decided by its type and by where it was raised, never by its words.
    """
    if "torch.distributed" in sys.modules and isinstance(error, sys.modules["torch.distributed"].DistError):
        return True
    return type(error) in (RuntimeError, TimeoutError, ConnectionError) and _raised_in(error).startswith(_EXCHANGES)


def _raised_in(error: BaseException) -> str:
    """The module whose line raised the error, with a dot at its end; of foreign code, the one that called it."""
    place, where = error.__traceback__, ""
    while place is not None:
        where, place = str(place.tb_frame.f_globals.get("__name__", "")), place.tb_next
    return f"{where}."


def is_retryable(error: BaseException) -> bool:
    """Whether a new attempt may end otherwise: lost workers and faults of storage or network, never a wrong input."""
    if is_lost_peer(error) or _is_lost_by_ray(error) or isinstance(error, DataUnavailable):
        return True
    if _is_fenced(error):  # this attempt is over; the one that has replaced it goes on
        return True
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)):
        return False
    return isinstance(error, (OSError, EOFError))


def _is_fenced(error: BaseException) -> bool:
    """Without the import of checkpoints, and so of torch, where none were ever used."""
    checkpoints = sys.modules.get("rayrec.checkpoint.errors")
    return checkpoints is not None and isinstance(error, checkpoints.FencedError)


def _is_lost_by_ray(error: BaseException) -> bool:
    """Whether a Ray task, actor or object was lost, be it under an error of our own."""
    if "ray.exceptions" not in sys.modules:
        return False
    from ray import exceptions

    lost = (
        exceptions.RayActorError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
        exceptions.LocalRayletDiedError,
    )
    return isinstance(error, lost) or isinstance(error.__cause__, lost)


def describe(error: BaseException) -> str:
    """The text a user should see: own errors as they are, foreign ones with their type."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
