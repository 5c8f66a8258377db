"""Pretended GPUs for the package's own tests: real gloo ranks, numbers exact, what CUDA refuses is an error.

`RAYREC_PRETEND_GPUS=1 python -m pytest tests/distributed/test_equality.py`
"""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import Any

import torch
import torch._dynamo
import torch.testing
from torch.utils import _pytree as pytree

from tests.device import move_inputs
from tests.dryrun.book import BOOK
from tests.dryrun.cuda import pretend_gpu
from tests.dryrun.lookups import stub_ddp_collective, stub_tbe
from tests.dryrun.tensors import PretendCuda, Watch, unwrap

_modes: list[Watch] = []


def pretend() -> None:
    """From here on this process's "cuda" is a pretended one; `torch.testing.assert_close` and `torch.equal` compare
    across devices, as tests do with what they computed on the CPU."""
    if _modes:
        return
    BOOK.strict, BOOK.stage = True, "step"
    pretend_gpu()
    fbgemm = stub_tbe()
    stub_ddp_collective()
    import rayrec
    from rayrec.distributed import comm

    made = comm.host_group

    def host_group(group: Any, device: torch.device) -> Any:
        found = made(group, device)
        BOOK.host_groups.add("" if found is None else found.group_name)
        return found

    comm.host_group = host_group  # type: ignore[assignment]
    collectives = sys.modules[comm.all_gather.__module__]
    link_of = collectives.link_of  # type: ignore[attr-defined]

    def link_of_hosts(group: Any, tensor: torch.Tensor) -> Any:
        # `combine` is of CPU vectors only, over a group of hosts, for which tests give the only group that they have.
        of_hosts = group.group_name in BOOK.host_groups or sys._getframe(1).f_code.co_name == "combine"
        if tensor.device.type == "cpu" and not of_hosts:
            BOOK.mismatch("a collective of a CPU tensor over NCCL")
        return link_of(group, tensor)

    collectives.link_of = link_of_hosts  # type: ignore[attr-defined]

    BOOK.roots = [os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in (rayrec, fbgemm)]
    move_inputs()
    close, equal = torch.testing.assert_close, torch.equal
    torch.testing.assert_close = lambda a, b, **settings: close(_on_host(a), _on_host(b), **settings)
    torch.equal = lambda a, b: equal(unwrap(a), unwrap(b)) if a.device != b.device else equal(a, b)
    watch_threads()
    _modes.append(Watch())
    _modes[0].__enter__()


def watch_threads() -> None:
    """Operators of threads are seen, too."""
    run = Thread.run

    def watched(self: Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)  # each thread has its own
        with Watch():
            run(self)

    Thread.run = watched  # type: ignore[method-assign]


def _on_host(item: Any) -> Any:
    return pytree.tree_map_only(PretendCuda, unwrap, item)
