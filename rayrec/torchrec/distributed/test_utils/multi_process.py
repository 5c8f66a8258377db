"""Runs a function in several local processes that form a process group."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import unittest
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from rayrec.torchrec.test_utils import get_free_port, init_distributed_single_host


class MultiProcessContext:
    """Context that creates the process group of a rank and destroys it on exit.

    Args:
        rank, world_size, backend: see torch.distributed.init_process_group.
        local_size: LOCAL_WORLD_SIZE; default: the world size.
        use_deterministic_algorithms: use torch's deterministic algorithms where available.
        disable_cuda_tf_32: disable TF32 on GPUs.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        local_size: int | None = None,
        use_deterministic_algorithms: bool = True,
        disable_cuda_tf_32: bool = True,
    ) -> None:
        self.rank, self.world_size, self.backend, self.local_size = rank, world_size, backend, local_size
        self.disable_cuda_tf_32 = disable_cuda_tf_32
        on_gpu = backend == "nccl" and torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        torch.use_deterministic_algorithms(use_deterministic_algorithms, warn_only=True)
        self.pg: dist.ProcessGroup | None = None

    def __enter__(self) -> MultiProcessContext:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if self.disable_cuda_tf_32:
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.pg = init_distributed_single_host(self.rank, self.world_size, self.backend, self.local_size)
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(False)


def _run_rank(address: dict[str, str], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    os.environ.update(address)
    torch.set_num_threads(1)
    try:
        return func(*args, **kwargs)
    except BaseException as error:  # the parent process may not be able to import its class
        raise RuntimeError(f"rank {kwargs.get('rank', args and args[0])}: {traceback.format_exc()}") from error


def _on_ranks(
    method: str, func: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """Returns the result of each call, made in a separate process."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    with ProcessPoolExecutor(len(calls), multiprocessing.get_context(method)) as pool:
        return [future.result() for future in [pool.submit(_run_rank, address, func, *call) for call in calls]]


def run_multi_process_func(
    func: Callable[..., Any],
    multiprocessing_method: str = "spawn",
    use_deterministic_algorithms: bool = True,
    world_size: int = 2,
    **kwargs: Any,
) -> list[Any]:
    """Returns the results of `func(rank, world_size, **kwargs)` in `world_size` processes, in order of rank.

    Args:
        func: importable by name; it creates its process group, for example with `MultiProcessContext`.
        multiprocessing_method: start method of the processes.
        use_deterministic_algorithms: use torch's deterministic algorithms in this process.

    Raises:
        RuntimeError: the error of a rank, with its traceback.
    """
    torch.use_deterministic_algorithms(use_deterministic_algorithms, warn_only=True)
    return _on_ranks(multiprocessing_method, func, [((rank, world_size), kwargs) for rank in range(world_size)])


class MultiProcessTestBase(unittest.TestCase):
    """Base class of tests that run functions in several processes.

    Args:
        methodName: see unittest.TestCase.
        mp_init_mode: start method of the processes.
    """

    def __init__(self, methodName: str = "runTest", mp_init_mode: str = "forkserver") -> None:
        super().__init__(methodName)
        self._mp_init_mode = mp_init_mode

    def _run_multi_process_test(self, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any) -> None:
        """Runs `callable(rank=…, world_size=…, **kwargs)` on every rank; raises RuntimeError if it fails on any."""
        self._run_multi_process_test_per_rank(
            callable=callable, world_size=world_size, kwargs_per_rank=[kwargs] * world_size
        )

    def _run_multi_process_test_per_rank(
        self, *, callable: Callable[..., None], world_size: int, kwargs_per_rank: list[dict[str, Any]]
    ) -> None:
        """Like `_run_multi_process_test`, with separate keyword arguments for each rank."""
        calls = [
            ((), {"rank": rank, "world_size": world_size, **kwargs}) for rank, kwargs in enumerate(kwargs_per_rank)
        ]
        _on_ranks(self._mp_init_mode, callable, calls)
