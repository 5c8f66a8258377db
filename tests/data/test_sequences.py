"""Sequences: lists that belong together, from columns to batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from rayrec.data import BatchStream, Cursor, DataError, Manifest, Mapping, ReadOptions, Schema, empty_batch, to_batch
from rayrec.data.stream.mixed_stream import joined
from rayrec.models import Batch
from rayrec.train.worker.micro_batches import micro_batch_of

ROWS_OF = {"item": 100, "genre": 9}


def schema(**changes: Any) -> Schema:
    sequence = {
        "name": "history",
        "ids": ["item", "genre"],
        "values": [{"name": "at", "kind": "time"}, {"name": "stars"}],
        "length": 3,
    }
    sparse = [{"name": "item", "kind": "id_list"}, {"name": "genre", "kind": "id_list"}]
    return Schema(sparse=sparse, sequences=[{**sequence, **changes}])


def rows(count: int, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 6, count)
    lengths[:2] = 0
    columns: dict[str, Any] = {
        "item": [random.integers(0, 100, n).tolist() for n in lengths],
        "genre": [random.integers(0, 9, n).tolist() for n in lengths],
        "at": [(1_600_000_000 + random.integers(0, 9, n)).tolist() for n in lengths],
        "stars": [random.random(n).tolist() for n in lengths],
        "label": random.integers(0, 2, count),
    }
    lists = {name: pa.array(columns[name], pa.list_(pa.int64())) for name in ("item", "genre", "at")}
    return pa.table({**columns, **lists, "stars": pa.array(columns["stars"], pa.list_(pa.float64()))})


def as_lists(batch: Batch) -> dict[str, list[list[float]]]:
    """Of each list of the sequence, the rows."""
    sequence = batch.sequences["history"]
    flat = {name: ids.values() for name, ids in sequence.ids.items()} | dict(sequence.values)
    lengths = sequence.lengths.tolist()
    return {name: [part.tolist() for part in values.split(lengths)] for name, values in flat.items()}


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("order", ["oldest_first", "newest_first"])
def test_all_lists_of_a_sequence_are_cut_and_turned_alike(keep: str, order: str) -> None:
    table = rows(20)
    batch = to_batch(table, schema(keep=keep, order=order), ROWS_OF)
    found = as_lists(batch)
    for name in ("item", "genre", "at", "stars"):
        given = [one if order == "oldest_first" else one[::-1] for one in table[name].to_pylist()]
        wanted = [one[:3] if keep == "first" else one[-3:] for one in given]
        np.testing.assert_allclose(np.concatenate(found[name]), np.concatenate(wanted), rtol=1e-6)
        assert [len(one) for one in found[name]] == [len(one) for one in wanted]
    assert batch.sequences["history"].values["at"].dtype == torch.int64
    assert batch.sequences["history"].values["stars"].dtype == torch.float32


def test_a_sequence_survives_transport_orders_parts_and_joins(tmp_path: Path) -> None:
    """Rows are read in another order, in batches of several windows, and batches are joined and cut."""
    table, of = rows(30), schema()
    whole = as_lists(to_batch(table, of, ROWS_OF))
    pq.write_table(table, tmp_path / "x.parquet")
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 1}
    manifest = Manifest.read(str(tmp_path), of, window_rows=11)
    with BatchStream(manifest, of, ROWS_OF, batch_rows=12, options=ReadOptions(reader="local"), **how) as stream:
        batches = [batch for batch, _ in stream]
    both = joined(batches).to(torch.device("cpu"))
    read = as_lists(both)
    rows_of = [list(zip(*lists.values(), strict=True)) for lists in (read, whole)]
    assert len(rows_of[0]) == 30 and rows_of[0] != rows_of[1] and sorted(rows_of[0]) == sorted(rows_of[1])
    parts = [micro_batch_of(both, 0, 7), micro_batch_of(both, 7, 7), micro_batch_of(both, 7, 30)]
    assert as_lists(joined(parts)) == read
    assert empty_batch(of).sequences["history"].offsets.tolist() == [0]
    assert as_lists(empty_batch(of)) == {name: [] for name in whole}


@pytest.mark.parametrize("column", ["genre", "at", "stars"])
def test_lists_of_unequal_lengths_are_refused_with_row(column: str) -> None:
    table = rows(20)
    for name in ("item", "genre", "at", "stars"):
        values = table[name].to_pylist()
        values[13] = [1] * (5 if name == column else 4)  # of one length after they are cut, not before
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values, table[name].type))
    with pytest.raises(DataError, match="different lengths") as caught:
        to_batch(table, schema(), ROWS_OF)
    assert caught.value.row == 13 and caught.value.column == column
    assert "5 in" in str(caught.value) and "4 in" in str(caught.value)


@pytest.mark.parametrize(("time", "unit"), [(1_600_000_000_000, "s"), (-5, "s"), (1_600_000_000 * 10**9, "us")])
def test_integers_in_another_unit_are_refused_with_row(time: int, unit: str) -> None:
    table = rows(20)
    values = table["at"].to_pylist()
    length = len(table["item"][13])
    values[13] = [*[1_600_000_000] * (length - 1), time] if length else []
    assert length
    table = table.set_column(2, "at", pa.array(values, pa.list_(pa.int64())))
    changes = {"values": [{"name": "at", "kind": "time", "unit": unit}]}
    with pytest.raises(
        DataError, match=f"times of 'at' must be between 1970 and 2200 in {unit}.*`unit` of 'at'"
    ) as caught:
        to_batch(table, schema(**changes), ROWS_OF)
    assert (caught.value.row, caught.value.column, caught.value.value) == (13, "at", str(time))


def test_times_of_events_may_be_texts_and_a_history_may_be_empty() -> None:
    raw = {
        "sparse": [{"name": "items", "kind": "id_list", "id_type": "integer", "mapping": {"kind": "hash"}}],
        "sequences": [
            {"name": "h", "ids": ["items"], "values": [{"name": "at", "kind": "time"}, {"name": "price"}]},
        ],
    }
    mapping = Mapping(Schema.model_validate(raw), {"items": 100}, labels=False)
    new: dict[str, Any] = {"items": [], "at": [], "price": []}

    def times(*rows: dict[str, Any]) -> list[int]:
        return mapping.to_batch(rows).sequences["h"].values["at"].tolist()

    assert times(new) == times({**new, "at": None}) == []  # a new user, alone
    known = {"items": [1, 2], "at": ["2024-01-01", "2024-01-01T01:00:00"], "price": [1, 2]}
    assert times(known, new) == [1704067200, 1704070800]
    assert times({**known, "at": ["2024-01-01T01:00:00+01:00", "2024-01-01T01:00:00Z"]}) == [1704067200, 1704070800]
    assert times({**known, "at": [1704067200, 1704070800]}) == [1704067200, 1704070800]
    with pytest.raises(DataError, match=r"'at'.*ISO 8601"):
        times({**known, "at": ["yesterday", "today"]})


def test_ids_left_out_of_one_list_are_refused() -> None:
    table = rows(5)
    items = table["item"].to_pylist()
    items[3] = [5, None, 7]
    table = table.set_column(0, "item", pa.array(items, pa.list_(pa.int64())))
    sparse = [{"name": "item", "kind": "id_list", "on_null": "empty"}]
    only = Schema(sparse=sparse, sequences=[{"name": "history", "ids": ["item"]}])
    with pytest.raises(DataError, match="different lengths") as caught:
        to_batch(table, only, ROWS_OF)
    assert caught.value.row == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": ["item", "nothing"]}, "no feature 'nothing'"),
        ({"ids": ["item", "item"]}, "is listed twice"),
        ({"values": [{"name": "item"}]}, "is listed twice"),
        ({"values": [{"name": "at"}, {"name": "at"}]}, "is listed twice"),
        ({"keep": "middle"}, "keep"),
    ],
)
def test_a_sequence_that_does_not_fit_its_schema_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        schema(**changes)


def test_a_length_of_a_feature_against_the_sequences_is_refused() -> None:
    sparse = [{"name": "item", "kind": "id_list", "max_length": 5}]
    with pytest.raises(ValidationError, match="remove max_length=5"):
        Schema(sparse=sparse, sequences=[{"name": "history", "ids": ["item"], "length": 3}])


def test_a_schema_is_the_same_after_it_was_written() -> None:
    assert Schema(**schema().model_dump(mode="json")) == schema()
