"""Collectives, what they count, subgroups, and hosts."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import ShardingEnv, comm
from rayrec.distributed.comm import call_on_rank as invoke_on_rank_and_broadcast_result
from rayrec.distributed.comm import collectives, shared_memory
from rayrec.distributed.comm.groups import world_rank
from rayrec.distributed.comm.host_link import HostLink, UnlikeExchanges
from rayrec.distributed.comm.hosts import Hosts, find_hosts
from rayrec.distributed.comm.rank_context import RankContext
from rayrec.distributed.comm.shared_memory import LEAST_BYTES, ONCE, Slots
from rayrec.torchrec.distributed import comm as launched
from rayrec.torchrec.distributed.collective_utils import is_leader, run_on_leader
from rayrec.torchrec.distributed.comm import RANKS, SIZES
from tests.ranks import on_ranks

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
    assert on_ranks(world_size, combined, apart) == [(expected, 3 if world_size > 1 else 0)] * world_size


def groups_of(group: dist.ProcessGroup) -> Any:
    rank = group.rank()
    ranks = [rank % 2, rank % 2 + 2]
    mine = comm.subgroup(group, ranks, CPU)
    assert comm.subgroup(group, ranks, CPU) is mine
    on_hosts = comm.host_group(group, CPU)
    assert on_hosts is not group and comm.host_group(group, CPU) is on_hosts
    assert on_hosts is not None and on_hosts.size() == WORLD
    assert comm.host_group(None, CPU) is None
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        inside, across = launched.intra_and_cross_node_pg()
        local = [launched.get_local_size(), launched.get_num_groups(), launched.get_group_rank()]
    assert inside is not None and across is not None
    assert launched.intra_and_cross_node_pg(torch.device("meta")) == (None, None)
    names = [comm.all_gather_object(rank, one) for one in (mine, inside, across, on_hosts)]
    with mock.patch.dict(os.environ):
        for name in (*SIZES, *RANKS):
            os.environ.pop(name, None)
        here = [launched.get_local_rank(), launched.get_local_size()]
    leaders = [is_leader(group), is_leader(group, 2), is_leader(None), is_leader(None, 1)]
    return names, [world_rank(mine, 1), world_rank(None, 3)], local, here, leaders


def test_groups_within_a_group() -> None:
    for rank, (names, in_world, local, here, leaders) in enumerate(on_ranks(WORLD, groups_of)):
        host, place = divmod(rank, 2)
        assert names == [[place, place + 2], [2 * host, 2 * host + 1], [place, place + 2], [0, 1, 2, 3]]
        assert (in_world, local, here) == ([place + 2, 3], [2, 2, host], [rank, 4])
        assert leaders == [rank == 0, rank == 2, True, False]


def led(group: dist.ProcessGroup) -> Any:
    @run_on_leader(group, 1)
    def of(name: str) -> str:
        if name == "bad":
            raise KeyError(name)
        return f"{name} {group.rank()}"

    with pytest.raises(KeyError, match="bad"):
        of("bad")
    return of(name="rank"), invoke_on_rank_and_broadcast_result(group, 0, lambda: group.rank()), of.__name__


def test_one_rank_calls_for_all() -> None:
    assert on_ranks(2, led) == [("rank 1", 0, "of")] * 2


@pytest.mark.parametrize(
    ("environment", "sizes", "ranks"),
    [
        ({}, [4, 8, 8, 12], [1, 1, 1, 9]),
        ({"LOCAL_WORLD_SIZE": "2"}, [2, 2, 2, 2], [1, 1, 1, 1]),
        ({"MPI_LOCALNRANKS": "5", "MPI_LOCALRANKID": "7"}, [4, 8, 16, 12], [7] * 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, [4] * 4, [0] * 4),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "3"}, [1] * 4, [3] * 4),
    ],
)
def test_the_launcher_says_which_rank_of_its_host_a_process_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sizes: list[int], ranks: list[int]
) -> None:
    for name in (*SIZES, *RANKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    worlds = (4, 8, 16, 12)
    assert [launched.get_local_size(world) for world in worlds] == sizes
    assert [launched.get_node_group_size(world) for world in worlds] == sizes
    assert [launched.get_num_groups(world) for world in worlds] == [w // s for w, s in zip(worlds, sizes, strict=True)]
    assert [launched.get_group_rank(world, 9) for world in worlds] == [9 // size for size in sizes]
    assert [launched.get_local_rank(world, 9) for world in worlds] == ranks


def test_hosts_of_equally_many_ranks() -> None:
    hosts = Hosts(6, 2)
    assert [list(ranks) for ranks in hosts.ranks] == [[0, 1], [2, 3], [4, 5]]
    assert [list(ranks) for ranks in hosts.peers] == [[0, 2, 4], [1, 3, 5]]
    alone = RankContext.of(ShardingEnv.from_local(1, 0), CPU)
    assert (alone.rank, alone.world_size, alone.devices, alone.device) == (0, 1, ("cpu",), CPU)
    assert find_hosts(alone) is None
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        RankContext.of(ShardingEnv.from_local(2, 0), CPU)


def hosts_found(group: dist.ProcessGroup, local: Any) -> Hosts | None:
    return find_hosts(RankContext.of(ShardingEnv.from_process_group(group, local), CPU))


def test_hosts_are_found_where_they_differ() -> None:
    assert on_ranks(WORLD, hosts_found, 2) == [Hosts(WORLD, 2)] * WORLD
    for local in (1, 3, 4, None):
        assert on_ranks(WORLD, hosts_found, local) == [None] * WORLD


def links_of(world: int, timeout_s: float = 5) -> list[HostLink]:
    """All ranks of a host in one process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for rank in range(world):
        for other in range(rank):
            ends[rank][other], ends[other][rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [HostLink(rank, of_rank, timeout_s) for rank, of_rank in enumerate(ends)]


def test_ranks_in_one_process_exchange_through_shared_memory() -> None:
    links, generator = links_of(3), torch.Generator().manual_seed(1)
    for step in range(12):
        waits, expected = [], []
        for number in range(3 - step % 3):
            table = torch.randint(0, 5, (3, 3), generator=generator) * (3000 if step == 5 else 1)
            parts = [
                [torch.full((int(n),), 50 * number + 10 * a + b, dtype=torch.uint8) for b, n in enumerate(row)]
                for a, row in enumerate(table)
            ]
            for rank, link in enumerate(links):
                output = torch.zeros(int(table[:, rank].sum()), dtype=torch.uint8)
                message = torch.cat(parts[rank])
                waits.append((link.all_to_all(output, message, table[:, rank].tolist(), table[rank].tolist()), output))
                message.zero_()
                expected.append(torch.cat([parts[source][rank] for source in range(3)]))
        for number in reversed(range(len(waits))):
            waits[number][0]()
            assert torch.equal(waits[number][1], expected[number])
        outputs = [torch.empty(5 + step, dtype=torch.uint8) for _ in links]
        sizes = [2, 3, step]
        ends = [
            link.all_gather(output, torch.full((sizes[rank],), rank, dtype=torch.uint8), sizes)
            for rank, (link, output) in enumerate(zip(links, outputs, strict=True))
        ]
        for end, output in zip(ends, outputs, strict=True):
            end()
            assert output.tolist() == [0, 0, 1, 1, 1] + [2] * step
    assert all(len(link._slots) <= 5 for link in links), "memory is used again when all have read it"


def test_a_message_takes_no_more_memory_than_the_others_parts() -> None:
    links, half = links_of(2), LEAST_BYTES // 2
    message = torch.zeros(2 * half, dtype=torch.uint8)
    waits = [link.all_to_all(torch.empty_like(message), message, [half] * 2, [half] * 2) for link in links]
    for wait in waits:
        wait()
    assert [link._slots.num_bytes for link in links] == [LEAST_BYTES] * 2


def test_links_refuse_what_does_not_fit() -> None:
    first, second = links_of(2, timeout_s=0.05)
    two, three, wide = torch.zeros(2), torch.zeros(3), torch.zeros(2, 2).t()
    for output, inputs, come, leave in [(three, two, [1, 1], [1, 1]), (two, three, [1, 1], [1, 1])]:
        with pytest.raises(ValueError, match="do not add up"):
            first.all_to_all(output, inputs, come, leave)
    for output, inputs in [(wide, torch.zeros(2, 2)), (torch.zeros(2, 2), wide)]:
        with pytest.raises(ValueError, match="must be contiguous"):
            first.all_to_all(output, inputs, [1, 1], [1, 1])
    for come in ([8, 8], [4, 8]):
        with pytest.raises(ValueError, match="do not add up"):
            first.all_gather(three, two, come)
    late = first.all_gather(torch.zeros(4), two, [8, 8])
    with pytest.raises(TimeoutError, match=r"rank 1 has not come to an exchange within 0.05 s"):
        late()
    other = second.all_gather(torch.zeros(5), three, [8, 12])
    other()
    with pytest.raises(UnlikeExchanges, match="rank 1 sends 12 bytes in its exchange 0, rank 0 expects 8 in its exch"):
        late()
    for peer in second._peers:
        peer.socket.close()
    with pytest.raises(ConnectionError, match="rank 1 has ended"):
        first.all_gather(torch.zeros(4), two, [8, 8])()


def test_a_message_takes_the_smallest_free_slot_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "KEPT_BYTES", 7 * LEAST_BYTES)
    slots, number = Slots(), 0

    def held(num_bytes: int, under_way: int = 0) -> tuple[int, int, bool]:
        """The slot, its bytes, and whether its memory is new; `under_way` earlier messages have not been read."""
        nonlocal number
        place, memory, fd = slots.hold(number, num_bytes, number - under_way)
        number += 1
        assert memory.num_bytes >= num_bytes
        if fd is not None:
            os.close(fd)
        return place, memory.num_bytes, fd is not None

    assert [held(0), held(LEAST_BYTES)] == [(0, LEAST_BYTES, True), (0, LEAST_BYTES, False)]
    assert held(LEAST_BYTES + 1) == (0, 2 * LEAST_BYTES, True), "a free slot is enlarged"
    assert held(5, under_way=1) == (1, LEAST_BYTES, True)
    assert [held(5), held(2 * LEAST_BYTES)] == [(1, LEAST_BYTES, False), (0, 2 * LEAST_BYTES, False)]
    assert held(5 * LEAST_BYTES) == (ONCE, 5 * LEAST_BYTES, True), "slots would exceed the bound together"
    assert held(3 * LEAST_BYTES) == (0, 4 * LEAST_BYTES, True)
    assert held(4 * LEAST_BYTES, under_way=1) == (ONCE, 4 * LEAST_BYTES, True), "the only one that fits is not free"
    assert [held(3 * LEAST_BYTES), held(LEAST_BYTES)] == [(0, 4 * LEAST_BYTES, False), (1, LEAST_BYTES, False)]
    assert (len(slots), slots.num_bytes) == (2, 5 * LEAST_BYTES)


def _places(group: dist.ProcessGroup) -> tuple[tuple[str, ...], dict[str, int]]:
    with comm.count_collectives() as times:
        place = RankContext.of(ShardingEnv.from_process_group(group), CPU)
    return place.devices, dict(times)


def test_ranks_on_cpus_need_not_tell_each_other_their_device() -> None:
    assert on_ranks(2, _places) == [(("cpu", "cpu"), {})] * 2
