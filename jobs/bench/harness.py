"""What the benchmarks share: arguments, the line about the machine, timing in turns, paired ratios, JSON.

Run a benchmark as a program from the root of the repository: `python jobs/bench/NAME.py --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # for jobs.experiments, data and tests


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the module's docstring and has `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    return parser


def require(condition: object, message: str) -> None:
    """Exits with one line if something that the benchmark needs is missing."""
    if not condition:
        sys.exit(f"error: {message}")


def machine() -> str:
    """The date, the processor, the number of cores, and torch's version."""
    return f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"


def print_json(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Prints the results on the last line if `--json` asks for it."""
    if args.json:
        print(json.dumps(results))


def descendants(process: int) -> dict[int, list[str]]:
    """The processes that a process has started, directly or not, by id: the fields of /proc/ID/stat after the name."""
    found: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            found[int(folder.name)] = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    below, size = {process}, 0
    while size < len(below):
        size = len(below)
        below |= {number for number, fields in found.items() if int(fields[1]) in below}
    return {number: found[number] for number in below - {process} if number in found}


def milliseconds(act: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[str, list[float]]:
    """What each side returns in each round. Sides alternate, so that other load on the machine affects all of them."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        for name, side in sides.items():
            value = side()
            if number >= warmup:
                values[name].append(value)
    return values


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(series) for name, series in values.items()}


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios within the rounds, which varies less than the ratio of medians."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
