"""Sums over the ranks of one host are right and bitwise equal on all of them, those of gradients too."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import comm
from rayrec.distributed.comm.collectives import mean_of_gradients
from rayrec.train.errors import is_lost_peer
from tests.ranks import RankError, Ranks, on_ranks

SIZES = (0, 1, 3, 8191, 8193, 70_001)


def sums(group: dist.ProcessGroup) -> list[torch.Tensor]:
    added = []
    for size in SIZES:
        for dtype in (torch.float32, torch.float64, torch.int64):
            everyone = [drawn(rank, size).to(dtype) for rank in range(group.size())]
            got = comm.all_reduce(everyone[group.rank()].clone(), group)
            torch.testing.assert_close(got, torch.stack(everyone).sum(0))
            added.append(got)
    column = torch.full((4, 3), float(group.rank()))[:, 1]  # not contiguous
    assert comm.all_reduce(column, group).tolist() == [sum(range(group.size()))] * 4
    highest = comm.all_reduce(torch.tensor([group.rank()]), group, dist.ReduceOp.MAX)
    assert highest.item() == group.size() - 1
    return added


def drawn(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 1000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_have_the_same_sum(world: int) -> None:
    first, *others = on_ranks(world, sums)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 1))


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(group: dist.ProcessGroup, static: bool) -> list[torch.Tensor]:
    """The parameters after three steps with gradients in several buckets."""
    hook = mean_of_gradients(group, torch.device("cpu"))
    assert hook is not None
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.1, static_graph=static, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(rows(group.rank(), step)).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in wrapped.parameters()]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("static", [False, True])
def test_gradients_are_those_of_one_process(world: int, static: bool) -> None:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain(torch.cat([rows(rank, step) for rank in range(world)])).square().mean().backward()
        optimizer.step()
    first, *others = on_ranks(world, train, static)
    for got, expected in zip(first, plain.parameters(), strict=True):
        torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def loses_a_rank(group: dist.ProcessGroup) -> None:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    wrapped.register_comm_hook(None, mean_of_gradients(group, torch.device("cpu")))
    loss = wrapped(rows(0, 0)).sum()
    if group.rank() == 1:
        os._exit(3)
    try:
        loss.backward()
    except Exception as error:
        raise AssertionError(f"seen as {type(error).__name__}, a lost peer: {is_lost_peer(error)}") from None


def test_a_rank_that_ends_in_backward_is_a_lost_peer() -> None:
    with pytest.raises(RankError, match="seen as ConnectionError, a lost peer: True"):
        Ranks(2).run(loses_a_rank)
