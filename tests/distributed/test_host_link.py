"""The link between the ranks of a host: exchanges of any size and order, lost ranks, other processes."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import comm
from rayrec.distributed.comm import collectives, host_connect, host_link, shared_memory
from rayrec.train.errors import is_lost_peer, is_retryable
from tests.ranks import RankError, Ranks, on_ranks

DTYPES = (torch.int32, torch.float16, torch.int64, torch.uint8)


def numbers(sender: int, receiver: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) * 7 + 13 * sender + 29 * receiver).remainder(120).to(dtype)


def exchanges(group: dist.ProcessGroup, seed: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Several under way at once, waited for in another order on each rank; this rank's slots, and its peers' memory."""
    same, own = random.Random(seed), random.Random(seed + 1 + group.rank())
    rank, world = group.rank(), group.size()
    for _ in range(12):
        under_way = []
        for _ in range(same.randint(1, 4)):
            dtype = same.choice(DTYPES)
            table = [[same.choice(sizes) for _ in range(world)] for _ in range(world)]
            message = torch.cat([numbers(rank, to, table[rank][to], dtype) for to in range(world)])
            come = [table[sender][rank] for sender in range(world)]
            expected = torch.cat([numbers(sender, rank, size, dtype) for sender, size in enumerate(come)])
            output = torch.empty_like(expected)
            wait = comm.all_to_all(output, message, come, table[rank], group)
            message.zero_()  # the sender may use its memory again
            under_way.append((wait, output, expected))
        for wait, output, expected in own.sample(under_way, len(under_way)):
            wait()
            assert torch.equal(output, expected)
            wait()
        gathered = comm.all_gather(torch.full((2, 3), rank), group)
        assert torch.equal(gathered, torch.arange(world).view(-1, 1, 1).expand(world, 2, 3))
    link = collectives.link_of(group, torch.empty(0))
    assert link is not None
    return len(link._slots), sum(memory.num_bytes for peer in link._peers for memory in peer.slots.values())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sizes", [(0, 1, 5), (0, 3, 70_000), (9_000, 40_000)], ids=str)
def test_every_rank_gets_what_was_sent(world: int, sizes: tuple[int, ...]) -> None:
    for slots, _ in on_ranks(world, exchanges, 3, sizes):
        assert slots <= 10  # memory is used again: there were about 40 messages


def with_little_kept(group: dist.ProcessGroup) -> int:
    with mock.patch.object(shared_memory, "KEPT_BYTES", 1 << 18):
        exchanges(group, 5, (100_000, 400_000))
        return exchanges(group, 6, (100,))[1]


def test_no_more_memory_is_kept_than_the_bound() -> None:
    with_pool = Ranks(2)
    try:
        assert max(with_pool.run(with_little_kept)) <= 1 << 18
    finally:
        with_pool.close()


def rows_of_matrices(group: dist.ProcessGroup) -> torch.Tensor:
    rank, world = group.rank(), group.size()
    inputs = torch.full((world * 2, 3), float(rank))
    even = torch.empty_like(inputs)
    comm.all_to_all(even, inputs, None, None, group)()
    uneven = torch.empty(world, 3)
    comm.all_to_all(uneven, inputs[:world], [1] * world, [1] * world, group)()
    assert torch.equal(uneven[:, 0], torch.arange(world, dtype=torch.float32))
    return torch.cat([even, comm.exchange_on_hosts(inputs[:world], group)])


def test_splits_count_rows() -> None:
    for got in on_ranks(2, rows_of_matrices):
        assert got[:, 0].tolist() == [0, 0, 1, 1, 0, 1]


def wrong_tensors(group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="do not add up"):
        comm.all_to_all(torch.empty(3), torch.empty(2), [1, 1], [1, 1], group)
    with pytest.raises(ValueError, match="do not add up"):
        comm.all_to_all(torch.empty(2), torch.empty(3), [1, 1], [1, 1], group)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_to_all(torch.empty(2, 2), torch.empty(2, 2).t(), None, None, group)
    comm.all_gather(torch.empty(1), group)  # goes on


def test_tensors_that_do_not_fit_are_refused() -> None:
    on_ranks(2, wrong_tensors)


def in_inference_mode(group: dist.ProcessGroup) -> torch.Tensor:
    inputs = torch.ones(group.size(), requires_grad=True)
    with torch.inference_mode():
        output = torch.empty(group.size())
        wait = comm.all_to_all(output, inputs, None, None, group)
    wait()
    return output


def test_gradients_and_inference_mode_are_no_matter() -> None:
    assert all(output.tolist() == [1, 1] for output in on_ranks(2, in_inference_mode))


