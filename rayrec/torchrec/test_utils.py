"""`torchrec.test_utils`: helpers for tests."""

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
    """Returns a free TCP port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def seed_and_log(wrapped_func: Callable[..., T]) -> Callable[..., T]:
    """Decorator: each call seeds random, numpy and torch from the clock, and prints the seed."""

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
    """Initializes the default process group of processes on this host, at MASTER_ADDR and MASTER_PORT.

    Args:
        rank, world_size, backend: see torch.distributed.init_process_group.
        local_size: LOCAL_WORLD_SIZE; default: the world size.
    """
    size = world_size if local_size is None else local_size
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(size), str(rank % size)
    if not dist.is_initialized():
        dist.init_process_group(backend, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


def cuda_device_count() -> int:
    """Returns the number of GPUs of this host."""
    return torch.cuda.device_count()


def is_asan() -> bool:
    """Returns False; sanitizer builds are not supported."""
    return False


is_tsan = is_asan_or_tsan = is_asan


def skip_if_asan(func: T) -> T:
    """Returns the function or class unchanged."""
    return func


skip_if_asan_class = skip_if_asan


def get_state_buffers_parameters(model: nn.Module) -> dict[str, Any]:
    """Returns the state_dict, buffers and parameters of a model, each by name."""
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
    """Raises AssertionError if names or values of two models differ."""
    state_1, state_2 = get_state_buffers_parameters(model_1), get_state_buffers_parameters(model_2)
    checks = {
        "named_buffers": check_named_buffers,
        "named_parameters": check_named_parameters,
        "state_dict": check_state_dict,
    }
    for kind in (kind for kind, enabled in checks.items() if enabled):
        names_1, names_2 = sorted(state_1[kind]), sorted(state_2[kind])
        assert names_1 == names_2, f"{kind}: {names_1} and {names_2}"
        for name, value in state_1[kind].items():
            torch.testing.assert_close(value, state_2[kind][name], msg=f"{kind}: {name!r} differs")
