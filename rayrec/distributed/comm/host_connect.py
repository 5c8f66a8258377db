"""Connects the CPU ranks of one host for shared memory (see `host_link.py`).

Every rank listens on a socket in Linux's abstract namespace, which has no file and ends with the process. All users of
the host can see its name, so a rank accepts only processes of the same user that know its token. Ranks exchange tokens
through their process group.
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

CONNECT_S = 60.0  # time to connect once all ranks listen; afterwards ranks use gloo
_CPU = torch.device("cpu")
_HELLO = struct.Struct("<q16s")  # the caller's rank, and the token of the called rank
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a rank's socket.

    Args:
        host: Equal for ranks that can reach each other.
        name: Name of the socket. Empty if the rank cannot listen or cannot share memory.
        token: Secret that a caller must send.
    """

    host: str
    name: str
    token: bytes


def connect(group: dist.ProcessGroup) -> HostLink | None:
    """Connects the CPU ranks of a group. Returns None if they are on several hosts or cannot share memory.

    Collective.
    """
    listener, address = listen()
    with listener:
        addresses = [address] * group.size()
        dist.all_gather_object(addresses, address, group=group)
        if len({rank_address.host for rank_address in addresses}) > 1 or not all(a.name for a in addresses):
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
    """Returns a listening socket and its address; the name is empty if listening or shared memory fails."""
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
    """Identifies the running kernel, and this process's network namespace, user namespace and user."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "user")]
            return " ".join([file.read().strip(), *spaces, str(os.getuid())])
    except OSError:
        return secrets.token_hex(16)  # equal to no other host


def connect_all(
    rank: int, addresses: Sequence[Address], listener: socket.socket, timeout_s: float
) -> dict[int, socket.socket]:
    """Returns a socket to each other rank, fewer if some fail. This rank calls lower ranks; higher ranks call this
    one."""
    sockets: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sockets[peer] = link
            link.settimeout(timeout_s)
            link.connect(f"\0{addresses[peer].name}")
            if not _of_this_user(link):
                raise PermissionError("another user listens at a rank's name")
            link.send(_HELLO.pack(rank, addresses[peer].token))
        expected = range(rank + 1, len(addresses))
        sockets |= _accept(expected, addresses[rank].token, listener, time.monotonic() + timeout_s)
    except OSError:  # peers see it by the number of sockets
        close(sockets.values())
        return {}
    return sockets


def _accept(expected: range, token: bytes, listener: socket.socket, until: float) -> dict[int, socket.socket]:
    """Accepts the sockets of the expected ranks; closes connections that send anything else, or nothing."""
    accepted: dict[int, socket.socket] = {}
    silent: set[socket.socket] = set()
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(accepted) < len(expected) and (remaining_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
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
    """The rank in a caller's first packet, or None if the token is wrong."""
    try:
        packet = link.recv(_HELLO.size + 1, socket.MSG_DONTWAIT)
    except OSError:
        return None
    if len(packet) != _HELLO.size:
        return None
    rank, sent_token = _HELLO.unpack(packet)
    return rank if secrets.compare_digest(sent_token, token) else None
