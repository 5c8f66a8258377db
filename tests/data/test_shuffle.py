"""How strongly rows are mixed: every strength gives every row once, resumably, for any number of ranks."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import BadRows, BatchStream, Cursor, Manifest, ReadOptions
from rayrec.data.order.epoch import EpochOrder, positions, row_order
from rayrec.train import Trainer, parse_config
from tests.data.sets import ROWS_OF, SCHEMA, table, write
from tests.train import small

LOCAL = ReadOptions(reader="local")
SKIP = LOCAL.model_copy(update={"bad_rows": BadRows(policy="skip")})


def opened(manifest: Manifest, cursor: Cursor, rank: int, world: int, how: dict[str, Any]) -> BatchStream:
    settings = {"batch_rows": 32, "seed": 5, "options": LOCAL} | how
    if (step := settings.get("in_steps_of")) is not None:
        settings["batch_rows"] = step / world
    return BatchStream(manifest, SCHEMA, ROWS_OF, rank=rank, world_size=world, cursor=cursor, **settings)


def epoch(manifest: Manifest, how: dict[str, Any], plan: list[tuple[int, int | None]]) -> list[list[int]]:
    """The rows of each rank's steps; `plan` has (ranks, steps until they stop, all of them dead at once)."""
    cursor, steps = Cursor.start(3), []
    for world, stop in plan:
        streams = [opened(manifest, cursor, rank, world, how) for rank in range(world)]
        cursors: list[Any] = [stream.start_cursor for stream in streams]
        step = 0
        while stop is None or step < stop:
            found = [next(stream, None) for stream in streams]
            if not any(found):
                break
            rows = []
            for rank, item in enumerate(found):
                if item is not None:
                    cursors[rank] = item[1]
                    rows += item[0].sparse["row"].values().tolist()
            steps.append(rows)
            step += 1
        for stream in streams:
            stream.close()
        cursor = Cursor.from_dict(Cursor.merge(cursors).to_dict())
    return steps


def drawn(seed: int, folder: Path) -> tuple[Manifest, dict[str, Any], list[tuple[int, int | None]], int]:
    rng = random.Random(seed)
    sizes = [rng.randrange(50, 400) for _ in range(rng.randrange(1, 5))]
    groups = rng.choice([30, 100, 400])
    limits = {"window_rows": rng.choice([20, 64, 200]), "window_bytes": rng.choice([2000, 1 << 20])}
    manifest = Manifest.read(str(write(folder, sizes, row_group_size=groups)), SCHEMA, **limits)
    how: dict[str, Any] = rng.choice([{"interleave": 1}, {"interleave": 3}, {"interleave": 8}, {"steps": True}])
    if how.pop("steps", False):
        how |= {"shuffle": False, "in_steps_of": rng.choice([7, 64, 100])}
    plan = [(rng.randrange(1, 4), rng.randrange(1, 4)) for _ in range(rng.randrange(3))]
    return manifest, how, [*plan, (rng.randrange(1, 4), None)], sum(sizes)


@pytest.mark.parametrize("seed", range(8))
def test_every_row_comes_once_whatever_stops_in_between(tmp_path: Path, seed: int) -> None:
    manifest, how, plan, rows = drawn(seed, tmp_path)
    steps = epoch(manifest, how, plan)
    seen = [row for step in steps for row in step]
    assert sorted(seen) == list(range(rows))
    if "in_steps_of" in how:
        assert seen == list(range(rows)), "a step has rows of before the next one, on all ranks"
    else:
        assert seen != sorted(seen)
        whole = [row for step in epoch(manifest, how, [(1, None)]) for row in step]
        assert whole == [row for step in epoch(manifest, how, [(1, 2), (1, None)]) for row in step]


def test_steps_in_the_order_of_time_lack_the_rows_that_are_left_out(tmp_path: Path) -> None:
    labels = pa.array([9 if row % 10 == 3 else 1 for row in range(300)])
    pq.write_table(table(300, label=labels), tmp_path / "x.parquet", row_group_size=50)
    manifest = Manifest.read(str(tmp_path), SCHEMA, filters=[("row", "<", 250)], window_rows=50)
    how = {"shuffle": False, "in_steps_of": 40, "options": SKIP}
    steps = epoch(manifest, how, [(3, 2), (2, None)])
    assert steps == [
        [row for row in range(first, min(first + 40, 250)) if row % 10 != 3] for first in range(0, 250, 40)
    ]


def correlation(manifest: Manifest, labels: np.ndarray, batch: int, **how: Any) -> float:
    """How alike the labels of one batch are, beyond uniform draws: 0 for those, 1 where a batch has one label."""
    steps = epoch(manifest, {"batch_rows": batch} | how, [(1, None)])
    means = np.array([labels[step].mean() for step in steps if len(step) == batch])
    share = labels.mean()
    return (batch * means.var() / (share * (1 - share)) - 1) / (batch - 1)


