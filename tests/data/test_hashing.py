"""Hashes: the same for ever, and spread over rows as if they were drawn."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data.arrays.hashing import hash_rows, hash_strings, mix64, mix64_array, seed_of, text_rows, to_rows
from tests.data.reference import hashed_row, hashed_text


def test_hashes_never_change_and_agree() -> None:
    values = np.array([0, 1, -1, 2**62, -(2**63)], np.int64)
    assert mix64_array(values, 9).tolist() == [mix64(v + 9) for v in values.tolist()]
    assert mix64(1) == 0x5692161D100B05E5
    assert seed_of(1, 2) != seed_of(2, 1)
    assert hash_strings([b"a", b""], 0).tolist() == [0x3A030DABA6EC79B9, 0x3C1B4FBFD8FFAFC3]
    assert mix64_array(values.view(np.uint64), 9).tolist() == mix64_array(values, 9).tolist()
    assert hash_rows(values, 9, 1000).tolist() == [759, 910, 573, 423, 161]
    texts = pa.array(["", "a", "seven77", "eight888", "Zürich, a longer one"])
    assert text_rows(texts, 9, 1000, 1).tolist() == [589, 51, 21, 979, 249]
    assert text_rows(texts, 9, 1000, 2).tolist() == [809, 165, 773, 256, 543]
    large = [2894859360, 3206201923, 3180813742, 4110738951, 866681897]
    assert text_rows(texts, 9, (1 << 32) + 1, 2).tolist() == large


@settings(max_examples=50)
@given(st.integers(1, 1 << 40), st.integers(0, (1 << 64) - 1), st.sampled_from([1, 2**20, 2**40]))
def test_hashed_rows_are_those_of_the_plain_law(num_rows: int, seed: int, stride: int) -> None:
    values = np.arange(-50, 50) * stride
    rows = hash_rows(values, seed, num_rows)
    assert rows.tolist() == [hashed_row(value, seed, num_rows) for value in values.tolist()]
    assert rows.min() >= 0 and rows.max() < num_rows
    assert rows.dtype == (np.int32 if num_rows <= 1 << 31 else np.int64)
    assert hash_rows(values.view(np.uint64), seed, num_rows).tolist() == rows.tolist()


@settings(max_examples=50)
@given(
    st.lists(st.one_of(st.none(), st.text(), st.text(max_size=9), st.text("\0a", max_size=20))),
    st.integers(1, 1 << 40),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.string_view()]),
    st.integers(0, 3),
)
def test_rows_of_texts_are_those_of_the_plain_laws(
    texts: list[str | None], num_rows: int, seed: int, kind: pa.DataType, start: int
) -> None:
    array = pa.array(texts, pa.string()).cast(kind)[start:]
    for law in (1, 2):
        rows = text_rows(array, seed, num_rows, law).tolist()
        assert all(0 <= row < num_rows for row in rows)
        wanted = [None if text is None else hashed_text(text.encode(), seed, num_rows, law) for text in texts[start:]]
        assert [row if text is not None else None for row, text in zip(rows, texts[start:], strict=True)] == wanted


TEXT_PATTERNS = {
    "numbers": [str(n) for n in range(100_000)],
    "padded": [f"user_{n:016d}" for n in range(100_000)],
    "at the end": [f"{'x' * 21}{n:05d}" for n in range(100_000)],
    "hexadecimal": [f"{n << 20:x}" for n in range(100_000)],
    "lengths": ["a" * n + "b" * m for n in range(320) for m in range(313)][:100_000],
}


@pytest.mark.parametrize("num_rows", [97, 1 << 14, 1_000_003])
@pytest.mark.parametrize("pattern", TEXT_PATTERNS)
def test_rows_of_texts_are_spread_as_if_drawn(pattern: str, num_rows: int) -> None:
    expected = 100_000 / num_rows
    for seed in (seed_of(0), seed_of(1)):
        rows = text_rows(pa.array(TEXT_PATTERNS[pattern]), seed, num_rows, 2)
        counts = np.bincount(rows, minlength=num_rows)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < num_rows - 1 + 6 * (2 * (num_rows - 1)) ** 0.5


def test_hashed_rows_do_not_depend_on_blocks_or_neighbours() -> None:
    values = np.concatenate([np.arange(40_000), np.arange(30_000) << 33])  # small ids, then large ones
    rows = hash_rows(values, 3, 1000)
    order = np.random.default_rng(0).permutation(len(values))
    assert (hash_rows(values[order], 3, 1000) == rows[order]).all()


PATTERNS = {
    **{f"multiples of {n}": np.arange(100_000) * n for n in (1, 10, 10**6, 86_400 * 10**9)},
    **{f"multiples of 2**{n}": np.arange(100_000) << n for n in (6, 16, 31, 32, 33, 46)},
    **{f"pairs, {n} bits apart": ((np.arange(250) << n)[:, None] | np.arange(400)).ravel() for n in (9, 24, 32, 48)},
    "negative ids": -np.arange(1, 100_001),
    "hashes": mix64_array(np.arange(100_000), 5).view(np.int64),
    "hashes of 32 bits": (mix64_array(np.arange(100_000), 5) >> np.uint64(32)).view(np.int64),
}


@pytest.mark.parametrize("num_rows", [97, 1 << 14, 1_000_003])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hashed_rows_are_spread_as_if_drawn(pattern: str, num_rows: int) -> None:
    """Chi-squared of rows' counts within six sigmas of that of uniform draws, for ids as people number things."""
    expected = 100_000 / num_rows
    for seed in (seed_of(0), seed_of(1)):
        counts = np.bincount(hash_rows(PATTERNS[pattern], seed, num_rows), minlength=num_rows)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < num_rows - 1 + 6 * (2 * (num_rows - 1)) ** 0.5


def test_seeds_hash_independently() -> None:
    """Pairs of rows under two seeds are nearly all different, as if each were drawn anew."""
    ids, num_rows = np.arange(300_000), 10_000
    one, other = (hash_rows(ids, seed_of(n), num_rows).astype(np.int64) for n in (1, 2))
    found = len(np.unique(one * num_rows + other))
    expected = num_rows**2 * (1 - np.exp(-len(ids) / num_rows**2))
    assert abs(found - expected) < 150


@pytest.mark.parametrize("num_rows", [1, 7, (1 << 31) + 1, 1 << 32, (1 << 32) + 1, 1 << 40])
def test_hashes_are_scaled_up_to_32_bits_and_divided_beyond(num_rows: int) -> None:
    hashes = [0, 1, 1 << 32, (1 << 63) + 12345, (1 << 64) - 1]
    wanted = [one % num_rows if num_rows > 1 << 32 else (one >> 32) * num_rows >> 32 for one in hashes]
    assert to_rows(np.array(hashes, np.uint64), num_rows).tolist() == wanted
