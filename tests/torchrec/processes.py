"""Gloo ranks without rayrec, so that TorchRec's recordings need it not."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def on_processes(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(*args)` gives on each of `world` forked processes that have joined a group."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, f"file://{folder}/store", pipe, fn, args))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        answers = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
    return answers


def _rank(rank: int, world: int, store: str, pipe: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    pipe.send(fn(*args))
    dist.destroy_process_group()