def without_sharing(group: dist.ProcessGroup, how: str) -> bool:
    """One rank is elsewhere, or may not share memory: all of them go by gloo."""
    odd = group.rank() == 1
    with mock.patch.object(host_connect, "_host", lambda: f"host {odd and how == 'elsewhere'}"):
        fails = mock.patch.object(os, "memfd_create", side_effect=OSError) if odd and how == "refused" else mock.Mock()
        apart = dist.new_group(timeout=timedelta(seconds=20))
        with fails if odd and how == "refused" else mock.patch.object(shared_memory, "LEAST_BYTES", 1 << 16):
            output = torch.empty(2)
            comm.all_to_all(output, torch.full((2,), float(group.rank())), None, None, apart)()
        assert output.tolist() == [0, 1]
        return collectives.link_of(apart, output) is None


@pytest.mark.parametrize("how", ["elsewhere", "refused"])
def test_ranks_that_cannot_share_memory_go_by_gloo(how: str) -> None:
    assert on_ranks(2, without_sharing, how) == [True, True]


def ends(group: dist.ProcessGroup) -> None:
    comm.all_gather(torch.zeros(1), group)
    if group.rank() == 1:
        os._exit(3)
    comm.all_gather(torch.zeros(1), group)


def test_a_rank_that_has_ended_is_named() -> None:
    with pytest.raises(RankError, match="ConnectionError: rank 1 has ended"):
        Ranks(2).run(ends)


def ends_with_a_child(group: dist.ProcessGroup) -> None:
    """Rank 1 is killed; a process that it has forked lives on."""
    comm.all_gather(torch.zeros(1), group)
    child = 0
    if group.rank() == 1:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    child = max(comm.all_gather_object(child, group))
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        comm.all_gather(torch.zeros(1), group)
    except ConnectionError as error:
        os.kill(child, 0)  # it is still there
        soon = time.monotonic() - began < 20
        raise AssertionError(f"{error}; soon: {soon}, retryable: {is_retryable(error)}") from None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_killed_rank_is_noticed_although_its_child_lives() -> None:
    with pytest.raises(RankError, match=r"rank 1 has ended.*; soon: True, retryable: True"):
        Ranks(2).run(ends_with_a_child)


def half_sent(link: host_link.HostLink, end: socket.socket) -> Any:
    """Begins an exchange with a peer that sends its packet, which announces new memory, and no descriptor."""
    end.send(host_link._PACKET.pack(0, 0, 1 << 16, 0, 4, 0))
    return link.all_gather(torch.empty(2), torch.zeros(1), [4, 4])


def test_a_peer_that_ends_before_it_has_sent_its_memory_is_lost() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = host_link.HostLink(0, {1: ours}, 5)
    wait = half_sent(link, theirs)
    theirs.close()
    with pytest.raises(ConnectionError, match="rank 1 has ended") as caught:
        wait()
    assert is_lost_peer(caught.value) and is_retryable(caught.value)
    del wait, link, caught
    gc.collect()
    ours.close()
    assert not set(os.listdir("/proc/self/fd")) - before  # earlier tests' own may have been collected, too


