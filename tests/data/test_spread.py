"""The ids of a vocabulary are spread over the rows of a table, so that ranks get equal shares of the lookups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import DataError, Mapping, Schema, Vocabulary, count_column
from rayrec.data.mapping.spread import multiplier, vocabulary_rows


def rows_of(size: int, spread_over: int, oov_rows: int) -> Any:
    mapping = Vocabulary(path="ids.txt", oov_rows=oov_rows, spread_over=spread_over)
    return vocabulary_rows(np.arange(size), mapping)


@given(rows=st.integers(0, 3000), oov_rows=st.integers(0, 9), more=st.integers(0, 50))
def test_every_id_has_a_row_of_its_own(rows: int, oov_rows: int, more: int) -> None:
    size = max(0, rows - oov_rows)
    assert sorted(rows_of(size, rows, oov_rows)) == [*range(oov_rows, oov_rows + size)]
    grown = rows_of(size + more, rows, oov_rows)
    assert grown[size:].tolist() == [*range(oov_rows + size, oov_rows + size + more)]
    assert grown[:size].tolist() == rows_of(size, rows, oov_rows).tolist()


@given(size=st.integers(1, 1 << 32), positions=st.lists(st.integers(0, (1 << 32) - 1), max_size=40))
def test_large_tables_have_an_inverse(size: int, positions: list[int]) -> None:
    inside = np.array([position % size for position in positions], np.int64)
    rows = vocabulary_rows(inside, Vocabulary(path="ids.txt", oov_rows=0, spread_over=size))
    inverse = pow(multiplier(size), -1, size) if size > 1 else 0
    assert [row * inverse % size for row in rows.tolist()] == inside.tolist()


@given(spread_over=st.integers(0, 1 << 32), oov_rows=st.integers(0, 9))
def test_unknown_ids_stay_unknown(spread_over: int, oov_rows: int) -> None:
    mapping = Vocabulary(path="ids.txt", oov_rows=oov_rows, spread_over=spread_over)
    assert vocabulary_rows(np.array([-1]), mapping).tolist() == [-1]


@pytest.mark.parametrize(
    ("exponent", "ranks", "rows"),
    [(0.6, 8, 10**5), (0.75, 8, 10**6), (0.75, 64, 10**7), (0.6, 64, 10**6), (1.05, 8, 10**7)],
)
def test_every_rank_gets_its_share_of_the_lookups(exponent: float, ranks: int, rows: int) -> None:
    share = np.arange(1, rows + 1.0) ** -exponent
    share /= share.sum()
    share[0] = 0  # the hottest id is on one rank in every order
    block = -(-rows // ranks)

    def worst(row: Any) -> float:
        return float(np.bincount(row // block, share, minlength=ranks).max() * ranks)

    assert worst(rows_of(rows, rows, 0)) < 1.2
    assert worst(np.arange(rows)) > 3, "in the order of the vocabulary"


@pytest.mark.parametrize("part", [0.3, 0.5, 0.9])
def test_spare_rows_are_spread_too(part: float) -> None:
    rows = rows_of(int(part * 100_000), 100_000, 1)
    counts = np.bincount(rows // 12_500, minlength=8)
    assert counts.max() < 1.01 * counts.mean()


def test_an_extended_vocabulary_keeps_the_rows_of_its_ids(tmp_path: Path) -> None:
    for day, ids in enumerate((["b", "a", "b"], ["d", "a", "c", "d"])):
        pq.write_table(pa.table({"id": ids}), tmp_path / f"{day}.parquet")
    schema: dict[str, Any] = {"kind": "vocabulary", "oov_rows": 2, "spread_over": 20}
    out, seen = tmp_path / "ids.parquet", {}
    for day in range(2):
        count_column(str(tmp_path / f"{day}.parquet"), "id", out, extend=str(out) if day else None)
        sparse = [{"name": "id", "mapping": schema | {"path": str(out)}}]
        for table_rows in (20, 30):
            mapping = Mapping(Schema.model_validate({"sparse": sparse}), {"id": table_rows}, labels=False)
            ids = ["a", "b", "c", "d"]
            rows = dict(zip(ids, mapping.to_batch({"id": ids}).sparse["id"].values().tolist(), strict=True))
            known = {name: row for name, row in rows.items() if row >= 2}
            assert len({*known.values()}) == len(known) == 2 + 2 * day
            assert {name: known[name] for name in seen} == seen
        seen = known


def test_a_table_smaller_than_the_rows_among_which_ids_are_spread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("a\nb\n")
    mapping = {"kind": "vocabulary", "path": str(tmp_path / "ids.txt"), "spread_over": 20}
    schema = Schema.model_validate({"sparse": [{"name": "id", "mapping": mapping}]})
    with pytest.raises(DataError, match="its table has 19 rows, but its ids are spread over 20; fix: raise the table"):
        Mapping(schema, {"id": 19})
