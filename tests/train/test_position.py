"""Where a run is, as its checkpoints keep it."""

from __future__ import annotations

import json

from rayrec.data import Cursor
from rayrec.train.worker.guards import Best
from rayrec.train.worker.position import START, Position

HERE = Position(
    step=7,
    samples=448,
    skipped=3,
    seconds=1.5,
    wait_s=0.25,
    cursor=Cursor.start(2),
    best=Best(value=0.7, step=5, stale=1),
    halvings=2,
)


def test_a_checkpoint_keeps_all_of_it() -> None:
    assert Position.from_dict(json.loads(json.dumps(HERE.to_dict()))) == HERE
    assert Position.from_dict(START.to_dict()) == START
    assert (START.step, START.samples, START.skipped, START.seconds, START.wait_s, START.epoch) == (0,) * 6


def test_what_an_older_checkpoint_does_not_have_is_none() -> None:
    older = {name: value for name, value in HERE.to_dict().items() if name not in ("skipped", "best", "halvings")}
    found = Position.from_dict(older)
    assert (found.skipped, found.best, found.halvings) == (0, Best(), 0)
    assert (found.step, found.samples, found.epoch) == (7, 448, 2)


def test_the_next_epoch_begins_with_its_first_row() -> None:
    later = HERE.next_epoch()
    assert later.cursor == Cursor.start(3) and later.epoch == 3
    assert (later.step, later.samples, later.best) == (7, 448, HERE.best)
