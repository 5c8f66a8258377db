"""Runs a function on several processes of this host, which form a process group."""

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
    """A rank's process group: made on entering, destroyed on leaving.

    Args:
        rank, world_size, backend: as of torch.distributed.init_process_group.
        local_size: LOCAL_WORLD_SIZE; the world by default.
        use_deterministic_algorithms: asks torch for them, where they are.
        disable_cuda_tf_32: no TF32 on a GPU.
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


def _answer(address: dict[str, str], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    os.environ.update(address)
    torch.set_num_threads(1)
    try:
        return func(*args, **kwargs)
    except BaseException as error:  # its class may not be importable where it is received
        raise RuntimeError(f"rank {kwargs.get('rank', args and args[0])}: {traceback.format_exc()}") from error


def _on_ranks(
    method: str, func: Callable[..., Any], calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """What each call gives in a process of its own."""
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
    with ProcessPoolExecutor(len(calls), multiprocessing.get_context(method)) as pool:
        return [done.result() for done in [pool.submit(_answer, address, func, *call) for call in calls]]


def run_multi_process_func(
    func: Callable[..., Any],
    multiprocessing_method: str = "spawn",
    use_deterministic_algorithms: bool = True,
    world_size: int = 2,
    **kwargs: Any,
) -> list[Any]:
    """What `func(rank, world_size, **kwargs)` gives on each of `world_size` processes.

    Args:
        func: importable by name; it makes its process group, for example with `MultiProcessContext`.
        multiprocessing_method: how processes start.
        use_deterministic_algorithms: sets torch's switch in this process.

    Raises:
        RuntimeError: a rank's error, with its traceback.
    """
    torch.use_deterministic_algorithms(use_deterministic_algorithms, warn_only=True)
    return _on_ranks(multiprocessing_method, func, [((rank, world_size), kwargs) for rank in range(world_size)])


class MultiProcessTestBase(unittest.TestCase):
    """A base of tests that run functions on several processes.

    Args:
        methodName: as of unittest.TestCase.
        mp_init_mode: how processes start.
    """

    def __init__(self, methodName: str = "runTest", mp_init_mode: str = "forkserver") -> None:
        super().__init__(methodName)
        self._mp_init_mode = mp_init_mode

    def _run_multi_process_test(self, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any) -> None:
        """Runs `callable(rank=…, world_size=…, **kwargs)` on every rank; raises RuntimeError with a rank's error."""
        self._run_multi_process_test_per_rank(
            callable=callable, world_size=world_size, kwargs_per_rank=[kwargs] * world_size
        )

    def _run_multi_process_test_per_rank(
        self, *, callable: Callable[..., None], world_size: int, kwargs_per_rank: list[dict[str, Any]]
    ) -> None:
        """As `_run_multi_process_test`, with keywords of each rank's own."""
        of_ranks = enumerate(kwargs_per_rank)
        calls = [((), {"rank": rank, "world_size": world_size, **of_rank}) for rank, of_rank in of_ranks]
        _on_ranks(self._mp_init_mode, callable, calls)
