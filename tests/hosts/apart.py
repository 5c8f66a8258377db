"""Commands in network and process namespaces of their own: default ports are free, all they start ends with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

APART = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child")


def skip_without_namespaces() -> None:
    """Skip the test where the kernel, or a missing right, forbids namespaces."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs `unshare` (util-linux) and `ip` (iproute2)")
    tried = subprocess.run([*APART, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"network namespaces are not allowed here: {tried.stderr.strip()}")


def run_apart(
    script: str, environment: Mapping[str, str], folder: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a shell script in namespaces of its own, with loopback up; whatever it leaves running ends with it."""
    command = [*APART, "bash", "-euo", "pipefail", "-c", f"ip link set lo up\n{script}"]
    return subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=timeout_s)


@contextmanager
def fresh_home() -> Iterator[dict[str, str]]:
    """The environment of a user in whose home nothing ran before; short paths, as Ray's sockets need them."""
    home = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYREC_"))}
    environment |= {"HOME": str(home), "RAY_TMPDIR": str(home), "TMPDIR": str(home), "PYTHONWARNINGS": "ignore"}
    try:
        yield environment
    finally:
        shutil.rmtree(home, ignore_errors=True)
