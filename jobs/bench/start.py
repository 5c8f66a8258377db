"""Times each command as its user waits: to its first useful line and to its end; of a service, to its first answer and
from Ctrl-C to its end.

    python jobs/bench/start.py                  # all commands, on a small data set that it makes
    python jobs/bench/start.py --only serve --repeat 3
    python jobs/bench/start.py --first ratings.csv.gz 'rating>=3.5'   # from a file to an answer of a service

Commands run one after the other, as a user types them; each needs the output of earlier ones.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import arguments, machine
from rich.console import Console
from rich.table import Table

ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as it is typed.

    Args:
        name: its first word or words.
        words: after `rayrec`.
        useful: what the first line looks like that tells the user something.
        goal_s: seconds to that line; None: no goal.
        serves: it runs until Ctrl-C.
        needed: other commands need what it leaves.
    """

    name: str
    words: tuple[str, ...]
    useful: str
    goal_s: float | None = None
    serves: bool = False
    needed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What was measured of one command, in seconds; `noise` are lines after Ctrl-C."""

    useful_s: float
    end_s: float
    processor_s: float
    stop_s: float | None = None
    noise: tuple[str, ...] = ()


def commands() -> tuple[Command, ...]:
    """In the order in which they build on each other."""
    return (
        Command(name="--help", words=("--help",), useful="Usage", goal_s=0.3),
        Command(name="train --help", words=("train", "--help"), useful="Usage", goal_s=0.3),
        Command(
            name="init", words=("init", "clicks.csv", "--label", "clicked"), useful="next: rayrec train", needed=True
        ),
        Command(name="config", words=("config", "clicks.yaml"), useful="name: clicks"),
        Command(name="data check", words=("data", "check", "clicks.yaml"), useful="rows"),
        Command(name="plan", words=("plan", "clicks.yaml", "--world", "2"), useful="shard"),
        Command(name="train", words=("train", "clicks.yaml"), useful="run clicks", needed=True),
        Command(name="evaluate", words=("evaluate", "runs/clicks"), useful="AUC"),
        Command(name="report", words=("report", "runs/clicks"), useful="report.html"),
        Command(name="runs list", words=("runs", "list"), useful="clicks"),
        Command(
            name="export", words=("export", "runs/clicks", "exports/clicks"), useful="parity", goal_s=8.0, needed=True
        ),
        Command(name="predict", words=("predict", "exports/clicks", "rows", "predictions"), useful="rows"),
        Command(
            name="serve",
            words=("serve", "exports/clicks", "--port", "0"),
            useful="serving",
            goal_s=10.0,
            serves=True,
        ),
        Command(
            name="serve --direct",
            words=("serve", "exports/clicks", "--direct", "--port", "0"),
            useful="serving",
            goal_s=10.0,
            serves=True,
        ),
    )


def write_rows(folder: Path) -> None:
    """A CSV file to begin with, and the same rows as Parquet to predict for."""
    import pyarrow.csv
    import pyarrow.parquet

    drawn = random.Random(7)
    lines = ["user,item,age,clicked"]
    for _ in range(ROWS):
        user, item = drawn.randrange(500), drawn.randrange(200)
        lines.append(f"u{user},i{item},{18 + drawn.randrange(60)},{int(drawn.random() < (user + item) % 10 / 10)}")
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "rows").mkdir()
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(folder / "clicks.csv"), folder / "rows" / "part.parquet")


def measure(command: Command, folder: Path) -> Waited:
    """Runs a command in a folder.

    Raises:
        RuntimeError: it failed, or its useful line did not come; the text holds what it printed.
    """
    before, begin = _processor_s(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "rayrec.cli", *command.words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "120", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines: list[tuple[float, str]] = []
    useful_at, stop_at = None, None
    for line in process.stdout:
        lines.append((time.perf_counter(), line.rstrip()))
        if useful_at is None and re.search(command.useful, line):
            useful_at = lines[-1][0]
            if command.serves:
                stop_at = _stop_later(process)
    status, end = process.wait(), time.perf_counter()
    text = "\n".join(line for _, line in lines)
    if useful_at is None or status not in ((0, 130) if command.serves else (0,)):
        raise RuntimeError(f"rayrec {' '.join(command.words)} ended with {status}:\n{text}")
    stopped = stop_at[0] if stop_at else None
    return Waited(
        useful_s=useful_at - begin,
        end_s=end - begin,
        processor_s=_processor_s() - before,
        stop_s=end - stopped if stopped else None,
        noise=tuple(line for at, line in lines if stopped and at > stopped and line),
    )


def _stop_later(process: subprocess.Popen[str]) -> list[float]:
    """Presses Ctrl-C after a second; the list gets the time of it."""
    at: list[float] = []

    def stop() -> None:
        at.append(time.perf_counter())
        process.send_signal(signal.SIGINT)

    threading.Timer(1.0, stop).start()
    return at


def _processor_s() -> float:
    """Of processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1]) % 20_000 + 20_000


