"""Reads a run folder into a frozen record for the report. Files may be missing, incomplete or damaged."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.storage.errors import first_line
from rayrec.storage.folder import open_folder
from rayrec.train.run.folder import RunFolder

Line = Mapping[str, Any]
"""One line of metrics.jsonl, or one rank of plan.json's `memory` or `time`."""

MOST_LINES, MOST_EVENTS = 10_000, 2_000  # limits per kind; longer logs are sampled evenly
BRIEF_BYTES = 1 << 14
ENDS = ("failed", "interrupted")  # events that end a run
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The contents of a run folder; a missing file is None or empty.

    `problems` has a line for each unreadable file. In a long run, `train`, `evals` and `events` are evenly sampled and
    always include the last lines; `num_events` counts all events. `last` is the last line of metrics.jsonl: by position
    in the file, as the clocks of driver and workers may differ.
    """

    path: Path
    name: str
    config: Line
    config_text: str | None
    plan: ShardingPlan | None
    memory: tuple[Line, ...]
    times: tuple[Line, ...]
    train: tuple[Line, ...]
    evals: tuple[Line, ...]
    events: tuple[Line, ...]
    last: Line | None
    exports: tuple[Line, ...]
    result: Line | None
    problems: tuple[str, ...]
    importance: tuple[Line, ...] = ()
    num_events: int = 0
    profiles: tuple[str, ...] = ()

    @property
    def lines(self) -> Iterator[Line]:
        """The lines that were read from metrics.jsonl, grouped by kind."""
        yield from self.train
        yield from self.evals
        yield from self.events

    @property
    def first_time(self) -> float | None:
        """Unix seconds of the first record."""
        return min((t for line in self.lines if (t := number(line, "time")) is not None), default=None)

    @property
    def last_time(self) -> float | None:
        """Unix seconds of the last record."""
        return max((t for line in self.lines if (t := number(line, "time")) is not None), default=None)

    @property
    def steps(self) -> int:
        """The highest recorded step."""
        seen = [number(line, "step") or 0 for line in self.lines]
        done = number(self.result or {}, "steps") or 0
        return int(max([*seen, done], default=0))

    @property
    def table_bits(self) -> dict[str, int]:
        """Bits per weight of the tables in the config, by name."""
        tables = self.config.get("tables")
        sections = [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
        return {str(t.get("name")): 16 if t.get("data_type") in ("fp16", "bf16") else 32 for t in sections}

    @property
    def status(self) -> str:
        """`finished`, `failed`, `interrupted`, or `unfinished` (running, or killed before it could record its end)."""
        if self.result is not None:
            return "finished"
        end = str((self.last or {}).get("event"))
        return end if end in ENDS else "unfinished"


def number(line: Line, key: str) -> float | None:
    """The value of `key` if it is a finite number, else None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def points_of(lines: Sequence[Line], key: str | None) -> list[tuple[float, float]]:
    """(step, value) of the lines with finite numbers for both."""
    pairs = ((number(line, "step"), number(line, key)) for line in lines if key is not None)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def task_names(lines: Sequence[Line]) -> list[str]:
    """Label names from the last line with metrics per label; empty for a run with one label."""
    tasks: Line = next((line["tasks"] for line in reversed(lines) if isinstance(line.get("tasks"), dict)), {})
    return [str(name) for name in tasks]


def of_task(lines: Sequence[Line], name: str) -> list[Line]:
    """The lines with the metrics of label `name` instead of their top-level metrics."""
    pairs = [(line, line["tasks"]) for line in lines if isinstance(line.get("tasks"), dict)]
    metrics = {key for _, tasks in pairs for figures in tasks.values() if isinstance(figures, dict) for key in figures}
    return [
        {**{key: value for key, value in line.items() if key not in metrics}, **tasks[name]}
        for line, tasks in pairs
        if isinstance(tasks.get(name), dict)
    ]


