"""The check of consumed rows: it counts what a run keeps, and finds a row that is left out or trained on twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayrec.train import Trainer, parse_config
from tests.train.row_log import assert_every_row_once, consumed, with_row_ids
from tests.train.small import write_all

Lines = list[tuple[int, list[int]]]

# One rank does steps 0 to 2; two go on from step 2, one of them dies sooner; one goes on from step 3 to the end.
RUN: dict[str, Lines] = {
    "1.0.0": [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])],
    "2.5.0": [(2, [4]), (3, [6]), (4, [8])],
    "2.5.1": [(2, [5]), (3, [7])],
    "3.0.0": [],
    "4.0.0": [(3, [6, 7]), (4, [9, 8])],
}


def written(folder: Path, run: dict[str, Lines]) -> Path:
    for name, lines in run.items():
        (folder / f"rows.{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder / "rows"


def test_what_was_done_after_the_restored_state_is_undone(tmp_path: Path) -> None:
    log = written(tmp_path, RUN)
    with open(tmp_path / "rows.2.5.1.jsonl", "a") as file:
        file.write("[4, [9")  # it died in the middle of a line
    steps = consumed(log)
    assert [sorted(rows) for rows in steps] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert_every_row_once(steps, 10, 1)


@pytest.mark.parametrize(
    ("name", "at", "rows"),
    [("2.5.1", 0, []), ("2.5.1", 0, [4]), ("1.0.0", 1, [2]), ("1.0.0", 1, [2, 3, 3]), ("4.0.0", 0, [6, 6])],
)
def test_a_row_that_is_left_out_or_doubled_is_found(tmp_path: Path, name: str, at: int, rows: list[int]) -> None:
    lines = list(RUN[name])
    lines[at] = (lines[at][0], rows)
    with pytest.raises(AssertionError, match="epoch 0"):
        assert_every_row_once(consumed(written(tmp_path, {**RUN, name: lines})), 10, 1)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"1.0.0": [(0, [0, 1]), (2, [4, 5])]}, "out of order"),
        ({"1.0.0": [(0, [0, 1]), (0, [0, 1]), (1, [2, 3])]}, "out of order"),
        ({"2.5.1": [(3, [7])]}, "ranks of a group"),
        ({"4.0.0": [(6, [9])]}, "went on from step 6, but only 5"),
    ],
)
def test_steps_that_nobody_did_or_that_were_done_twice_are_found(
    tmp_path: Path, changed: dict[str, Lines], told: str
) -> None:
    with pytest.raises(AssertionError, match=told):
        consumed(written(tmp_path, {**RUN, **changed}))


def test_a_model_says_itself_what_it_restored(tmp_path: Path) -> None:
    """Two launches of one run, the second from the checkpoint of the first one's end."""
    write_all(tmp_path)
    for epochs in (1, 2):
        raw = with_row_ids(tmp_path, 1000, trainer__epochs=epochs)
        args = {**raw["model"]["args"], "log": str(tmp_path / "rows")}
        raw["model"] = {"factory": "tests.train.row_log:Attempted", "args": args}
        Trainer(parse_config(raw)).fit()
    first, second = sorted(tmp_path.glob("rows.*.jsonl"))
    assert json.loads(second.read_text().splitlines()[0])[0] == len(first.read_text().splitlines())
    assert_every_row_once(consumed(tmp_path / "rows"), 1000, 2)
