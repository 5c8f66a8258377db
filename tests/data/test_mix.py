"""Several data sets mixed by weight: shares, every row of the longest once, exact resume, wrong mixes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import BadRows, Cursor, DataError, Mix, MixedStream, ReadOptions, Schema, WeightedDataSet
from rayrec.data.order.mix import batch_shares, shares
from rayrec.models import Batch
from tests.data.sets import ROWS_OF, SCHEMA, table, write

FIRST_OF = (0, 100_000, 200_000)  # row ids of the data sets start here


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 500))
def test_shares_never_shrink_and_follow_the_weights(weights: list[int], rows: int) -> None:
    before, after = shares(weights, rows), shares(weights, rows + 1)
    assert sum(before) == rows
    assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (len(weights) - 1) + [1]
    for share, weight in zip(before, weights, strict=True):
        assert abs(share - rows * weight / sum(weights)) <= len(weights) / 2
    whole = shares(weights, 7 * sum(weights))
    assert whole == [7 * weight for weight in weights]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 5), st.integers(0, 30))
def test_every_rank_and_all_together_have_their_shares(weights: list[int], world: int, more: int) -> None:
    batch_rows, steps = world + more, 40
    by_rank = [list(islice(batch_shares(weights, 0, batch_rows, rank, world), steps)) for rank in range(world)]
    for rank, mine in enumerate(by_rank):
        size = batch_rows // world + (rank < batch_rows % world)
        assert all(sum(step) == size and min(step) >= 0 for step in mine)
        for number, weight in enumerate(weights):
            assert abs(sum(step[number] for step in mine) - steps * size * weight / sum(weights)) <= len(weights)
    if batch_rows % world == 0:
        for number, weight in enumerate(weights):
            for step in zip(*by_rank, strict=True):
                assert abs(sum(one[number] for one in step) - batch_rows * weight / sum(weights)) <= len(weights)
    resumed = islice(batch_shares(weights, 7 * batch_rows, batch_rows, world - 1, world), steps - 7)
    assert list(resumed) == by_rank[-1][7:]


def mix_of(folder: Path, sizes: list[int], weights: list[float], **filters: list[Any]) -> Mix:
    sets = []
    for number, (rows, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = write(folder / str(number), [rows // 3, rows - rows // 3], row_group_size=20, first=FIRST_OF[number])
        raw = {"path": str(path), "weight": float(weight), "filters": filters.get(f"of_{number}", [])}
        sets.append(WeightedDataSet.model_validate(raw))
    return Mix.of(sets, SCHEMA)


def open_all(mix: Mix, world: int, cursor: Cursor, batch_rows: int = 24, seed: int = 0) -> list[MixedStream]:
    return [
        MixedStream(
            mix, SCHEMA, ROWS_OF, batch_rows=batch_rows, rank=rank, world_size=world, cursor=cursor, seed=seed,
            options=ReadOptions(reader="local"),
        )
        for rank in range(world)
    ]  # fmt: skip


def row_ids(batch: Batch) -> list[int]:
    return batch.sparse["row"].values().tolist()


def take(mix: Mix, world: int, cursor: Cursor, steps: int = 10**9, **more: int) -> tuple[list[list[list[int]]], Cursor]:
    """Row ids by rank and step, and the cursor of all ranks afterwards, as it comes back from a checkpoint."""
    found, cursors = [], []
    for stream in open_all(mix, world, cursor, **more):
        with stream:
            taken = list(islice(stream, steps))
        found.append([row_ids(batch) for batch, _ in taken])
        cursors.append(taken[-1][1] if taken else stream.start_cursor)
    return found, Cursor.from_dict(json.loads(json.dumps(Cursor.merge(cursors).to_dict())))


def by_set(ids: list[int]) -> list[Counter[int]]:
    return [Counter(i for i in ids if first <= i < first + 100_000) for first in FIRST_OF]


def flat(found: list[list[list[int]]]) -> list[int]:
    return [row for rank in found for step in rank for row in step]


def assert_an_epoch(ids: list[int], sizes: list[int], weights: list[float], skew: int) -> None:
    """All rows of the first data set once; of the others at their shares, all rows equally often but for the last pass.

    Args:
        skew: by how much more numbers may differ, as ranks end a pass at different times.
    """
    longest, *others = by_set(ids)
    assert longest == Counter(range(sizes[0]))
    for number, found in enumerate(others, start=1):
        times = [found[FIRST_OF[number] + row] for row in range(sizes[number])]
        assert sum(times) == found.total() and min(times) > 0 and max(times) - min(times) <= 1 + skew
        assert abs(sum(times) - sizes[0] * weights[number] / weights[0]) <= 24


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_longest_comes_once_and_the_others_begin_again(tmp_path: Path, world: int) -> None:
    sizes, weights = [300, 70, 11], [3.0, 1.5, 0.5]
    mix = mix_of(tmp_path, sizes, weights)
    assert (mix.longest, mix.weights, mix.rows) == (0, (6, 3, 1), 500)
    found, _ = take(mix, world, Cursor.start(0))
    assert all(len(step) == 24 // world for rank in found for step in rank[:-1])
    assert_an_epoch(flat(found), sizes, weights, skew=world > 1)
    again, _ = take(mix, world, Cursor.start(0))
    other, _ = take(mix, world, Cursor.start(1))
    assert found == again != other
    assert_an_epoch(flat(other), sizes, weights, skew=world > 1)


@pytest.mark.parametrize("worlds", [(2, 2), (2, 3), (3, 1), (1, 2)])
def test_a_resume_goes_on_exactly(tmp_path: Path, worlds: tuple[int, int]) -> None:
    sizes, weights = [300, 70, 11], [3.0, 1.5, 0.5]
    mix = mix_of(tmp_path, sizes, weights)
    head, cursor = take(mix, worlds[0], Cursor.start(0), steps=9)
    assert len(cursor.parts) == 3 and cursor.given == 9 * 24
    tail, _ = take(mix, worlds[1], cursor)
    assert_an_epoch(flat(head) + flat(tail), sizes, weights, skew=1)
    if worlds[0] == worlds[1]:
        whole, _ = take(mix, worlds[0], Cursor.start(0))
        assert [a + b for a, b in zip(head, tail, strict=True)] == whole


def test_filters_are_counted_and_shares_are_those_of_rows_that_pass(tmp_path: Path) -> None:
    mix = mix_of(
        tmp_path, [300, 200], [1, 1], of_1=[["row", "<", 100_050], ["user_id", ">=", 0]], of_0=[["row", "!=", 7]]
    )
    assert mix.passing == (299, 50) and mix.longest == 0
    found, _ = take(mix, 2, Cursor.start(0))
    for rank in found:
        for step in rank[:-1]:
            parts = by_set(step)
            assert (parts[0].total(), parts[1].total()) == (6, 6)
    parts = by_set(flat(found))
    assert parts[0] == Counter(set(range(300)) - {7})
    assert set(parts[1]) == set(range(100_000, 100_050))


def test_batches_hold_the_rows_of_their_parts(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, [40, 30], [1, 1])
    (stream,) = open_all(mix, 1, Cursor.start(0), batch_rows=80)
    with stream:
        batch, cursor = next(stream)
        assert batch.rows == 80 and batch.dense.shape == (80, 2) and cursor.epoch == 0
        assert batch.sparse.stride() == 80 and batch.sparse["genres"].lengths().shape == (80,)
        assert next(stream, None) is None and stream.batches_left == 0
    with open_all(mix, 1, Cursor.start(0), batch_rows=8)[0] as stream:
        next(stream)
        stream.close()
        assert next(stream, None) is None, "a closed stream ends"


def test_cursors_of_other_mixes_are_refused(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, [40, 30], [1, 1])
    _, cursor = take(mix, 1, Cursor.start(0), steps=1)
    for wrong in (replace(cursor, parts=cursor.parts[:1]), replace(cursor, parts=cursor.parts * 2)):
        with pytest.raises(DataError, match="the number of data sets changed"):
            open_all(mix, 1, wrong)
    with pytest.raises(DataError, match="does not fit"):
        open_all(mix, 1, replace(cursor, parts=cursor.parts[::-1]))


def test_a_mix_names_the_data_set_at_fault(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/1"):
        mix_of(tmp_path, [40, 30], [1, 1], of_1=[["row", "=", 3]])
    with pytest.raises(DataError, match=r"no row of .*/1 where row = 100005 and row = 100006 passes the filters"):
        mix_of(tmp_path, [40, 30], [1, 1], of_1=[["row", "=", 100_005], ["row", "=", 100_006]])


def test_an_epoch_has_passes_enough_of_every_data_set(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, [300, 70], [3, 2])
    # 200 rows of the other, and of each rank its ratio, all ranks, and 2 more, as parts differ by rows
    assert [mix.passes(1, world, leaves_out=False) for world in (1, 2, 3, 8)] == [3, 3, 4, 5]
    assert [mix.passes(1, world, leaves_out=True) for world in (1, 2, 3, 8)] == [7, 7, 9, 11]
    assert [mix.passes(0, world, leaves_out=True) for world in (1, 2)] == [1, 1]
    assert mix_of(tmp_path, [300, 70], [3, 2], of_0=[["row", "<", 300]]).passes(1, 1, leaves_out=False) == 7


def test_a_mix_begins_again_where_half_of_a_data_set_cannot_be_used(tmp_path: Path) -> None:
    sizes, weights = [300, 20], [1.0, 1.0]
    mix = mix_of(tmp_path, sizes, weights)
    bad = table(20, FIRST_OF[1], label=pa.array([9, 1] * 10))
    for file in (tmp_path / "1").iterdir():
        file.unlink()
    pq.write_table(bad, tmp_path / "1" / "x.parquet")
    sets = [WeightedDataSet(path=str(tmp_path / str(number))) for number in range(2)]
    mix = Mix.of(sets, SCHEMA)
    options = ReadOptions(reader="local", bad_rows=BadRows(policy="skip"))
    where: dict[str, Any] = {"batch_rows": 24, "rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with MixedStream(mix, SCHEMA, ROWS_OF, **where, options=options) as stream:
        steps = [by_set(row_ids(batch)) for batch, _ in stream]
    assert [(one.total(), other.total()) for one, other, _ in steps[:-1]] == [(12, 12)] * (len(steps) - 1)


def test_batches_to_come_are_counted_and_none_comes_after_the_end(tmp_path: Path) -> None:
    mix = mix_of(tmp_path, [300, 70], [3, 1])
    for world in (1, 2):
        for stream in open_all(mix, world, Cursor.start(0), batch_rows=40):
            with stream:
                left = [stream.batches_left, *(stream.batches_left for _ in stream)]
            assert left == list(range(len(left) - 1, -1, -1))
        found, cursor = take(mix, world, Cursor.start(0), batch_rows=40)
        assert found and take(mix, world, cursor)[0] == [[]] * world
        assert take(mix, 3, cursor)[0] == [[]] * 3


def test_data_sets_whose_columns_differ_are_not_mixed(tmp_path: Path) -> None:
    schema = Schema.model_validate({"sparse": [{"name": "hour", "mapping": {"kind": "hash"}}]})
    sets = [WeightedDataSet(path=str(write(tmp_path / f"hour={hour}", [10]))) for hour in ("03", "night")]
    with pytest.raises(DataError, match="trained on integer ids"):
        Mix.of(sets, schema)
