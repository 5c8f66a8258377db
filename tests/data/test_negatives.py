"""Down-sampled negatives: the same rows for any ranks and resumes, all positives, the rate kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import BadRows, BatchStream, Cursor, Manifest, Schema
from rayrec.data.stream.downsampling import keep_mask
from tests.data.sets import ROWS_OF, SCHEMA, table, write
from tests.data.test_stream import LOCAL, RAY, row_ids, stream

RATE = 0.3


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = write(tmp_path_factory.mktemp("set"), [730, 0, 12, 1301], row_group_size=150)
    return Manifest.read(str(folder), SCHEMA, window_rows=300)


def labels(manifest: Manifest) -> np.ndarray:
    return pq.ParquetDataset([file.uri for file in manifest.files]).read()["label"].to_numpy()


def read(manifest: Manifest, world_size: int, epoch: int = 0, **more: object) -> list[int]:
    """The rows that so many ranks read in an epoch."""
    ids = []
    for rank in range(world_size):
        with stream(manifest, Cursor.start(epoch), rank, world_size, negative_rate=RATE, **more) as batches:
            found = list(batches)
        assert all(batch.rows == 64 for batch, _ in found[:-1])
        ids += row_ids([batch for batch, _ in found])
    return ids


def test_all_positives_and_the_rate_of_negatives(manifest: Manifest) -> None:
    label, ids = labels(manifest), read(manifest, 1)
    assert len(set(ids)) == len(ids)
    kept = np.isin(np.arange(len(label)), ids)
    assert kept[label == 1].all()
    negatives = int((label == 0).sum())
    spread = 4 * math.sqrt(negatives * RATE * (1 - RATE))
    assert abs(int(kept[label == 0].sum()) - RATE * negatives) < spread


def test_the_same_rows_for_any_number_of_ranks_and_any_order(manifest: Manifest, running_ray: None) -> None:
    expected = sorted(read(manifest, 1))
    assert sorted(read(manifest, 3)) == sorted(read(manifest, 5)) == expected
    assert sorted(read(manifest, 2, shuffle=False)) == expected
    assert sorted(read(manifest, 2, options=RAY)) == expected


def test_every_epoch_and_seed_draws_anew(manifest: Manifest) -> None:
    first, second, other = (set(read(manifest, 2, epoch, seed=seed)) for epoch, seed in ((0, 0), (1, 0), (0, 1)))
    label = labels(manifest)
    negatives = [{row for row in rows if label[row] == 0} for rows in (first, second, other)]
    for rows in negatives[1:]:
        assert len(rows & negatives[0]) < 0.5 * len(negatives[0])


def test_a_seed_draws_the_same_rows_as_ever() -> None:
    """A run that goes on under another version of rayrec has read just these."""
    label = pa.chunked_array([[0, 1, 0, 0], [0] * 28])
    kept = keep_mask(label, RATE, seed=7, epoch=1, window=3, first=100)
    assert np.flatnonzero(kept).tolist() == [1, 2, 4, 9, 22, 23, 26, 27]
    later = keep_mask(label.slice(10), RATE, seed=7, epoch=1, window=3, first=110)
    assert (later == kept[10:]).all()
    coded = pa.chunked_array([label.combine_chunks().dictionary_encode()])
    assert (keep_mask(coded, RATE, seed=7, epoch=1, window=3, first=100) == kept).all()


@settings(max_examples=10)
@given(data=st.data())
def test_exactly_once_under_stops_and_resizes(manifest: Manifest, data: st.DataObject) -> None:
    expected = sorted(read(manifest, 1))
    cursor, ids = Cursor.start(0), []
    for last in (False, False, True):
        world_size, batch_rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 200))
        steps = 10_000 if last else data.draw(st.integers(0, 5))
        after = []
        for rank in range(world_size):
            with stream(manifest, cursor, rank, world_size, batch_rows=batch_rows, negative_rate=RATE) as batches:
                at = batches.start_cursor
                for _, (batch, at) in zip(range(steps), batches, strict=False):  # noqa: B007
                    ids += row_ids([batch])
                after.append(at)
        cursor = Cursor.from_dict(Cursor.merge(after).to_dict())
    assert sorted(ids) == expected
    assert cursor.rows_done == manifest.rows


@pytest.mark.parametrize(
    "more", [{}, {"shuffle": False}, {"interleave": 2}], ids=["shuffled", "in order", "interleaved"]
)
def test_with_filters_rows_and_order_and_resumption_are_those_of_a_plain_computation(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """The rows are those of pyarrow that are drawn as well, in the order of all rows."""
    folder = write(tmp_path / "set", [600, 300], row_group_size=100)
    filters = [("age", ">", 25.0), ("city", "not in", ["city 3", "city 4"])]
    whole = pq.ParquetDataset([folder / f"part-00{n}.parquet" for n in range(2)]).read()
    draws = [
        keep_mask(whole["label"].slice(300 * window, 300), RATE, seed=5, epoch=1, window=window, first=0)
        for window in range(3)
    ]
    passing = whole.filter(pads.field("age") > 25).filter(~pads.field("city").isin(["city 3", "city 4"]))
    expected = {*passing["row"].to_pylist()} & {*np.flatnonzero(np.concatenate(draws)).tolist()}
    plain = Manifest.read(str(folder), SCHEMA, window_rows=300)
    filtered = Manifest.read(str(folder), SCHEMA, window_rows=300, filters=filters)
    assert len(plain.windows) == 3 and 100 < len(expected) < 700

    def read(manifest: Manifest, cursor: Cursor, rank: int, size: int, **how: Any) -> list[tuple[list[int], Cursor]]:
        with stream(manifest, cursor, rank, size, seed=5, **more, **how) as batches:
            # Within a batch, rows of interleaved windows come window by window.
            ids = [(row_ids([batch]), after) for batch, after in batches]
        return [(sorted(rows), after) for rows, after in ids] if "interleave" in more else ids

    def in_batches(rows: list[int]) -> list[list[int]]:
        batches = [rows[first : first + 16] for first in range(0, len(rows), 16)]
        return [sorted(batch) for batch in batches] if "interleave" in more else batches

    how: dict[str, Any] = {"negative_rate": RATE, "batch_rows": 16}
    one_by_one = [read(plain, Cursor.start(1), rank, 2, batch_rows=1) for rank in range(2)]
    in_order = [[row for ids, _ in batches for row in ids if row in expected] for batches in one_by_one]
    assert {*in_order[0], *in_order[1]} == expected
    found = [read(filtered, Cursor.start(1), rank, 2, **how) for rank in range(2)]
    assert [[ids for ids, _ in batches] for batches in found] == [*map(in_batches, in_order)]
    for done in range(1, min(map(len, found))):
        cursor, rest = (
            Cursor.merge([batches[done - 1][1] for batches in found]),
            [rows[16 * done :] for rows in in_order],
        )
        for rank in range(2):
            assert [ids for ids, _ in read(filtered, cursor, rank, 2, **how)] == in_batches(rest[rank])
        resized = [row for rank in range(3) for ids, _ in read(filtered, cursor, rank, 3, **how) for row in ids]
        assert sorted(resized) == sorted([*rest[0], *rest[1]])


def test_bad_rows_are_not_drawn_away(tmp_path: Path) -> None:
    """A row whose label cannot be read is no negative; batches and cursors count what is left out apart."""
    label = np.where(np.arange(400) % 50 == 7, 3, np.arange(400) % 2)
    pq.write_table(table(400, label=pa.array(label)), tmp_path / "x.parquet", row_group_size=60)
    manifest = Manifest.read(str(tmp_path), SCHEMA, window_rows=100)
    options = LOCAL.model_copy(update={"bad_rows": BadRows(policy="skip")})
    with stream(manifest, Cursor.start(0), 0, 1, options=options, negative_rate=RATE) as batches:
        found = list(batches)
    assert batches.skipped.count == found[-1][1].skipped == 8
    assert sum(batch.rows for batch, _ in found) + 8 < 400 == found[-1][1].rows_done


def test_of_several_labels_no_row_is_a_negative(manifest: Manifest) -> None:
    schema = Schema.model_validate(
        {**SCHEMA.model_dump(), "label": None, "labels": [{"name": "label"}, {"name": "row"}]}
    )
    with pytest.raises(ValueError, match=r"negative_rate=0\.3 needs a single label"):
        BatchStream(
            manifest,
            schema,
            ROWS_OF,
            batch_rows=8,
            rank=0,
            world_size=1,
            cursor=Cursor.start(0),
            seed=0,
            negative_rate=RATE,
        )
