"""For `bench_data.py`, not to be run: processor time of the processes that take part in reading."""

from __future__ import annotations

import os
from pathlib import Path


def processor_s() -> dict[str, float]:
    """Seconds that this process and the ones below it have run so far."""
    stats = {int(path.name): path for path in Path("/proc").iterdir() if path.name.isdigit()}
    parents, seconds, names = {}, {}, {}
    for pid, path in stats.items():
        try:
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        numbers = rest.split()
        parents[pid], names[pid] = int(numbers[1]), name
        seconds[pid] = (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    below, me = {os.getpid()}, os.getpid()
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    found: dict[str, float] = {}
    for pid in below & seconds.keys():
        task = names[pid].startswith(("ray::IDLE", "ray::Read"))
        kind = "consumer" if pid == me else "read tasks" if task else "Ray's other processes"
        found[kind] = found.get(kind, 0.0) + seconds[pid]
    return found
