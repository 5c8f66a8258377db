"""Vectors by id in Parquet files: the rows of their ids, against the mapping of training, and what is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import DataError, Hash, Identity, Mapping, Schema, SparseFeature, Vocabulary
from rayrec.data.mapping.vocabulary import close_vocabularies
from rayrec.data.source import initial_vectors
from rayrec.storage import Patience
from tests.device import drawn

ROWS, DIM = 30, 3
FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
LAYOUTS = ["list", "large", "fixed", "view"]


def vectors_of(path: Path | str, feature: SparseFeature, **changes: Any) -> initial_vectors.InitialVectors:
    arguments = {"id": "id", "dim": DIM, "largest": 65504.0, "patience": Patience(retries=0), **changes}
    return initial_vectors.InitialVectors(
        table="item", path=str(path), vector="v", feature=feature, num_rows=ROWS, **arguments
    ).with_files()


def column(numbers: np.ndarray[Any, Any], layout: str = "fixed") -> pa.Array:
    """`[N, dim]` as one of Arrow's lists."""
    flat, dim = pa.array(numbers.ravel()), numbers.shape[1]
    if layout == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, dim)
    offsets = np.arange(len(numbers) + 1) * dim
    if layout == "view":
        return pa.ListViewArray.from_arrays(
            pa.array(offsets[:-1], pa.int32()), pa.array(np.diff(offsets), pa.int32()), flat
        )
    kind, width = (pa.LargeListArray, pa.int64()) if layout == "large" else (pa.ListArray, pa.int32())
    return kind.from_arrays(pa.array(offsets, width), flat)


def read_rows(vectors: initial_vectors.InitialVectors) -> dict[int, list[float]]:
    """Row → vector, after all batches."""
    out: dict[int, list[float]] = {}
    for rows, numbers in vectors.batches():
        assert len(set(rows.tolist())) == len(rows) and numbers.dtype == np.float32
        out |= dict(zip(rows.tolist(), numbers.tolist(), strict=True))
    return out


@st.composite
def features(draw: st.DrawFn, folder: Path, text: bool) -> tuple[SparseFeature, set[Any] | None]:
    """A feature, and the ids with a row of their own: None if every id has one."""
    kinds = st.sampled_from(["hash", "vocabulary"] if text else ["hash", "vocabulary", "identity"])
    mapping: Any
    match draw(kinds):
        case "hash":
            mapping, known = Hash(seed=draw(st.integers(0, 3))), None
        case "identity":
            mapping, known = Identity(bounds=draw(st.sampled_from(["error", "clip", "drop"]))), set(range(ROWS))
        case _:
            ids = draw(st.lists(raw_ids(text), unique=True, min_size=1, max_size=ROWS - 3))
            pq.write_table(pa.table({"id": ids}), folder / "vocabulary.parquet")
            mapping = Vocabulary(path=str(folder / "vocabulary.parquet"), oov_rows=draw(st.integers(0, 3)))
            known = set(ids)
    kind = draw(st.sampled_from(["id", "id_list"]))
    return SparseFeature(name="item", kind=kind, mapping=mapping, id_type="text" if text else "integer"), known


def raw_ids(text: bool) -> st.SearchStrategy[Any]:
    numbers = st.integers(-5, 40)
    return numbers.map(lambda number: f"id {number}") if text else numbers


def row_in_training(feature: SparseFeature, id: Any) -> int:
    """The row by the mapping of whole rows."""
    schema = Schema(sparse=[feature])
    values = [id] if feature.kind == "id" else [[id]]
    batch = Mapping(schema, {"item": ROWS}, labels=False).to_batch({"item": values})
    return int(batch.sparse.values()[0])


@settings(max_examples=drawn(60))
@given(data=st.data())
def test_each_vector_is_in_the_row_that_training_reads_for_its_id(data: st.DataObject) -> None:
    text = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        feature, known = data.draw(features(folder, text))
        ids = data.draw(st.lists(raw_ids(text), unique=True, min_size=1, max_size=40))
        dtype, layout = FLOATS[data.draw(st.sampled_from([*FLOATS]))], data.draw(st.sampled_from(LAYOUTS))
        numbers = np.random.default_rng(0).normal(size=(len(ids), DIM)).astype(dtype)
        table = pa.table({"v": column(numbers, layout), "other": ids, "id": ids})
        if data.draw(st.booleans()) and text:
            table = table.set_column(2, "id", table["id"].dictionary_encode())
        cut = data.draw(st.integers(0, len(ids)))
        (folder / "vectors").mkdir()
        for number, part in enumerate((table.slice(0, cut), table.slice(cut))):
            pq.write_table(part, folder / "vectors" / f"{number}.parquet", row_group_size=data.draw(st.integers(1, 50)))
        close_vocabularies()
        vectors = vectors_of(folder / "vectors", feature)
        with_row = [k for k, id in enumerate(ids) if known is None or id in known]
        expected = {row_in_training(feature, ids[k]): numbers[k].astype(np.float32).tolist() for k in with_row}
        with (
            mock.patch.object(initial_vectors, "_BATCH_IDS", data.draw(st.integers(1, 50))),
            mock.patch.object(initial_vectors, "_BATCH_BYTES", data.draw(st.integers(1, 2000))),
        ):
            assert read_rows(vectors) == expected
            if not expected:
                with pytest.raises(DataError, match=f"none of the {len(ids)} ids has a row"):
                    vectors.count_rows()
                return
            named = vectors.count_rows()
        assert named == initial_vectors.NamedRows(
            ids=len(ids), rows=len(expected), without_row=len(ids) - len(with_row)
        )


