"""How the CPU ranks of one host connect for the memory that they share (see `host_link.py`).

Every rank listens on a socket of Linux's abstract name space, which is in no folder and ends with the process. All
users of the host can see its name, so a connection counts only if it comes from a process of the same user that knows
the token of the rank it calls; ranks get each other's tokens through their process group.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rayrec.distributed.comm.groups import timeout_of
from rayrec.distributed.comm.host_link import HostLink, close

CONNECT_S = 60.0  # from when all ranks listen; ranks that do not connect by then exchange through gloo
_CPU = torch.device("cpu")
_HELLO = struct.Struct("<q16s")  # the caller's rank, and the token of the rank that it calls
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens.

    Args:
        host: equal for ranks that can reach each other.
        name: of its socket; empty if it cannot listen, or cannot share memory.
        token: that a caller has to know.
    """

    host: str
    name: str
    token: bytes


def connect(group: dist.ProcessGroup) -> HostLink | None:
    """Connects the ranks of a group on CPUs; None if they are not all on one host, or it cannot share memory.

    Collective.
    """
    listener, address = listen()
    with listener:
        addresses = [address] * group.size()
        dist.all_gather_object(addresses, address, group=group)
        if len({other.host for other in addresses}) > 1 or not all(other.name for other in addresses):
            return None
        rank, timeout_s = group.rank(), timeout_of(group, _CPU).total_seconds()
        sockets = connect_all(rank, addresses, listener, min(timeout_s, CONNECT_S))
        connected = [False] * group.size()
        dist.all_gather_object(connected, len(sockets) == group.size() - 1, group=group)
        if not all(connected):
            close(sockets.values())
            return None
    return HostLink(rank, sockets, timeout_s)


def listen() -> tuple[socket.socket, Address]:
    """A socket for the other ranks to call, and its address; without a name where this, or shared memory, fails."""
    listener = socket.socket(socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", socket.SOCK_STREAM))
    name = f"rayrec-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("rayrec-try"))
        listener.bind(f"\0{name}")
        listener.listen(4096)
    except (OSError, AttributeError):
        name = ""
    return listener, Address(_host(), name, secrets.token_bytes(16))


def _host() -> str:
    """The running kernel, and the network, the numbering of users and the user of this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
            return " ".join([file.read().strip(), *spaces, str(os.getuid())])
    except OSError:
        return secrets.token_hex(16)  # like no other


def connect_all(
    rank: int, addresses: Sequence[Address], listener: socket.socket, timeout_s: float
) -> dict[int, socket.socket]:
    """A socket to each other rank: this rank calls those below it, and those above call; fewer if some fail."""
    sockets: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets[other] = link
            link.settimeout(timeout_s)
            link.connect(f"\0{addresses[other].name}")
            if not _of_this_user(link):
                raise PermissionError("another user listens at a rank's name")
            link.send(_HELLO.pack(rank, addresses[other].token))
        expected = range(rank + 1, len(addresses))
        sockets |= _accept(expected, addresses[rank].token, listener, time.monotonic() + timeout_s)
    except OSError:  # the others learn it by the number of sockets
        close(sockets.values())
        return {}
    return sockets


def _accept(expected: range, token: bytes, listener: socket.socket, until: float) -> dict[int, socket.socket]:
    """The sockets on which the expected ranks call; whoever calls otherwise, or says nothing, is dropped."""
    accepted: dict[int, socket.socket] = {}
    silent: set[socket.socket] = set()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(accepted) < len(expected) and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                link = key.fileobj
                assert isinstance(link, socket.socket)
                if link is listener:
                    link, _ = listener.accept()
                    if _of_this_user(link):
                        silent.add(link)
                        selector.register(link, selectors.EVENT_READ)
                    else:
                        link.close()
                    continue
                silent.remove(link)
                selector.unregister(link)
                rank = _rank_that_calls(link, token)
                if rank is not None and rank in expected and rank not in accepted:
                    accepted[rank] = link
                else:
                    link.close()
        close(silent)
    return accepted


def _of_this_user(link: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.getuid()


def _rank_that_calls(link: socket.socket, token: bytes) -> int | None:
    """The rank in a first packet; None if it holds another token."""
    try:
        packet = link.recv(_HELLO.size + 1, socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(packet) != _HELLO.size:
        return None
    rank, known = _HELLO.unpack(packet)
    return rank if secrets.compare_digest(known, token) else None
