"""Helpers of tests that programs import."""

from __future__ import annotations

import functools
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


def get_free_port() -> int:
    """A TCP port of this host that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def seed_and_log(wrapped_func: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function: each call seeds random, numpy and torch from the clock, and prints the seed."""

    @functools.wraps(wrapped_func)
    def seeded(*args: Any, **kwargs: Any) -> T:
        seed = int(time.time() * 1000) % (1 << 31)
        print(f"Using random seed: {seed}")
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return wrapped_func(*args, **kwargs)

    return seeded


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """The default process group of `world_size` processes of this host, which MASTER_ADDR and MASTER_PORT name.

    Args:
        rank, world_size, backend: as of torch.distributed.init_process_group.
        local_size: LOCAL_WORLD_SIZE; the world by default.
    """
    size = world_size if local_size is None else local_size
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(size), str(rank % size)
    if not dist.is_initialized():
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


def cuda_device_count() -> int:
    """GPUs of this host."""
    return torch.cuda.device_count()


def is_asan() -> bool:
    """Whether the program runs under an address sanitizer; never, for Python as it is installed."""
    return False


is_tsan = is_asan_or_tsan = is_asan


def skip_if_asan(func: T) -> T:
    """The function or class itself: there is no sanitizer."""
    return func


skip_if_asan_class = skip_if_asan


def get_state_buffers_parameters(model: nn.Module) -> dict[str, Any]:
    """A model's state_dict, buffers and parameters, each by name."""
    return {
        "named_buffers": dict(model.named_buffers()),
        "named_parameters": dict(model.named_parameters()),
        "state_dict": model.state_dict(),
    }


def assert_state_buffers_parameters_equal(
    model_1: nn.Module,
    model_2: nn.Module,
    check_named_buffers: bool = True,
    check_named_parameters: bool = True,
    check_state_dict: bool = True,
) -> None:
    """Raises AssertionError where names or values of two models differ, in the kinds that are checked."""
    one, other = get_state_buffers_parameters(model_1), get_state_buffers_parameters(model_2)
    checked = {
        "named_buffers": check_named_buffers,
        "named_parameters": check_named_parameters,
        "state_dict": check_state_dict,
    }
    for kind in (kind for kind, wanted in checked.items() if wanted):
        assert one[kind].keys() == other[kind].keys(), f"{kind}: {sorted(one[kind])} and {sorted(other[kind])}"
        for name, value in one[kind].items():
            torch.testing.assert_close(value, other[kind][name], msg=f"{kind}: {name!r} differs")
