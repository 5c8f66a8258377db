"""Errors of a run, and the rule that decides which ones restart the workers."""

from __future__ import annotations

import re
import sys

from rayrec.storage.errors import DataUnavailable


class TrainError(ValueError):
    """A run failed; the message names the cause and the fix."""


class ResourceError(TrainError):
    """Ray has too few CPUs or GPUs for the run."""


class StorageError(TrainError):
    """The run folder cannot be created, read or written."""


class RunInUseError(StorageError):
    """Another process has locked the run folder."""


class Interrupted(TrainError):
    """The run was stopped from outside.

    Args:
        signal: number of the signal that requested it; a command ends with 128 + it.
    """

    def __init__(self, message: str, signal: int = 2) -> None:
        super().__init__(message)
        self.signal = signal


# Modules whose errors mean that another rank failed: torch raises most of these as plain RuntimeErrors.
_EXCHANGES = ("torch.distributed.", "rayrec.distributed.comm.")
# DistributedDataParallel communicates from C++ during the backward pass, so only the text of gloo or NCCL identifies
# a lost peer.
_BACKWARD = "torch.autograd."
_CONNECTION = re.compile(
    r"gloo[/\\].*(connection|closed|reset|refused|broken pipe|read error|write error|timed out)"
    r"|connection (closed|reset) by peer|NCCL (error|communicator was aborted)|ncclRemoteError",
    re.IGNORECASE | re.DOTALL,
)
# Device faults that a new process on the same node meets again: in errors of CUDA, and in those of any package.
_LASTING_IN_CUDA = "ECC error|hardware stack error|device unavailable|system not yet initialized"
_LASTING = r"\bXid\b|fallen off the bus|No CUDA GPUs are available|CUDA driver initialization failed"
# Device faults that are not a torch.AcceleratorError: cuBLAS and other packages raise RuntimeErrors.
_DEVICE = re.compile(
    f"CUDA error: .*({_LASTING_IN_CUDA}|unspecified launch failure|launch failed|illegal instruction"
    f"|CUBLAS_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_INTERNAL_ERROR)|{_LASTING}",
    re.IGNORECASE,
)
_BROKEN = re.compile(
    f"{_LASTING_IN_CUDA}|NVLink error|busy or unavailable|no CUDA-capable device|{_LASTING}", re.IGNORECASE
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is the effect of another rank's exit rather than a cause.

    Decided by the type and the module that raised it; by the text only for errors from C++ in a backward pass.
    """
    if "torch.distributed" in sys.modules and isinstance(error, sys.modules["torch.distributed"].DistError):
        return True
    if type(error) not in (RuntimeError, TimeoutError, ConnectionError):
        return False
    module = _raised_in(error)
    return module.startswith(_EXCHANGES) or (module.startswith(_BACKWARD) and bool(_CONNECTION.search(str(error))))


def is_device_fault(error: BaseException) -> bool:
    """Whether a GPU or its driver failed (ECC, a launch failure, a lost mapping). A new process may succeed.

    CUDA reports an index error in a kernel the same way. That error recurs until `trainer.max_failures` ends the run.
    """
    accelerator = getattr(sys.modules.get("torch"), "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return type(error) is RuntimeError and bool(_DEVICE.search(str(error)))


def is_broken_device(error: BaseException) -> bool:
    """Whether a GPU failed so that its node should be left out (ECC, Xid, no device). Not errors that a kernel may have
    caused, such as an illegal memory access."""
    return is_device_fault(error) and bool(_BROKEN.search(str(error)))


def _raised_in(error: BaseException) -> str:
    """The module of the innermost Python frame, with a dot appended; for C++ errors, that is the calling module."""
    traceback, module = error.__traceback__, ""
    while traceback is not None:
        module, traceback = str(traceback.tb_frame.f_globals.get("__name__", "")), traceback.tb_next
    return f"{module}."


def is_retryable(error: BaseException) -> bool:
    """Whether a new attempt may succeed: lost workers and device, storage or network faults, never invalid input."""
    if is_lost_peer(error) or is_device_fault(error) or _is_lost_by_ray(error) or isinstance(error, DataUnavailable):
        return True
    if _is_fenced(error):  # a newer attempt of this launch has replaced this one and continues
        return True
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)):
        return False
    return isinstance(error, (OSError, EOFError))


def _is_fenced(error: BaseException) -> bool:
    """Whether another attempt of this launch owns the checkpoints.

    Does not import the checkpoint modules, and thus torch, in a process that never used them.
    """
    checkpoints = sys.modules.get("rayrec.checkpoint.errors")
    if checkpoints is None or isinstance(error, checkpoints.TakenOverError):
        return False
    return isinstance(error, checkpoints.FencedError)


def _is_lost_by_ray(error: BaseException) -> bool:
    """Whether Ray lost a task, actor or object; also if that is the `__cause__` of the error."""
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
    """The text for users: a ValueError's message as is, other errors prefixed with their type."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