IDENTITY = SparseFeature(name="item")
GOOD = np.ones((4, DIM), np.float32)


def changed(position: tuple[int, int], value: float) -> np.ndarray[Any, Any]:
    numbers = GOOD.astype(np.float64)
    numbers[position] = value
    return numbers


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no id column": (
        {"item": [1, 2, 3, 4], "v": column(GOOD)},
        "column 'id' is missing; .*set tables.item.init.id",
    ),
    "no vector column": ({"id": [1, 2, 3, 4]}, "column 'v' is missing; .*set tables.item.init.vector"),
    "text ids": ({"id": ["1", "2", "3", "4"], "v": column(GOOD)}, "must be an integer; .*FILE.*'id'"),
    "float ids": ({"id": [1.0, 2.0, 3.0, 4.0], "v": column(GOOD)}, "must be an integer.*FILE.*'id'"),
    "numbers": ({"id": [1, 2, 3, 4], "v": [1.0, 2.0, 3.0, 4.0]}, "must be lists of floats; .*double.*FILE.*'v'"),
    "integers": ({"id": [1, 2, 3, 4], "v": [[1, 2, 3]] * 4}, "must be lists of floats; .*int64.*FILE.*'v'"),
    "texts": ({"id": [1, 2, 3, 4], "v": ["[1, 2, 3]"] * 4}, "must be lists of floats; .*string"),
    "fixed dim": ({"id": [1, 2, 3, 4], "v": column(np.ones((4, 2)))}, "has 2 numbers, but the table's dim is 3 .*FILE"),
    "dim": (
        {"id": [1, 2, 3, 4], "v": [[1.0] * 3, [1.0] * 3, [1.0] * 4, []]},
        "has 4 numbers.*row 2.*tables.item.dim",
    ),
    "empty list": ({"id": [1, 2, 3, 4], "v": [[1.0] * 3, [], [1.0] * 4, []]}, "has 0 numbers.*row 1,"),
    "null vector": ({"id": [1, 2, 3, 4], "v": [[1.0] * 3, None, [1.0] * 3, None]}, "a vector is null .*FILE, row 1, c"),
    "null number": ({"id": [1, 2, 3, 4], "v": [[1.0] * 3] * 3 + [[1.0, None, 1.0]]}, "not finite.*row 3, .*value None"),
    "NaN": ({"id": [1, 2, 3, 4], "v": column(changed((2, 1), np.nan))}, "not finite.*FILE, row 2, .*'v', value nan"),
    "infinite": ({"id": [1, 2, 3, 4], "v": column(changed((1, 0), -np.inf))}, "not finite.*row 1, .*value -inf"),
    "beyond fp16": ({"id": [1, 2, 3, 4], "v": column(changed((0, 2), 7e4))}, "not finite in the table's.*value 70000"),
    "beyond fp32": ({"id": [1, 2, 3, 4], "v": column(changed((0, 2), 1e300))}, "not finite in the table's.*1e[+]300"),
    "NaN without a row": ({"id": [1, 2, 99, 4], "v": column(changed((2, 1), np.nan))}, "not finite.*row 2"),
    "null id": ({"id": [1, 2, 3, None], "v": column(GOOD)}, "an id is null .*FILE, row 3, column 'id'.*remove the row"),
    "repeated id": ({"id": [1, 2, 3, 2], "v": column(GOOD)}, "also in row 1 of .*FILE, row 3, column 'id', value 2"),
    "repeated without a row": ({"id": [1, 99, 3, 99], "v": column(GOOD)}, "the id is also in row 1.*value 99"),
    "none with a row": (
        {"id": [91, 92, 93, -4], "v": column(GOOD)},
        "none of the 4 ids has a row .*feature 'item'",
    ),
    "no rows": ({"id": pa.array([], pa.int64()), "v": column(GOOD[:0])}, "none of the 0 ids"),
}


def read_all(path: Path, feature: SparseFeature = IDENTITY) -> None:
    vectors = vectors_of(path, feature)
    vectors.count_rows()
    read_rows(vectors)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("rows_at_once", [1, 100])
