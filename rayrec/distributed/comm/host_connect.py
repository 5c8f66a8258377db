"""How the CPU ranks of one host find each other, for the memory that they share (see `host_link.py`)."""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rayrec.distributed.comm.host_link import HostLink, close

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, HostLink | None] = weakref.WeakKeyDictionary()


def link_of(group: dist.ProcessGroup, tensor: torch.Tensor) -> HostLink | None:
    """What joins the ranks of a group for CPU tensors, if they are all on one host; found when first asked for.

    A collective, the first time.
    """
    if tensor.device.type != "cpu":
        return None
    if group not in _links:
        on_gloo = "gloo" in group._get_backend(torch.device("cpu")).name().lower()
        _links[group] = connect(group) if on_gloo else None
    return _links[group]


def connect(group: dist.ProcessGroup) -> HostLink | None:
    """Joins the ranks of a group on CPUs; None where they are not all on one host, or it cannot share memory.

    A collective.
    """
    listener, address = _listen()
    with listener:
        told: list[tuple[str, str]] = [("", "")] * group.size()
        dist.all_gather_object(told, (_host() if address else "", address), group=group)
        if len({host for host, _ in told}) > 1 or not address:
            return None
        rank, timeout_s = group.rank(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        sockets = _sockets(rank, [name for _, name in told], listener, timeout_s)
        joined = [False] * group.size()
        dist.all_gather_object(joined, len(sockets) == group.size() - 1, group=group)
        if not all(joined):
            close(list(sockets.values()))
            return None
    return HostLink(rank, sockets, timeout_s)


def _listen() -> tuple[socket.socket, str]:
    """A socket for the others to find, and its name, which nobody else can guess; no name where this does not work."""
    listener = socket.socket(socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", socket.SOCK_STREAM))
    name = f"rayrec-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("rayrec-try"))
        listener.bind(f"\0{name}")  # of Linux: it is in no folder, and ends with the process
        listener.listen(4096)
    except (OSError, AttributeError):
        return listener, ""
    return listener, name


def _host() -> str:
    """The running kernel and its network that this process is in: within them such sockets find each other."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return secrets.token_hex(16)  # like no other


def _sockets(rank: int, names: Sequence[str], listener: socket.socket, timeout_s: float) -> dict[int, socket.socket]:
    """To each other rank: this one calls those below it, and is called by those above; fewer where that fails."""
    sockets: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.settimeout(timeout_s)
            link.connect(f"\0{names[other]}")
            link.send(rank.to_bytes(4, "little"))
            sockets[other] = link
        listener.settimeout(timeout_s)
        while len(sockets) < len(names) - 1:
            link, _ = listener.accept()
            link.settimeout(timeout_s)
            sockets[int.from_bytes(link.recv(4), "little")] = link
    except OSError:
        pass  # told to all by the number of sockets
    return sockets
