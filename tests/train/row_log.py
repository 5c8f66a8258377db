"""A model that writes down the rows it trains on, and the check that a run trained on each once an epoch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rayrec.models import DLRM, Batch
from tests.train.small import raw_config


class Noted(nn.Module):
    """DLRM that appends the row ids of each training step to a file of this rank and launch.

    Args:
        log: the file is `<log>.<rank>.jsonl`, one line a step.
        dies: rank → the step of this launch in which its process kills itself, before it trains.
    """

    def __init__(self, log: str, dies: dict[int, int], **arguments: Any) -> None:
        super().__init__()
        self.inner = DLRM(**arguments)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.path, self.dies_at, self.steps = Path(f"{log}.{rank}.jsonl"), dies.get(rank), 0

    def forward(self, batch: Batch) -> Any:
        if self.training:
            if self.steps == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps += 1
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(batch.sparse["row"].values().tolist()) + "\n")
        return self.inner(batch)


def with_row_ids(folder: Path, rows: int, **changes: Any) -> dict[str, Any]:
    """The small config with the row's number as one more feature."""
    raw = raw_config(folder, **changes)
    raw["schema"]["sparse"].append({"name": "row", "mapping": {"kind": "identity"}})
    raw["tables"].append({"name": "row", "rows": max(1, rows), "dim": 8, "features": ["row"]})
    return raw


def noted(log: Path, rank: int) -> list[list[int]]:
    """The row ids of every step of a rank in one launch."""
    path = Path(f"{log}.{rank}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_every_row_once(steps: Sequence[Sequence[int]], rows: int, epochs: int) -> None:
    """`steps`: the row ids that all ranks together trained on, step by step, over all epochs."""
    at = 0
    for epoch in range(epochs):
        seen: Counter[int] = Counter()
        while seen.total() < rows:
            assert at < len(steps), f"epoch {epoch} lacks {rows - seen.total()} rows"
            seen.update(steps[at])
            at += 1
        assert seen == Counter(range(rows)), f"epoch {epoch}: {(seen - Counter(range(rows))).most_common(5)}"
    assert at == len(steps)


class Attempted(Noted):
    """The same over many worker groups: each process writes a file of its own, `<log>.<time>.<rank>.jsonl`.

    Args:
        seconds: how long a training step takes at least, until there is a file `<log>.fast`.
    """

    def __init__(self, log: str, seconds: float = 0.0, **arguments: Any) -> None:
        super().__init__(f"{log}.{time.time():.6f}", {}, **arguments)
        self.seconds, self.fast = seconds, Path(f"{log}.fast")
        self.path.touch()

    def forward(self, batch: Batch) -> Any:
        if self.training and self.seconds and not self.fast.exists():
            time.sleep(self.seconds)
        return super().forward(batch)


def consumed(log: Path, events: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The rows of every step that counts: what an attempt did after the checkpoint from which the next one went on was
    undone.

    Args:
        log: what `Attempted` was given.
        events: the run's records of worker groups that went on from a checkpoint.
    """
    files = sorted((float(time_s), int(rank), path) for path, time_s, rank in _attempt_files(log))
    groups: list[tuple[float, list[list[list[int]]]]] = [(began, []) for began, rank, _ in files if rank == 0]
    for began, _, path in files:
        steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")]
        # Ranks of a group begin at about the same time, groups seconds apart.
        min(groups, key=lambda group: abs(group[0] - began))[1].append(steps)
    return _kept(groups, events)


def _attempt_files(log: Path) -> Iterator[tuple[Path, str, str]]:
    for path in log.parent.glob(f"{log.name}.*.jsonl"):
        time_s, rank = path.name.removeprefix(f"{log.name}.").removesuffix(".jsonl").rsplit(".", 1)
        yield path, time_s, rank


def _kept(
    groups: Sequence[tuple[float, list[list[list[int]]]]], events: Sequence[Mapping[str, Any]]
) -> list[list[int]]:
    kept: list[list[int]] = []
    for i, (began, ranks) in enumerate(groups):
        until = groups[i + 1][0] if i + 1 < len(groups) else float("inf")
        starts = [int(event["step"]) for event in events if began <= event["time"] < until]
        if not any(ranks):
            continue
        kept = kept[: starts[-1] if starts else 0]
        for step in range(max(map(len, ranks))):
            kept.append([row for rows in ranks for row in (rows[step] if step < len(rows) else [])])
    return kept
