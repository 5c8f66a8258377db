"""What can go wrong with a run, and which of it is worth another attempt."""

from __future__ import annotations

import re
import sys

from rayrec.storage.errors import DataUnavailable


class TrainError(ValueError):
    """A run that ended before its end; the message names the cause and what to do."""


class ResourceError(TrainError):
    """Ray has not the CPUs or GPUs that the run needs."""


class StorageError(TrainError):
    """The run folder cannot be made, written or used."""


class RunInUseError(StorageError):
    """Another process holds the run folder."""


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
# DistributedDataParallel exchanges in C++, inside of a backward: of a lost peer only gloo's or NCCL's text is left.
_BACKWARD = "torch.autograd."
_CONNECTION = re.compile(
    r"gloo[/\\].*(connection|closed|reset|refused|broken pipe|read error|write error|timed out)"
    r"|connection (closed|reset) by peer|NCCL (error|communicator was aborted)|ncclRemoteError",
    re.IGNORECASE | re.DOTALL,
)
# Of a device or its driver, where it is no torch.AcceleratorError: cuBLAS and other packages raise RuntimeErrors.
_DEVICE = re.compile(
    r"CUDA error: .*(ECC error|unspecified launch failure|launch failed|hardware stack error|illegal instruction"
    r"|CUBLAS_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_INTERNAL_ERROR|device unavailable|system not yet initialized)"
    r"|\bXid\b|fallen off the bus",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a rank sees of another rank's end, so not a cause of its own.

    Decided by its type and by where it was raised; by its words only where it comes out of C++ in a backward.
    """
    if "torch.distributed" in sys.modules and isinstance(error, sys.modules["torch.distributed"].DistError):
        return True
    if type(error) not in (RuntimeError, TimeoutError, ConnectionError):
        return False
    where = _raised_in(error)
    return where.startswith(_EXCHANGES) or (where.startswith(_BACKWARD) and bool(_CONNECTION.search(str(error))))


def is_device_fault(error: BaseException) -> bool:
    """Whether a GPU or its driver failed (ECC, a launch failure, a lost mapping): a new process may find it well.

    A wrong index in a kernel looks the same to CUDA; it comes again, and `trainer.max_failures` ends the run.
    """
    accelerator = getattr(sys.modules.get("torch"), "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return type(error) is RuntimeError and bool(_DEVICE.search(str(error)))


def _raised_in(error: BaseException) -> str:
    """The module whose line raised the error, with a dot at its end; of foreign code, the one that called it."""
    place, where = error.__traceback__, ""
    while place is not None:
        where, place = str(place.tb_frame.f_globals.get("__name__", "")), place.tb_next
    return f"{where}."


def is_retryable(error: BaseException) -> bool:
    """Whether a new attempt may end otherwise: lost workers, faults of a device, of storage or network, never a wrong
    input."""
    if is_lost_peer(error) or is_device_fault(error) or _is_lost_by_ray(error) or isinstance(error, DataUnavailable):
        return True
    if _is_fenced(error):  # this attempt is over; the one of this launch that has replaced it goes on
        return True
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)):
        return False
    return isinstance(error, (OSError, EOFError))


def _is_fenced(error: BaseException) -> bool:
    """Whether another attempt of this launch owns the checkpoints. Without the import of checkpoints, and so of torch,
    where none were ever used."""
    checkpoints = sys.modules.get("rayrec.checkpoint.errors")
    if checkpoints is None or isinstance(error, checkpoints.TakenOverError):
        return False
    return isinstance(error, checkpoints.FencedError)


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
