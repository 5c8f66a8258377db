"""Every row once at every strength of shuffling, with processes that are killed and numbers of ranks that change.

Ranks are processes of their own, which note what each step read; all of them get SIGKILL at once. What goes on begins
at the last step that all had noted, as from a checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.ranks  # noqa: F401  (says what the server below has imported)
from rayrec.data import Cursor
from tests.data.killed_rank import train
from tests.data.sets import table

SERVER = multiprocessing.get_context("forkserver")
STRENGTHS: list[dict[str, Any]] = [
    {"shuffle": False, "in_steps_of": 24},
    {"interleave": 1},
    {"interleave": 2},
    {"interleave": 8},
    {"interleave": 64},
]


def noted(folder: Path, rank: int) -> list[Any]:
    """The steps of a rank so far, None where it ended; a line that was being written is none."""
    path = folder / f"rank{rank}"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def run(folder: Path, cursor: Cursor, world: int, how: dict[str, Any], steps: int | None) -> tuple[Cursor, list[int]]:
    """Ranks until they end, or are killed once all have noted so many steps: where they were, and their rows."""
    for path in folder.glob("rank*"):
        path.unlink()
    ranks: list[BaseProcess] = [
        SERVER.Process(target=train, args=(folder, cursor.to_dict(), rank, world, how, steps)) for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            found = [noted(folder, rank) for rank in range(world)]
            if steps is not None and all(len(one) >= steps or None in one for one in found):
                break
            time.sleep(0.005)
    finally:
        for process in ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
    assert steps is not None or all(process.exitcode == 0 for process in ranks)
    found = [noted(folder, rank) for rank in range(world)]
    if steps is None:
        assert all(one[-1] is None for one in found)
    last = min((len(one) for one in found if None not in one), default=max(map(len, found)))
    kept = [[step for step in one[:last] if step is not None] for one in found]
    cursors = [Cursor.from_dict(one[-1]["cursor"]) if one else None for one in kept]
    starts = [opened for opened in cursors if opened is not None]
    rows = [row for one in kept for step in one for row in step["rows"]]
    return Cursor.merge(starts) if starts else cursor, rows


@pytest.mark.parametrize("drawn", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 10))])
def test_every_row_comes_once_though_ranks_are_killed_and_others_go_on(tmp_path: Path, drawn: int) -> None:
    rng = random.Random(drawn)
    order = STRENGTHS[drawn % len(STRENGTHS)]
    sizes = [rng.randrange(100, 600) for _ in range(rng.randrange(2, 6))]
    bad, left_out = rng.random() < 0.5, rng.random() < 0.5
    labels = [3 if bad and rng.random() < 0.05 else rng.randrange(2) for _ in range(sum(sizes))]
    (tmp_path / "data").mkdir()
    for number, rows in enumerate(sizes):
        first = sum(sizes[:number])
        data = table(rows, first, label=pa.array(labels[first : first + rows]))
        pq.write_table(data, tmp_path / "data" / f"{number}.parquet", row_group_size=rng.choice([20, 100, 1000]))
    limits = {"window_rows": rng.choice([10, 64]), "window_bytes": rng.choice([2000, 1 << 20])}
    filters = [("row", ">=", sizes[0] // 2)] if left_out else []
    how = {"order": order, "limits": limits, "filters": filters}
    cursor, seen = Cursor.start(drawn), []
    for _ in range(2):
        cursor, rows = run(tmp_path, cursor, rng.randrange(1, 4), how, rng.randrange(1, 9))
        seen += rows
    assert len(seen) < sum(sizes) * 0.9, "they were killed in the middle"
    cursor, rows = run(tmp_path, cursor, rng.randrange(1, 4), how, None)
    wanted = [row for row in range(sizes[0] // 2 if left_out else 0, sum(sizes)) if labels[row] != 3]
    assert sorted(seen + rows) == wanted