def test_what_does_not_fit_is_refused_with_its_place_and_the_fix(tmp_path: Path, name: str, rows_at_once: int) -> None:
    columns, message = WRONG[name]
    (tmp_path / "v").mkdir()
    # A good file before it: rows are counted in their own file.
    good = {"id": [11, 12, 13, 14, 15], "v": column(np.ones((5, DIM), np.float32))}
    if name not in ("text ids", "none with a row", "no rows"):
        pq.write_table(pa.table(good), tmp_path / "v" / "0.parquet")
    pq.write_table(pa.table(columns), tmp_path / "v" / "1.parquet", row_group_size=rows_at_once)
    with (
        mock.patch.object(initial_vectors, "_BATCH_IDS", rows_at_once),
        pytest.raises(DataError, match=message.replace("FILE", "1.parquet")) as caught,
    ):
        read_all(tmp_path / "v")
    assert caught.value.fix and caught.value.column in ("id", "v")


def test_an_id_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    for number, ids in enumerate(([5, 6, 7], [8, 9, 6])):
        pq.write_table(pa.table({"id": ids, "v": column(np.ones((3, DIM)))}), tmp_path / f"{number}.parquet")
    with pytest.raises(
        DataError, match=r"also in row 1 of .*0.parquet \(file .*1.parquet, row 2, column 'id', value 6"
    ):
        read_all(tmp_path)


def test_ids_of_another_type_than_the_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("a\nb\n")
    pq.write_table(pa.table({"id": [1, 2], "v": column(np.ones((2, DIM)))}), tmp_path / "v.parquet")
    feature = SparseFeature(name="item", mapping=Vocabulary(path=str(tmp_path / "items.txt")))
    with pytest.raises(DataError, match="has a vocabulary of strings; it must be a string; the column's type is int64"):
        read_all(tmp_path / "v.parquet", feature)


def test_a_missing_file_and_one_that_is_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere"):
        read_all(tmp_path / "nowhere.parquet")
    pq.write_table(
        pa.table({"id": np.arange(20), "v": column(np.random.default_rng(0).normal(size=(20, DIM)))}),
        tmp_path / "v.parquet",
        compression="zstd",
    )
    raw = bytearray((tmp_path / "v.parquet").read_bytes())
    raw[4:200] = bytes(196)
    (tmp_path / "v.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"not readable as Parquet.*v.parquet"):
        read_all(tmp_path / "v.parquet")


def test_the_text_counts_rows_and_ids(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("".join(f"i{number}\n" for number in range(20)))
    ids = [f"i{number}" for number in range(2, 25)]
    columns = {"id": ids, "row": np.arange(23), "v": column(np.ones((23, DIM)))}
    pq.write_table(pa.table(columns), tmp_path / "v.parquet")
    texts = {}
    for kind, mapping in (("vocabulary", Vocabulary(path=str(tmp_path / "items.txt"))), ("hash", Hash())):
        vectors = vectors_of(tmp_path / "v.parquet", SparseFeature(name="item", mapping=mapping))
        texts[kind] = vectors.text(vectors.count_rows(), 1000).replace(f"{tmp_path}/", "")
    known = "table 'item': 18 of 1,000 rows start from v.parquet; 5 ids are not in the vocabulary"
    assert texts["vocabulary"] == known
    hashed = Mapping(
        Schema(sparse=[SparseFeature(name="item", mapping=Hash())]), {"item": ROWS}, labels=False
    ).to_batch({"item": ids})
    rows = len(set(hashed.sparse.values().tolist()))
    assert texts["hash"] == (
        f"table 'item': {rows} of 1,000 rows start from v.parquet; {23 - rows} ids had the same hash as another, and "
        "the last one counts"
    )
    vectors = vectors_of(tmp_path / "v.parquet", SparseFeature(name="item"), id="row")
    assert vectors.text(initial_vectors.NamedRows(ids=3, rows=2, without_row=1), 5).endswith(
        "; 1 id is outside the table's rows"
    )


@pytest.mark.parametrize("failing", range(7))
def test_a_read_that_fails_is_continued_where_it_was(tmp_path: Path, failing: int) -> None:
    ids, numbers = np.arange(20), np.random.default_rng(0).normal(size=(20, DIM)).astype(np.float32)
    pq.write_table(pa.table({"id": ids, "v": column(numbers)}), tmp_path / "v.parquet", row_group_size=3)
    whole = read_rows(vectors_of(tmp_path / "v.parquet", IDENTITY))
    vectors = vectors_of(tmp_path / "v.parquet", IDENTITY, patience=Patience(retries=1))
    iter_batches, failures = pq.ParquetFile.iter_batches, [0]

    def failing_once(self: pq.ParquetFile, *args: Any, **options: Any) -> Any:
        for number, batch in enumerate(iter_batches(self, *args, **options)):
            if number == failing and not failures[0]:
                failures[0] += 1
                raise OSError("the connection was reset")
            yield batch

    with (
        mock.patch.object(initial_vectors, "_BATCH_IDS", 3),
        mock.patch.object(pq.ParquetFile, "iter_batches", failing_once),
        mock.patch("rayrec.storage.retries.FIRST_WAIT_S", 0.001),
    ):
        assert read_rows(vectors) == whole
    assert failures == [1]
