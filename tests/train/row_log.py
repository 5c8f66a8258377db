"""A model that writes down the rows it trains on, and the check that a run trained on each once an epoch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.models import DLRM, Batch
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from rayrec.train.errors import is_lost_peer
from tests.train.small import fit_job, raw_config


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
                file.write(json.dumps(self.line(batch.sparse["row"].values().tolist())) + "\n")
        return self.inner(self.seen(batch))

    def line(self, rows: list[int]) -> Any:
        """What is written down of a step."""
        return rows

    def seen(self, batch: Batch) -> Batch:
        """What the model gets of a batch."""
        return batch


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
    """The same over many worker groups: each writes files of its own, `<log>.<time>.<rank>.jsonl`.

    A line is a step's number and its row ids. How many steps went before is part of the model's state, so a group that
    goes on from a checkpoint says itself what it restored. The model does not see the row's number: it would learn it
    by heart.

    Args:
        seconds: how long a training step takes at least, until there is a file `<log>.fast`.
    """

    done: torch.Tensor

    def __init__(self, log: str, seconds: float = 0.0, **arguments: Any) -> None:
        began = [f"{time.time():.6f}"]
        if dist.is_initialized():
            dist.broadcast_object_list(began)  # ranks of a group are known by the same time
        super().__init__(f"{log}.{began[0]}", {}, **arguments)
        self.seconds, self.fast = seconds, Path(f"{log}.fast")
        self.register_buffer("done", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Batch) -> Any:
        if self.training and self.seconds and not self.fast.exists():
            time.sleep(self.seconds)
        return super().forward(batch)

    def line(self, rows: list[int]) -> Any:
        step = int(self.done)
        self.done += 1
        return [step, rows]

    def seen(self, batch: Batch) -> Batch:
        row = batch.sparse["row"]
        alike = JaggedTensor(torch.zeros_like(row.values()), lengths=row.lengths())
        return replace(batch, sparse=KeyedJaggedTensor.from_jt_dict({**batch.sparse.to_dict(), "row": alike}))


def consumed(log: Path) -> list[list[int]]:
    """The rows of every step that counts, of all ranks together: what a worker group did after the state from which a
    later one went on was undone.

    Args:
        log: what `Attempted` was given.

    Raises:
        AssertionError: a rank left out or repeated a step, or a group went on from a step that nobody had got to.
    """
    groups: dict[float, list[dict[int, list[int]]]] = {}
    for path in log.parent.glob(f"{log.name}.*.jsonl"):
        began = path.name.removeprefix(f"{log.name}.").rsplit(".", 2)[0]
        # A process that was killed may leave half a line.
        steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("]]")]
        first = steps[0][0] if steps else 0
        assert [step for step, _ in steps] == list(range(first, first + len(steps))), f"{path.name}: steps out of order"
        groups.setdefault(float(began), []).append(dict(steps))
    kept: list[list[int]] = []
    for began in sorted(groups):
        ranks = [rank for rank in groups[began] if rank]
        if not ranks:
            continue
        first = min(map(min, ranks))
        assert all(first in rank for rank in ranks), f"ranks of a group began at steps {[min(rank) for rank in ranks]}"
        assert first <= len(kept), f"a group went on from step {first}, but only {len(kept)} had been done"
        last = max(map(max, ranks))
        kept[first:] = [[row for rank in ranks for row in rank.get(step, [])] for step in range(first, last + 1)]
    return kept


def train_noted(job: Any, group: dist.ProcessGroup, log: str, dies: dict[int, int]) -> str:
    """Train on one rank with `Noted`; says whether it got to the end, or heard of the planned death of another rank."""
    try:
        fit_job(replace(job, factory=partial(Noted, log, dies)), group)
    except Exception as error:
        if dies and is_lost_peer(error):
            return "lost a rank"
        raise
    return "trained"
