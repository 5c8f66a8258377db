"""Pools of real gloo processes for tests: `Ranks(4).run(fn, *args)` calls `fn(group, *args)` on four ranks.

Processes are forked from a server that has imported torch and fbgemm once, and are kept for the next test. A test that
fails on some rank, or hangs, ends its pool; the next one gets a fresh pool.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

SERVER = multiprocessing.get_context("forkserver")
GROUP_TIMEOUT_S = 150.0
SERVER.set_forkserver_preload(["tests.preload"])


class RankError(AssertionError):
    """What went wrong on which rank."""


class Ranks:
    """`size` processes in one gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="rayrec-ranks-")
        store = os.path.join(self._folder.name, "store")
        self._members: list[tuple[Any, Connection]] = []
        for rank in range(size):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
        """Every rank's return value. `fn` gets the process group and `args`; a list `PerRank` is dealt out.

        Raises:
            RankError: with the traceback of the first rank that failed, or the ranks that gave no answer in time.
        """
        for rank, (_, pipe) in enumerate(self._members):
            dealt = [arg.items[rank] if isinstance(arg, PerRank) else arg for arg in args]
            pipe.send_bytes(cloudpickle.dumps((fn, dealt)))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self._members):
            if not pipe.poll(timeout_s if not errors else 5):
                errors.append(f"rank {rank}: no answer in {timeout_s} s")
                continue
            try:
                good, value = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                good, value = False, "the process died"
            if good:
                results.append(value)
            else:
                errors.append(f"rank {rank}: {value}")
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return results

    @property
    def alive(self) -> bool:
        return bool(self._members) and all(process.is_alive() for process, _ in self._members)

    def close(self) -> None:
        for _, pipe in self._members:
            pipe.close()  # a rank that waits for work ends by itself
        for process, _ in self._members:
            process.join(1)
            process.terminate()
        for process, _ in self._members:
            process.join(10)
        self._members = []
        self._folder.cleanup()


class PerRank:
    """An argument of which each rank gets its own item."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


_pools: dict[int, Ranks] = {}


def on_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
    """Every rank's return value of `fn(group, *args)` on a kept pool of `size` ranks."""
    pool = _pools.get(size)
    if pool is None or not pool.alive:
        pool = _pools[size] = Ranks(size)
    return pool.run(fn, *args, timeout_s=timeout_s)


def close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    on_gpu = bool(os.environ.get("RAYREC_TEST_GPU"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu and size == 1 else "gloo",  # NCCL has no two ranks on a GPU
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    if os.environ.get("RAYREC_PRETEND_GPUS"):
        from tests.dryrun.ranks import pretend

        pretend()
    if on_gpu:
        from tests.device import use_gpu

        use_gpu()
    while True:
        try:
            fn, args = cloudpickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = (True, fn(dist.group.WORLD, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(cloudpickle.dumps(answer))