def test_more_windows_mix_sorted_rows_better(tmp_path: Path) -> None:
    rows, batch = 6400, 64
    labels = (np.arange(rows) >= rows // 2).astype(np.int64)  # sorted by label
    for number in range(4):
        part = slice(number * rows // 4, (number + 1) * rows // 4)
        data = table(rows // 4, number * rows // 4, label=labels[part])
        pq.write_table(data, tmp_path / f"{number}.parquet", row_group_size=100)
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=100)
    found = {k: correlation(manifest, labels, batch, interleave=k) for k in (1, 4, 16, 64)}
    assert found[1] > 0.6 and abs(found[64]) < 0.02
    assert found[1] > 2 * found[4] > 4 * found[16], found


def test_a_large_row_group_is_decoded_once_by_each_rank_that_reads_it(
    tmp_path: Path, begun: list[tuple[str, int]]
) -> None:
    manifest = Manifest.read(str(write(tmp_path, [1000, 1000], row_group_size=1000)), SCHEMA, window_bytes=10_000)
    assert len(manifest.windows) > 10 and manifest.windows.runs.tolist() == [len(manifest.windows) // 2] * 2
    for world, interleave in ((1, 1), (2, 1), (1, 2), (3, 2)):
        begun.clear()
        steps = epoch(manifest, {"interleave": interleave}, [(world, None)])
        assert sorted(row for step in steps for row in step) == list(range(2000))
        most = 2 * world if interleave > 1 or world > 2 else 2
        assert 2 <= len(begun) <= most, (world, interleave)


def test_as_many_row_groups_stay_open_as_are_read_in_turn(tmp_path: Path, begun: list[tuple[str, int]]) -> None:
    groups = 80  # more than stay open in any case
    manifest = Manifest.read(str(write(tmp_path, [40] * groups)), SCHEMA, window_rows=8)
    assert len(manifest.windows) >= 5 * groups
    steps = epoch(manifest, {"interleave": groups}, [(1, None)])
    assert sorted(row for step in steps for row in step) == list(range(40 * groups)) and len(begun) == groups


@pytest.mark.parametrize(("group_rows", "wanted"), [(199, [199, 1]), (200, [100, 100]), (50, [100, 100])])
def test_row_groups_are_joined_and_cut_to_windows(tmp_path: Path, group_rows: int, wanted: list[int]) -> None:
    manifest = Manifest.read(str(write(tmp_path, [200], row_group_size=group_rows)), SCHEMA, window_rows=100)
    assert manifest.windows.rows.tolist() == wanted


def test_a_run_trains_in_the_order_of_time_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small.write(tmp_path / "train", 500)
    small.write(tmp_path / "eval", 100, seed=1)
    raw = small.raw_config(
        tmp_path, data__shuffle={"windows": 4, "rows": 64}, trainer__epochs=1, trainer__num_workers=0
    )
    assert Trainer(parse_config(raw)).fit().train["samples"] == 500
    raw["data"]["train"] = [{"path": str(tmp_path / "train"), "weight": 1.0}, {"path": str(tmp_path / "eval")}]
    raw["data"]["shuffle"] = "none"
    with pytest.raises(ValueError, match="a mix of several has none"):
        parse_config(raw)


def sequence(manifest: Manifest, interleave: int, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch in their order, by the rules as they are written: where each row of each window belongs."""
    windows, first = [], 0
    for size in manifest.windows.rows.tolist():
        windows.append(list(range(first, first + size)))
        first += size
    order = EpochOrder.of(
        [len(window) for window in windows], seed=seed, epoch=epoch, shuffle=True, interleave=interleave
    )
    rows: list[int] = []
    for start, stop in pairwise(order.blocks.tolist()):
        mixed = []
        for place, number in enumerate(order.windows[start:stop].tolist()):
            size = len(windows[number])
            for k, row in enumerate(row_order(number, size, seed=seed, epoch=epoch).tolist()):
                mixed.append((Fraction(2 * k + 1, size), place, windows[number][row]))
        rows += [row for _, _, row in sorted(mixed)]
    return rows


@pytest.mark.parametrize("interleave", [1, 3, 4, 16])
@pytest.mark.parametrize("left_out", ["none", "filtered", "bad"])
def test_windows_come_mixed_as_evenly_as_their_rows_allow(tmp_path: Path, interleave: int, left_out: str) -> None:
    sizes = [300, 170, 33, 500]
    labels = pa.array([9 if left_out == "bad" and row % 7 == 3 else row % 2 for row in range(sum(sizes))])
    for number, rows in enumerate(sizes):
        before = sum(sizes[:number])
        data = table(rows, before, label=labels[before : before + rows])
        pq.write_table(data, tmp_path / f"{number}.parquet", row_group_size=50)
    keeps = {"none": lambda row: True, "filtered": lambda row: row % 5 < 3, "bad": lambda row: row % 7 != 3}[left_out]
    filters = [("row", "in", [row for row in range(sum(sizes)) if keeps(row)])] if left_out == "filtered" else []
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=50, filters=filters)
    wanted = [row for row in sequence(manifest, interleave, 5, 3) if keeps(row)]
    steps = epoch(manifest, {"interleave": interleave, "options": SKIP}, [(1, None)])
    assert [len(step) for step in steps[:-1]] == [32] * (len(steps) - 1)
    for at, step in enumerate(steps):
        assert sorted(step) == sorted(wanted[32 * at : 32 * at + 32])


@given(st.lists(st.one_of(st.integers(1, 40), st.sampled_from([8, 16])), min_size=1, max_size=9))
def test_the_rows_of_windows_are_spread_evenly(sizes: list[int]) -> None:
    places = sorted((Fraction(2 * k + 1, size), window) for window, size in enumerate(sizes) for k in range(size))
    for window in range(len(sizes)):
        assert positions(sizes, window).tolist() == [at for at, (_, one) in enumerate(places) if one == window]
