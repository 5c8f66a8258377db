"""Freed CPU memory is used again without page faults once a process keeps it."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_memory import keep_freed_memory
from tests.ranks import Ranks


def _faults_of_a_tensor(num_bytes: int) -> int:
    """Of the fifth of five tensors, each freed before the next."""
    before = 0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(num_bytes, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _before_and_after(_: dist.ProcessGroup, num_bytes: int) -> tuple[int, int]:
    before = _faults_of_a_tensor(num_bytes)
    keep_freed_memory()
    return before, _faults_of_a_tensor(num_bytes)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")
@pytest.mark.parametrize("mebibytes", [1, 60])
def test_freed_memory_is_used_again_without_page_faults(mebibytes: int) -> None:
    process = Ranks(1)
    try:
        ((before, after),) = process.run(_before_and_after, mebibytes << 20)
    finally:
        process.close()
    assert after <= 16
    assert mebibytes < 32 or before > 60 * 200, "what glibc does by default, of large memory"
