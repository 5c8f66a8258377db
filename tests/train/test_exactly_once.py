"""Every row id that a rank trains on is written down by the model itself, in real runs that are killed and go on.

The rows of a run are those of the steps that its checkpoints commit: what came after the last checkpoint before a kill
is trained again, and does not count.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore
from rayrec.data import Manifest
from tests.ranks import RankError, on_ranks
from tests.train.row_log import Noted, assert_every_row_once, noted, train_noted, with_row_ids
from tests.train.small import fit_job, make_job, table, write


def committed(folder: Path) -> int:
    """The step of the last committed checkpoint of the run below `folder`."""
    latest = CheckpointStore(folder / "runs" / "small" / "checkpoints").latest()
    return 0 if latest is None else latest.step


@dataclass(frozen=True)
class Drawn:
    """A data set, how it is read, and launches: (ranks, which of them die in which step of that launch)."""

    file_rows: tuple[int, ...]
    row_group: int
    window_rows: int
    batch_size: int
    checkpoint_every: int
    launches: tuple[tuple[int, dict[int, int]], ...]

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        files = (*(draw.choice([0, 1, 7, 40, 90]) for _ in range(draw.randint(1, 4))), draw.randint(30, 80))
        batch_size = draw.randint(5, 24)
        steps = 2 * -(-sum(files) // batch_size)
        launches: list[tuple[int, dict[int, int]]] = []
        for _ in range(2):
            world = draw.randint(1, 3)
            step = draw.randrange(steps)
            whole = draw.random() < 0.5  # every process is killed, or one of them
            launches.append((world, dict.fromkeys(range(world) if whole else [draw.randrange(world)], step)))
        return cls(
            files, draw.randint(5, 60), draw.randint(10, 120), batch_size, draw.randint(1, 4),
            (*launches, (draw.randint(1, 3), {})),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return sum(self.file_rows)


def launch(group: dist.ProcessGroup, raw: dict[str, Any], window_rows: int, log: str, dies: dict[int, int]) -> str:
    """Train; says whether this rank got to the end, or heard of another rank's."""
    job = make_job(raw)
    manifest = Manifest.read(raw["data"]["train"], job.config.data_schema, window_rows=window_rows)
    return train_noted(replace(job, train=manifest), group, log, dies)


def launch_on_ranks(world: int, *arguments: Any, how: Any = launch) -> None:
    """`launch` on so many ranks: all train to the end, or nothing else goes wrong than the planned deaths."""
    dies = arguments[-1]
    try:
        answers = on_ranks(world, how, *arguments)
    except RankError as error:
        told = str(error).splitlines()
        assert told and set(told) <= {f"rank {rank}: the process died" for rank in dies}, error
    else:
        assert answers == ["trained"] * world


@pytest.mark.parametrize("seed", range(3))
def test_every_row_once_an_epoch_whatever_is_killed_and_however_many_ranks_go_on(tmp_path: Path, seed: int) -> None:
    drawn = Drawn.of(seed)
    write(tmp_path / "eval", 20, files=1, seed=1)
    whole, first = table(drawn.rows), 0
    (tmp_path / "train").mkdir()
    for number, rows in enumerate(drawn.file_rows):
        part = whole.slice(first, rows)
        pq.write_table(part, tmp_path / "train" / f"part-{number}.parquet", row_group_size=drawn.row_group)
        first += rows
    changes: dict[str, Any] = {
        "trainer__batch_size": drawn.batch_size,
        "trainer__checkpoint_every": drawn.checkpoint_every,
    }
    changes["storage__background"] = seed == 0  # then the last save may be lost with a rank
    raw = with_row_ids(tmp_path, drawn.rows, **changes)
    steps: list[list[int]] = []
    again: list[list[list[int]]] = []  # what each rank did in the last launch after its last checkpoint
    for number, (world, dies) in enumerate(drawn.launches):
        before, log = committed(tmp_path), tmp_path / f"launch-{number}"
        launch_on_ranks(world, raw, drawn.window_rows, str(log), dies)
        by_rank = [noted(log, rank) for rank in range(world)]
        done = committed(tmp_path) - before
        steps += [[row for lines in by_rank for row in lines[step]] for step in range(done)]
        if len(again) == world:
            for lost, redone in zip(again, by_rank, strict=True):
                shared = min(len(lost), len(redone))
                assert lost[:shared] == redone[:shared], "as many ranks go on with the very same batches"
        again = [lines[done:] for lines in by_rank]
    assert_every_row_once(steps, drawn.rows, epochs=2)


def test_the_same_seed_gives_every_rank_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    write(tmp_path / "train", 150, files=3)
    write(tmp_path / "eval", 20, files=1, seed=1)
    orders = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        raw = with_row_ids(tmp_path, 150, name=name, trainer__batch_size=20, trainer__seed=seed)
        log = tmp_path / name
        launch_on_ranks(2, raw, 40, str(log), {})
        orders.append([noted(log, rank) for rank in range(2)])
        both = zip(*orders[-1], strict=True)
        assert_every_row_once([mine + other for mine, other in both], 150, epochs=2)
    assert orders[0] == orders[1] != orders[2]


def note_rows(group: dist.ProcessGroup, raw: dict[str, Any], log: str) -> None:
    fit_job(replace(make_job(raw), factory=partial(Noted, log, {})), group)


@pytest.mark.parametrize("shuffle", ["none", {}])
def test_rows_in_their_order_are_dealt_step_by_step(tmp_path: Path, shuffle: Any) -> None:
    """Then step k of all ranks together has the k-th rows of the data; shuffled, it has not, but all are read once."""
    write(tmp_path / "train", 601, files=3)
    write(tmp_path / "eval", 20, files=1, seed=1)
    raw = with_row_ids(tmp_path, 601, trainer__epochs=1, data__shuffle=shuffle)
    on_ranks(2, note_rows, raw, str(tmp_path / "log"))
    steps = zip(*(noted(tmp_path / "log", rank) for rank in range(2)), strict=True)
    together = [sorted(first + second) for first, second in steps]
    in_order = [list(range(start, min(start + 64, 601))) for start in range(0, 601, 64)]
    assert (together == in_order) == (shuffle == "none")
    assert sorted(row for step in together for row in step) == list(range(601))
