"""The rows of an item table that are items, also where the mapping spreads a vocabulary over the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import Vocabulary
from rayrec.data.mapping.spread import multiplier, vocabulary_rows
from rayrec.models.corpus import Corpus


@given(count=st.integers(0, 200), first=st.integers(0, 5), spread=st.integers(1, 300))
def test_items_have_the_rows_of_the_mapping(count: int, first: int, spread: int) -> None:
    corpus = Corpus(count, first, spread, multiplier(spread))
    rows = corpus.all_rows()
    rule = Vocabulary(path="ids.txt", oov_rows=first, spread_over=first + spread)
    assert rows.tolist() == vocabulary_rows(np.arange(count), rule).tolist()
    table = torch.arange(first + max(count, spread) + 3)
    expected = {row: item for item, row in enumerate(rows.tolist())}
    assert corpus.items(table).tolist() == [expected.get(row, -1) for row in table.tolist()]


@pytest.mark.parametrize("spread", [(1 << 31) - 1, 1 << 31])
def test_products_of_large_tables_do_not_overflow(spread: int) -> None:
    corpus = Corpus(spread, 1, spread, multiplier(spread))
    items = torch.tensor([0, 1, spread // 2, spread - 1])
    assert corpus.rows(items).tolist() == [1 + item * multiplier(spread) % spread for item in items.tolist()]
    assert corpus.items(corpus.rows(items)).tolist() == items.tolist()


def test_a_larger_table_is_refused() -> None:
    with pytest.raises(ValueError, match="2\\^31"):
        Corpus(3, 0, (1 << 31) + 1, 3)
