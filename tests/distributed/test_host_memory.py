"""Freed CPU memory is used again without page faults once a process keeps it."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_memory import keep_freed_memory, use_large_pages
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


def _faults_of_a_filled_table(_: dist.ProcessGroup, num_bytes: int, large: bool) -> int:
    table = torch.zeros(num_bytes // 4)
    if large:
        use_large_pages(table)
        assert not table.any()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use_large_pages(table[:0])  # nothing to do
    table.fill_(1.5)
    assert table.sum().item() == 1.5 * table.numel()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not OFFERED.exists() or "[never]" in OFFERED.read_text(), reason="this system has small pages only")
def test_a_table_lies_on_large_pages() -> None:
    process = Ranks(1)
    try:
        (faults,) = process.run(_faults_of_a_filled_table, 64 << 20, True)
    finally:
        process.close()
    assert 0 < faults < 64 * 256 / 8, "a small page for each 4 KiB would be 16,384"
