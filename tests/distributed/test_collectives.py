"""Collectives, what they count, subgroups, and hosts; sums that are bitwise equal on all ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import ShardingEnv, comm
from rayrec.distributed.comm import collectives
from rayrec.distributed.comm.hosts import Hosts, find_hosts, ranks_per_host
from rayrec.distributed.comm.rank_context import RankContext
from tests.ranks import RankError, Ranks, on_ranks

CPU = torch.device("cpu")
WORLD = 4


def counted(group: dist.ProcessGroup) -> dict[str, tuple[Any, int, int]]:
    """Of each collective what came, how often it was counted, and the bytes."""
    rank, found = group.rank(), {}

    def of(name: str, call: Any) -> None:
        with comm.count_collectives() as outer, comm.count_bytes() as outer_bytes:
            with comm.count_collectives() as times, comm.count_bytes() as sent:
                result = call()
            comm.barrier(group)
        assert outer - times == {"barrier": 1} and outer_bytes == sent
        assert set(times) <= {name.split("-")[0]}
        found[name] = (result, sum(times.values()), sum(sent.values()))

    def to_all(inputs: torch.Tensor, splits: list[int] | None, come: list[int] | None) -> torch.Tensor:
        rows = len(inputs) if come is None else sum(come)
        output = inputs.new_empty(rows, *inputs.shape[1:])
        comm.all_to_all(output, inputs, come, splits, group)()
        return output[:, 0]

    of("all_to_all-even", lambda: to_all(torch.full((8, 3), rank), None, None))
    of("all_to_all-uneven", lambda: to_all(torch.full((6, 3), float(rank)), [0, 1, 2, 3], [rank] * WORLD))
    of("all_to_all-nothing", lambda: to_all(torch.empty(0, 3), [0] * WORLD, [0] * WORLD))
    of("exchange_on_hosts", lambda: comm.exchange_on_hosts(torch.full((4, 1), rank), group)[:, 0])
    of("all_gather", lambda: comm.all_gather(torch.full((2, 2), rank), group)[:, 1, 1])
    of("all_gather-uneven", lambda: comm.all_gather_uneven(torch.full((rank,), rank), group))
    of("all_reduce", lambda: comm.all_reduce(torch.full((6,), rank), group))
    of("broadcast", lambda: comm.broadcast(torch.tensor([rank]), group, 2))
    of("broadcast-first", lambda: comm.broadcast(torch.tensor([rank]), group))
    of("broadcast_object", lambda: comm.broadcast_object(f"rank {rank}", group, 2))
    of("broadcast_object-first", lambda: comm.broadcast_object(f"rank {rank}", group))
    of("all_gather_object", lambda: comm.all_gather_object(f"rank {rank}", group))
    return {name: (r.tolist() if isinstance(r, torch.Tensor) else r, n, sent) for name, (r, n, sent) in found.items()}


def test_what_every_rank_gets_and_what_is_counted() -> None:
    for rank, found in enumerate(on_ranks(WORLD, counted)):
        assert found == {
            "all_to_all-even": ([0, 0, 1, 1, 2, 2, 3, 3], 1, 6 * 3 * 8),
            "all_to_all-uneven": ([float(r) for r in range(WORLD) for _ in range(rank)], 1, (6 - rank) * 3 * 4),
            "all_to_all-nothing": ([], 1, 0),
            "exchange_on_hosts": ([0, 1, 2, 3], 1, 0),
            "all_gather": ([0, 1, 2, 3], 1, 3 * 4 * 8),
            "all_gather-uneven": ([1, 2, 2, 3, 3, 3], 2, 3 * 8 + 3 * 3 * 8),
            "all_reduce": ([6] * 6, 1, 2 * 3 * 6 * 8 // 4),
            "broadcast": ([2], 1, 0),
            "broadcast-first": ([0], 1, 0),
            "broadcast_object": ("rank 2", 1, 0),
            "broadcast_object-first": ("rank 0", 1, 0),
            "all_gather_object": ([f"rank {r}" for r in range(WORLD)], 1, 0),
        }


def test_alone_nothing_is_sent() -> None:
    numbers, output = torch.arange(3), torch.empty(3, dtype=torch.int64)
    with comm.count_collectives() as times, comm.count_bytes() as sent:
        comm.all_to_all(output, numbers, None, None, None)()
        comm.barrier(None)
        same = [comm.exchange_on_hosts(numbers, None), comm.all_gather_uneven(numbers, None)]
        same += [comm.all_reduce(numbers, None), comm.broadcast(numbers, None), comm.broadcast_object(numbers, None)]
        (alone,) = comm.all_gather_object(numbers, None)
        gathered = comm.all_gather(numbers, None)
    assert all(one is numbers for one in (*same, alone)) and gathered.tolist() == [[0, 1, 2]]
    assert output.tolist() == [0, 1, 2] and not times and not sent


def combined(group: dist.ProcessGroup, apart: bool) -> tuple[list[list[float]], int]:
    """Sums and maxima, and the order of ranks, between hosts (`apart`) or on one; how many collectives were counted."""
    rank = group.rank()
    between_hosts = mock.patch.object(collectives, "link_of", lambda *_: None) if apart else nullcontext()
    with between_hosts, comm.count_collectives() as times:
        sums = comm.combine(torch.tensor([rank, 2 * rank, 1]), group, lambda parts: parts.sum(0))
        largest = comm.combine(torch.tensor([float(rank), -float(rank)]), group, lambda parts: parts.amax(0))
        digit = torch.tensor([rank, 10.0], dtype=torch.float64)  # associative, but not commutative
        joined = comm.combine(digit, group, joined_digits)
        total = comm.sum_on_rank_0(torch.tensor([rank, 1]), group)
    assert total is None if rank else sums.tolist()[::2] == total.tolist()
    return [sums.tolist(), largest.tolist(), joined[:1].tolist()], times.total()


def joined_digits(parts: torch.Tensor) -> torch.Tensor:
    """(number, power of ten) of consecutive numbers."""
    number, power = parts[0]
    for digits, length in parts[1:]:
        number, power = number * length + digits, power * length
    return torch.stack([number, power])


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_vectors_of_all_ranks_are_combined_in_their_order(world_size: int, apart: bool) -> None:
    total = sum(range(world_size))
    in_order = float("".join(map(str, range(world_size))))
    expected = [[total, 2 * total, world_size], [world_size - 1.0, 0.0], [in_order]]
    assert on_ranks(world_size, combined, apart) == [(expected, 4 if world_size > 1 else 0)] * world_size


def groups_of(group: dist.ProcessGroup) -> list[list[int]]:
    rank = group.rank()
    ranks = [rank % 2, rank % 2 + 2]
    mine = comm.subgroup(group, ranks, CPU)
    assert comm.subgroup(group, ranks, CPU) is mine
    on_hosts = comm.host_group(group, CPU)
    assert on_hosts is not group and comm.host_group(group, CPU) is on_hosts
    assert on_hosts is not None and on_hosts.size() == WORLD
    assert comm.host_group(None, CPU) is None
    return [comm.all_gather_object(rank, one) for one in (mine, on_hosts)]


def test_groups_within_a_group() -> None:
    for rank, names in enumerate(on_ranks(WORLD, groups_of)):
        assert names == [[rank % 2, rank % 2 + 2], [0, 1, 2, 3]]


def led(group: dist.ProcessGroup) -> list[int]:
    return [comm.call_on_rank(group, leader, lambda: 10 + group.rank()) for leader in (0, 1)]


def test_one_rank_calls_for_all() -> None:
    assert on_ranks(2, led) == [[10, 11]] * 2


def test_hosts_of_equally_many_ranks() -> None:
    hosts = Hosts(6, 2)
    assert [list(ranks) for ranks in hosts.ranks] == [[0, 1], [2, 3], [4, 5]]
    assert [list(ranks) for ranks in hosts.peers] == [[0, 2, 4], [1, 3, 5]]
    alone = RankContext.of(ShardingEnv.from_local(1, 0), CPU)
    assert (alone.rank, alone.world_size, alone.devices, alone.device) == (0, 1, ("cpu",), CPU)
    assert find_hosts(alone) is None
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        RankContext.of(ShardingEnv.from_local(2, 0), CPU)


def test_hosts_are_known_by_their_size_or_by_their_names() -> None:
    assert ranks_per_host([2, 2, 2, 2]) == 2
    assert ranks_per_host(["a", "a", "b", "b"]) == 2
    for unlike in ([2, 2, 1, 1], [3, 3, 3, 3], ["a", "a", "a", "b"], ["a", "b", "a", "b"], [2, 2, "b", "b"]):
        assert ranks_per_host(unlike) is None


def hosts_found(group: dist.ProcessGroup, local: Any) -> Hosts | None:
    return find_hosts(RankContext.of(ShardingEnv.from_process_group(group, local), CPU))


def test_hosts_are_found_where_they_differ() -> None:
    assert on_ranks(WORLD, hosts_found, 2) == [Hosts(WORLD, 2)] * WORLD
    for local in (1, 3, 4, None):
        assert on_ranks(WORLD, hosts_found, local) == [None] * WORLD


def _places(group: dist.ProcessGroup) -> tuple[tuple[str, ...], dict[str, int]]:
    with comm.count_collectives() as times:
        place = RankContext.of(ShardingEnv.from_process_group(group), CPU)
    return place.devices, dict(times)


def test_ranks_on_cpus_need_not_tell_each_other_their_device() -> None:
    assert on_ranks(2, _places) == [(("cpu", "cpu"), {})] * 2


# -- sums

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


@pytest.mark.parametrize("world", [2, 3])
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
    hook = collectives.mean_of_gradients(group, CPU)
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
    wrapped.register_comm_hook(None, collectives.mean_of_gradients(group, CPU))
    loss = wrapped(rows(0, 0)).sum()
    if group.rank() == 1:
        os._exit(3)
    loss.backward()


def test_a_rank_that_ends_in_backward_is_named() -> None:
    with pytest.raises(RankError, match="ConnectionError: rank 1 has ended"):
        Ranks(2).run(loses_a_rank)