def history(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """(valid lines, undone lines); a recovery from an earlier checkpoint undoes lines.

    A step that does not increase marks a recovery; it undoes the earlier lines at or after that step.
    """
    standing: list[Line] = []
    undone: list[Line] = []
    for line in lines:
        step = number(line, "step")
        if step is None:
            continue
        while standing and (number(standing[-1], "step") or 0) >= step:
            undone.append(standing.pop())
        standing.append(line)
    return standing, sorted(undone, key=lambda line: number(line, "time") or 0)


def read_run(run_dir: Path, brief: bool = False) -> RunRecord:
    """Read a run folder.

    Args:
        brief: read only the beginning and the end of the metrics, and skip the plan of a finished run.

    Raises:
        ValueError: not a folder, or without any file of a run.
    """
    if not run_dir.is_dir():
        raise ValueError(f"run folder {run_dir}: not a folder; give <storage path>/<name> of a run")
    problems: list[str] = []
    config_text = _read(run_dir / "config.yaml", problems)
    result_text = _read(run_dir / "result.json", problems)
    plan_text = None if brief and result_text else _read(run_dir / "plan.json", problems)
    metrics = run_dir / "metrics.jsonl"
    if config_text is plan_text is result_text is None and not metrics.exists():
        raise ValueError(
            f"run folder {run_dir}: holds no config.yaml, plan.json, metrics.jsonl or result.json; "
            "give <storage path>/<name> of a run"
        )
    kinds = {"train": Thinned[Line](MOST_LINES), "eval": Thinned[Line](MOST_LINES)}
    events, checkpoints = Thinned[Line](MOST_EVENTS, MOST_EVENTS), Thinned[Line](MOST_EVENTS)
    last: Line | None = None
    for line in _json_lines(_ends(metrics) if brief else _rows(metrics, problems), "metrics.jsonl", problems):
        line.pop("tables", None)
        last = line
        if line.get("kind") == "event":
            (checkpoints if line.get("event") == "checkpoint" else events).add(line)
        elif line.get("kind") in kinds:
            kinds[line["kind"]].add(line)
    config = _yaml(config_text, problems)
    plan_data = _json(plan_text, "plan.json", problems) or {}
    importance = _json(_read(run_dir / "importance.json", problems), "importance.json", problems) or {}
    return RunRecord(
        path=run_dir,
        name=str(config.get("name") or run_dir.resolve().name),
        config=config,
        config_text=config_text,
        plan=_plan(plan_data, problems),
        memory=_lines(plan_data.get("memory")),
        times=_lines(plan_data.get("time")),
        train=tuple(kinds["train"]),
        evals=tuple(kinds["eval"]),
        events=tuple(sorted([*checkpoints, *events], key=lambda line: number(line, "time") or 0)),
        last=last,
        num_events=checkpoints.seen + events.seen,
        exports=tuple(_json_lines(_rows(run_dir / "exports.jsonl", problems), "exports.jsonl", problems)),
        result=_json(result_text, "result.json", problems),
        problems=tuple(problems),
        importance=_lines(importance.get("parts")),
        profiles=() if brief else _profiles(run_dir, problems),
    )


def _profiles(run_dir: Path, problems: list[str]) -> tuple[str, ...]:
    """Names of the profiler traces, which workers write directly to the storage."""
    try:
        names = open_folder(RunFolder(run_dir).remote or run_dir).sub("profile").names()
    except (OSError, ValueError) as error:
        problems.append(f"profile/ cannot be read: {first_line(error)}")
        return ()
    return tuple(name for name in names if name.endswith(".json.gz"))


def _read(path: Path, problems: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return None


def _rows(path: Path, problems: list[str]) -> Iterator[str]:
    """The lines of a text file; read errors are added to `problems`."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")


def _ends(path: Path) -> Iterator[str]:
    """The complete lines at the beginning and the end of a file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.readline()
            file.seek(max(len(head), size - BRIEF_BYTES))
            tail = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    yield head.decode(errors="replace")
    yield from tail[1:] if size - BRIEF_BYTES > len(head) else tail


def _json(text: str | None, name: str, problems: list[str]) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        problems.append(f"{name}: not JSON ({error})")
        return None
    if not isinstance(data, dict):
        problems.append(f"{name}: not a JSON object")
        return None
    return data


def _json_lines(rows: Iterable[str], name: str, problems: list[str]) -> Iterator[dict[str, Any]]:
    seen = bad = 0
    for seen, row in enumerate(rows, start=1):  # noqa: B007 - the number of rows
        try:
            line = json.loads(row)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            yield line
        elif row.strip():
            bad += 1
    if bad:
        problems.append(f"{name}: {bad} of {seen} lines could not be read and were left out")


def _plan(data: dict[str, Any], problems: list[str]) -> ShardingPlan | None:
    try:
        return ShardingPlan.from_dict(data) if data else None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        problems.append(f"plan.json: {error}")
        return None


def _lines(ranks: object) -> tuple[Line, ...]:
    return tuple(rank for rank in ranks if isinstance(rank, dict)) if isinstance(ranks, list) else ()


def _yaml(text: str | None, problems: list[str]) -> dict[str, Any]:
    try:
        config = yaml.load(text or "", Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # ten times as fast
    except yaml.YAMLError as error:
        problems.append(f"config.yaml: not YAML ({error})")
        config = None
    return config if isinstance(config, dict) else {}


class Thinned(Generic[T]):
    """Samples a stream: up to `most` evenly spaced items including the first, and the last `tail` items."""

    def __init__(self, most: int, tail: int = 1) -> None:
        self._most, self._stride, self.seen = most, 1, 0
        self._kept: list[tuple[int, T]] = []
        self._last: deque[tuple[int, T]] = deque(maxlen=tail)

    def add(self, item: T) -> None:
        if self.seen % self._stride == 0:
            self._kept.append((self.seen, item))
            if len(self._kept) > self._most:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._last.append((self.seen, item))
        self.seen += 1

    def __iter__(self) -> Iterator[T]:
        tail = self._last[0][0] if self._last else 0
        yield from (item for index, item in self._kept if index < tail)
        yield from (item for _, item in self._last)