def without_memory(_: dist.ProcessGroup, limit: str) -> tuple[str, bool, int]:
    """The error at a limit of this process, whether it counts as a lost peer, and descriptors that were left open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, other = host_link.HostLink(0, {1: ours}, 5), host_link.HostLink(1, {0: theirs}, 5)
    size = 1 << 26
    message, output = torch.empty(size, dtype=torch.uint8), torch.empty(2 * size, dtype=torch.uint8)
    open_files = set(os.listdir("/proc/self/fd"))
    calls = [lambda: other.all_gather(output, message, [size, size])]
    if limit != "to send":
        calls.pop()()
        open_files = set(os.listdir("/proc/self/fd"))
        calls = [link.all_gather(torch.empty(2), torch.zeros(1), [4, 4])]
    kind = resource.RLIMIT_NOFILE if limit == "files" else resource.RLIMIT_AS
    kept = resource.getrlimit(kind)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    free = next(number for number in range(1 << 20) if not os.path.exists(f"/proc/self/fd/{number}"))
    resource.setrlimit(kind, (free if limit == "files" else used + (1 << 24), kept[1]))
    try:
        calls[0]()
    except OSError as error:
        found = error
    finally:
        resource.setrlimit(kind, kept)
    opened = set(os.listdir("/proc/self/fd")) - open_files  # earlier tests' own may be collected meanwhile
    return f"{type(found).__name__}: {found}", is_lost_peer(found), len(opened)


@pytest.mark.parametrize(
    ("limit", "says"),
    [("to send", "cannot map 67108864"), ("to read", "cannot map 67108864"), ("files", "ulimit -n")],
)
def test_a_process_at_its_limits_is_not_taken_for_a_lost_peer(limit: str, says: str) -> None:
    ((error, lost, left),) = on_ranks(1, without_memory, limit)
    assert error.startswith("SharedMemoryError") and says in error
    assert not lost
    assert left == 0


def strangers(address: host_connect.Address) -> list[int]:
    """Processes that call a rank before the others do; one of them as another user, if this one may become it."""

    def call(*packets: bytes) -> None:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(f"\0{address.name}")
        for packet in packets:
            link.send(packet)
        kept.append(link)

    kept: list[socket.socket] = []
    called, calling = os.pipe()
    children = []
    for other_user in (False, True) if os.getuid() == 0 else (False,):
        children.append(os.fork())
        if not children[-1]:
            if other_user:
                os.setuid(65534)
                call(host_connect._HELLO.pack(1, address.token))
            else:
                call(host_connect._HELLO.pack(1, bytes(16)))  # a rank, and not the token
                call((1).to_bytes(4, "little"))
                call()  # and says nothing
                call(b"")
                kept.pop().close()
            os.write(calling, b".")
            time.sleep(60)
            os._exit(0)
        assert os.read(called, 1) == b"."
    return children


def joins_among_strangers(group: dist.ProcessGroup) -> tuple[bool, float, list[int]]:
    children: list[int] = []
    listen = host_connect.listen

    def listen_and_be_called() -> tuple[socket.socket, host_connect.Address]:
        listener, address = listen()
        if group.rank() == 0:
            children.extend(strangers(address))
        return listener, address

    began = time.monotonic()
    apart = dist.new_group(timeout=timedelta(seconds=60))
    try:
        with mock.patch.object(host_connect, "listen", listen_and_be_called):
            gathered = comm.all_gather(torch.tensor([group.rank()]), apart)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    linked = collectives.link_of(apart, torch.empty(0)) is not None
    return linked, time.monotonic() - began, gathered.flatten().tolist()


def test_processes_that_are_no_ranks_are_dropped() -> None:
    for linked, took_s, gathered in on_ranks(3, joins_among_strangers):
        assert linked and took_s < 45 and gathered == [0, 1, 2]


def test_a_rank_that_calls_twice_or_has_another_number_is_dropped() -> None:
    listener, address = host_connect.listen()
    calls = []
    for rank in (5, 0, -1, 1, 1):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.connect(f"\0{address.name}")
        link.send(host_connect._HELLO.pack(rank, address.token))
        calls.append(link)
    sockets = host_connect.connect_all(0, [address] * 3, listener, 0.5)
    assert list(sockets) == [1]
    sockets[1].send(b"yes")
    assert [link.recv(3) for link in calls] == [b"", b"", b"", b"yes", b""]
    for link in (listener, *calls, *sockets.values()):
        link.close()


def comes_late(group: dist.ProcessGroup) -> str:
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    comm.all_gather(torch.zeros(1), hasty)
    said = ""
    if group.rank() == 0:
        with pytest.raises(TimeoutError) as caught:
            comm.all_gather(torch.zeros(1), hasty)
        said = str(caught.value)
    dist.barrier(group)
    return said


def test_a_rank_that_does_not_come_is_named() -> None:
    assert on_ranks(2, comes_late)[0] == "rank 1 has not come to an exchange within 1 s"


def sends_another_size(group: dist.ProcessGroup) -> str:
    apart = dist.new_group(timeout=timedelta(seconds=20))
    size = 2 if group.rank() == 0 else 4
    with pytest.raises(host_link.UnlikeExchanges) as caught:
        comm.all_to_all(torch.empty(size), torch.empty(size), None, None, apart)()
    return str(caught.value)


def test_ranks_that_disagree_are_told() -> None:
    first, second = on_ranks(2, sends_another_size)
    assert "rank 1 sends 8 bytes in its exchange 0, rank 0 expects 4" in first
    assert "rank 0 sends 4 bytes in its exchange 0, rank 1 expects 8" in second


def open_files(group: dist.ProcessGroup) -> tuple[int, int, int]:
    """Descriptors of this process once a group is joined, after its exchanges, and after its end."""
    apart: Any = dist.new_group(timeout=timedelta(seconds=20))
    comm.all_gather(torch.zeros(1), apart)
    joined = len(os.listdir("/proc/self/fd"))
    exchanges(apart, 4, (10, 70_000))
    used = len(os.listdir("/proc/self/fd"))
    dist.destroy_process_group(apart)
    del apart
    gc.collect()
    return joined, used, len(os.listdir("/proc/self/fd"))


def test_a_group_has_a_socket_for_each_peer_and_nothing_else() -> None:
    for joined, used, ended in on_ranks(2, open_files):
        assert used == joined
        assert ended < joined


def links_of(world: int, timeout_s: float = 5) -> list[host_link.HostLink]:
    """All ranks of a host in one process."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for rank in range(world):
        for other in range(rank):
            ends[rank][other], ends[other][rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [host_link.HostLink(rank, of_rank, timeout_s) for rank, of_rank in enumerate(ends)]


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
    with pytest.raises(host_link.UnlikeExchanges, match="rank 1 sends 12 bytes in its exchange 0, rank 0 expects 8"):
        late()
    for peer in second._peers:
        peer.socket.close()
    with pytest.raises(ConnectionError, match="rank 1 has ended"):
        first.all_gather(torch.zeros(4), two, [8, 8])()