def median(found: Sequence[Waited]) -> Waited:
    """By the seconds to the useful line."""
    return sorted(found, key=lambda one: one.useful_s)[len(found) // 2]


def run(only: Sequence[str], repeat: int) -> Iterator[tuple[Command, Waited]]:
    """Measures the commands named, running those that they need."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder)
        for command in commands():
            asked = not only or command.name.split(" -")[0] in only
            if not asked and not command.needed:
                continue
            found = [measure(_numbered(command, number), folder) for number in range(repeat if asked else 1)]
            if asked:
                yield command, median(found)


def _numbered(command: Command, number: int) -> Command:
    """For the same command again, names of their own for what it writes, and a port."""
    if command.serves:  # Linux holds the last one's port for a minute
        return replace(command, words=(*command.words[:-1], str(_free_port())))
    if not number or command.name not in ("init", "train", "export", "predict"):
        return command
    last = {"init": ("--name", f"clicks{number}"), "train": ("--set", f"name=clicks{number}")}
    words = command.words + last.get(command.name, ())
    if command.name in ("export", "predict"):
        words = (*command.words[:-1], f"{command.words[-1]}{number}")
    useful = {"init": "next: rayrec train", "train": f"run clicks{number}"}.get(command.name, command.useful)
    return replace(command, words=words, useful=useful)


def first_model(file: Path, label: str) -> Iterator[tuple[str, float, str]]:
    """Takes a file to an answer of a service by nothing but the commands that the command before prints.

    Gives:
        Each command as it is typed, its seconds (of a service, to its address), and the last line that it printed.

    Raises:
        RuntimeError: a command failed, or printed no next one.
    """
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(file, name)
        command = shlex.join(["rayrec", "init", file.name, "--label", label])
        while not command.startswith("rayrec serve "):
            begin = time.perf_counter()
            done = subprocess.run(_words(command), cwd=name, capture_output=True, text=True)
            lines = done.stdout.strip().splitlines() or [""]
            if done.returncode or not lines[-1].startswith("next: "):
                raise RuntimeError(
                    f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
                )
            yield command, time.perf_counter() - begin, lines[-1]
            look = next((line for line in lines if line.startswith("look: ")), None)
            command = (look or lines[-1]).partition(": ")[2]
        yield from _asked(f"{command} --port {_free_port()}", name)


def _words(command: str) -> list[str]:
    return [sys.executable, "-m", "rayrec.cli", *shlex.split(command)[1:]]


def _asked(command: str, folder: str) -> Iterator[tuple[str, float, str]]:
    """Starts the service, asks it as it says, and stops it."""
    begin = time.perf_counter()
    with subprocess.Popen(_words(command), cwd=folder, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            line = next((line for line in served.stdout if line.startswith("next: ")), "")
            yield command, time.perf_counter() - begin, line.strip()
            begin, ask = time.perf_counter(), line.partition(": ")[2].strip()
            answer = subprocess.run(ask, shell=True, cwd=folder, capture_output=True, text=True)
            if answer.returncode or not answer.stdout:
                raise RuntimeError(f"{ask!r} after {line!r} ended with {answer.returncode}: {answer.stderr[-2000:]}")
            yield ask, time.perf_counter() - begin, answer.stdout
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(60)


def show_first_model(file: Path, label: str, as_json: bool) -> None:
    """A line for each command; the last one is the request to the service."""
    total = 0.0
    for command, seconds, said in first_model(file, label):
        total += seconds
        if as_json:
            print(json.dumps({"command": command, "seconds": seconds, "said": said}), flush=True)
        else:
            print(f"{seconds:6.1f} s  {command[:100]}", flush=True)
    if not as_json:
        print(f"{total:6.1f} s  in all, from {file.name} to an answer")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of commands, e.g. export serve")
    parser.add_argument("--repeat", type=int, default=1, help="times; the median is shown")
    parser.add_argument("--first", nargs=2, metavar=("FILE", "LABEL"), help="from this file to an answer instead")
    args = parser.parse_args()
    if args.first:
        show_first_model(Path(args.first[0]), args.first[1], args.json)
        return
    table = Table(title=f"seconds that a command waits · {machine()}")
    for column in ("command", "first useful line", "goal", "end", "processor", "stop", "lines after Ctrl-C"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for command, waited in run(args.only, args.repeat):
        if args.json:
            print(json.dumps({"command": command.name, **{name: getattr(waited, name) for name in waited.__slots__}}))
            continue
        table.add_row(
            command.name,
            f"{waited.useful_s:.2f}",
            "" if command.goal_s is None else f"{command.goal_s:g}",
            f"{waited.end_s:.2f}",
            f"{waited.processor_s:.2f}",
            "" if waited.stop_s is None else f"{waited.stop_s:.2f}",
            "" if waited.stop_s is None else str(len(waited.noise)),
        )
        for line in waited.noise:
            print(f"{command.name}, after Ctrl-C: {line}", file=sys.stderr)
    if not args.json:
        Console().print(table)


if __name__ == "__main__":
    main()
