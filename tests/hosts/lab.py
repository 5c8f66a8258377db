"""Hosts in a laboratory: network namespaces with addresses of their own, joined by a bridge in one more namespace.

Nothing of it touches the machine's own network: no route leads out. A host has processes, mounts and a name to itself,
too, so that it can be ended whole, and finds its neighbours by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# Enters a host's name, file of names and folder for temporary files, then becomes the command.
ENTER = 'hostname "$0" && mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/$0" "$1/tmp" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a laboratory.

    Args:
        name: its host name, and the end of its namespace's.
        address: its address, on `eth0`.
        space: its network namespace.
        folder: the laboratory's: `hosts` there is its `/etc/hosts`, `tmp` each host's own.
    """

    name: str
    address: str
    space: str
    folder: Path

    def command(self, *words: str) -> list[str]:
        """A command that runs `words` on this host; ending it ends all that they started."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        inside = ["bash", "-c", ENTER, self.name, str(self.folder), *words]
        return ["ip", "netns", "exec", self.space, *apart, *inside]

    def run(self, *words: str, timeout_s: float = 60, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **more,  # type: ignore[call-overload]
        )

    def bytes_sent(self) -> int:
        """What its interface has sent since it was made."""
        read = ["ip", "netns", "exec", self.space, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
        return int(subprocess.run(read, capture_output=True, text=True, check=True).stdout)

    def has_default_route(self) -> None:
        """Give the host a default route, by which programs find its address. It leads to the bridge, not further."""
        _ip("-n", self.space, "route", "add", "default", "dev", "eth0")

    def link(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        _ip("-n", self.space, "link", "set", "eth0", state)

    def shape(self, mbit: int) -> None:
        """Send at no more than so many megabits a second."""
        limit = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms")
        command = ("tc", "-n", self.space, "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)
        subprocess.run(command, check=True)


@dataclass
class Lab:
    """Hosts that reach each other, and the processes that were started on them."""

    hosts: list[Host]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, host: Host, words: Sequence[str], environment: Mapping[str, str], log: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output goes to a file of the laboratory's folder."""
        with open(self.folder / log, "wb") as output:
            started = subprocess.Popen(
                host.command(*words), env=dict(environment), stdout=output, stderr=subprocess.STDOUT, cwd=self.folder
            )
        self.processes.append(started)
        return started

    def logs(self, most: int = 3000) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-most:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def laboratory(count: int) -> Iterator[Lab]:
    """`count` hosts named h0, h1, …; skips the test where the kernel forbids them. Everything goes at the end."""
    _skip_where_forbidden()
    tag = f"rr{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))  # Ray's socket paths must be short
    hosts = [Host(f"h{n}", f"10.231.77.{n + 1}", f"{tag}-h{n}", folder) for n in range(count)]
    for name in ("tmp", *(host.name for host in hosts)):
        (folder / name).mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
    lab = Lab(hosts, folder)
    try:
        _connect(hosts, f"{tag}-switch")
        yield lab
    finally:
        for process in lab.processes:
            process.kill()
        for process in lab.processes:
            process.wait(30)
        for space in [*(host.space for host in hosts), f"{tag}-switch"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _connect(hosts: Sequence[Host], switch: str) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        _ip("netns", "add", host.space)
        _ip("link", "add", "eth0", "netns", host.space, "type", "veth", "peer", "name", host.name, "netns", switch)
        _ip("-n", switch, "link", "set", host.name, "master", "bridge", "up")
        _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", host.space, "link", "set", device, "up")


def _skip_where_forbidden() -> None:
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"hosts are made of namespaces, which needs `{tool}` (iproute2, util-linux)")
    space = f"rr{os.getpid()}-try"
    try:
        _ip("netns", "add", space)
        _ip("link", "add", "one", "netns", space, "type", "veth", "peer", "name", "two", "netns", space)
        subprocess.run(
            ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--mount-proc", "--uts", "true"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hosts are made of namespaces, which this kernel or user may not make: {error.stderr.strip()}")
    finally:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
