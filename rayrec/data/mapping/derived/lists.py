"""Derived columns of lists, maps and texts: crosses, overlaps, lookups, tokens, pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, is_text, nulls_of
from rayrec.data.arrays.buffers import I64, U64, Mask
from rayrec.data.arrays.hashing import hash_texts, mix64_array, seed_of
from rayrec.data.arrays.lists import Lists, filtered_offsets, offsets_of, row_of, unnest
from rayrec.data.mapping.derived.specs import Cross, Lookup, Overlap, Pairs, Tokens
from rayrec.data.mapping.problems import Problems

# Seed that distinguishes the hashes of crosses from other hashes.
_CROSSES = 7
# Pairs of one row of a cross: two lists of a thousand ids each.
MAX_ROW_PAIRS = 1 << 20
# Joins the tokens of an n-gram. Tokens of the default separator do not contain it.
_JOIN = " "


def relisted(lists: Lists, leaf: pa.Array) -> pa.Array:
    """The lists with other elements."""
    mask = None if lists.nulls is None else pa.array(lists.nulls)
    return pa.LargeListArray.from_arrays(pa.array(lists.offsets), leaf, mask=mask)


def _hashes(array: pa.Array) -> U64:
    """A 64-bit hash of every id; undefined for nulls."""
    if pat.is_dictionary(array.type):
        distinct = _hashes(array.dictionary)
        codes = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return distinct[codes] if len(distinct) else np.zeros(len(codes), np.uint64)
    if is_text(array.type):
        return hash_texts(array.fill_null("" if not pat.is_large_binary(array.type) else b""))
    return mix64_array(_integers(array), 0)


def _integers(array: pa.Array) -> I64:
    """Integers as int64, uint64 by their bits; 0 for nulls."""
    if not (pat.is_integer(array.type) or pat.is_boolean(array.type) or pat.is_null(array.type)):
        raise TypeError(f"ids are integers or texts, not {array.type}; put numbers into buckets first")
    kind = pa.uint64() if pat.is_uint64(array.type) else pa.int64()
    numbers: I64 = pc.cast(array, kind).fill_null(0).to_numpy(zero_copy_only=False).view(np.int64)
    return numbers


def _nulls(array: pa.Array) -> Mask | None:
    return nulls_of(decoded(array) if pat.is_dictionary(array.type) and array.dictionary.null_count else array)


def cross(spec: Cross, arrays: list[pa.Array], problems: Problems, max_pairs: int | None = None) -> pa.Array:
    """Hashes each column's ids with a seed for its position, and combines them by XOR.

    A row with more than `MAX_ROW_PAIRS` pairs is a bad row, and gets none.

    Args:
        max_pairs: of all rows; rows after that many are bad rows too.
    """
    state, *columns = (_Hashed.of(array, position) for position, array in enumerate(arrays))
    for name, column in zip(spec.columns[1:], columns, strict=True):
        if state.offsets is None and column.offsets is None:
            null_rows = either(state.null_rows, column.null_rows)
            state = _Hashed(state.values ^ column.values, null_rows, None, null_rows)
            continue
        counts = state.pair_counts(column)
        too_many = counts > MAX_ROW_PAIRS
        if max_pairs is not None:
            too_many |= np.cumsum(np.minimum(counts, MAX_ROW_PAIRS)) > max_pairs
        _add_too_many_pairs(spec, name, counts, np.flatnonzero(too_many), max_pairs, problems)
        state = state.with_column(column, np.where(too_many, 0, counts))
    values = pa.array(state.values.view(np.int64), mask=state.nulls)
    if state.offsets is None:
        return values
    return relisted(Lists(values, state.offsets, state.null_rows), values)


def _add_too_many_pairs(
    spec: Cross, column: str, counts: I64, bad: I64, max_pairs: int | None, problems: Problems
) -> None:
    most = f"{MAX_ROW_PAIRS:,} pairs in a row"
    if max_pairs is not None:
        most += f" and {max_pairs:,} in all rows"
    problem = f"derived column {spec.name!r} (cross): the lists have more pairs than are computed, {most}"
    problems.add(bad, column, problem, "write shorter lists, or fewer rows", lambda k: f"{counts[bad[k]]:,} pairs")


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Hashes of the combinations of some columns.

    Args:
        values: the hashes, of lists concatenated.
        nulls: null mask of the values.
        offsets: offsets of the lists; None for one value per row.
        null_rows: null mask of the rows.
    """

    values: U64
    nulls: Mask | None
    offsets: I64 | None
    null_rows: Mask | None

    @classmethod
    def of(cls, array: pa.Array, position: int) -> _Hashed:
        lists = unnest(array) if is_list(array.type) else None
        leaf = array if lists is None else lists.leaf
        values, nulls = mix64_array(_hashes(leaf), seed_of(_CROSSES, position)), _nulls(leaf)
        return cls(values, nulls, None, nulls) if lists is None else cls(values, nulls, lists.offsets, lists.nulls)

    def pair_counts(self, other: _Hashed) -> I64:
        """The number of pairs of each row: of a value of the row with a value of the other column's row."""
        null_rows = either(self.null_rows, other.null_rows)
        pair_counts = self._lengths() * other._lengths()
        return pair_counts if null_rows is None else np.where(null_rows, 0, pair_counts)

    def with_column(self, other: _Hashed, pair_counts: I64) -> _Hashed:
        """The pairs of each row, if one of the columns has lists.

        Args:
            pair_counts: as `pair_counts` returns them; 0 for rows whose pairs are left out.
        """
        null_rows = either(self.null_rows, other.null_rows)
        offsets = offsets_of(pair_counts)
        if self.offsets is not None and other.offsets is None and np.array_equal(offsets, self.offsets):
            # Every element meets the one value of its row, which is not null, so no positions are computed.
            values = np.repeat(other.values, pair_counts)
            values ^= self.values
            return _Hashed(values, self.nulls, offsets, null_rows)
        # Each value meets the other column's values of its row, from the first on.
        other_starts = np.arange(len(pair_counts)) if other.offsets is None else other.offsets[:-1]
        partners = np.where(pair_counts > 0, other._lengths(), 0)
        if self.offsets is not None:
            lengths = np.diff(self.offsets)
            other_starts, partners = np.repeat(other_starts, lengths), np.repeat(partners, lengths)
        pairs_before = offsets_of(partners)
        positions = np.repeat(other_starts - pairs_before[:-1], partners)
        positions += np.arange(len(positions))
        values = np.repeat(self.values, partners)
        values ^= other.values[positions]
        nulls = None if self.nulls is None else np.repeat(self.nulls, partners)
        nulls = either(nulls, None if other.nulls is None else other.nulls[positions])
        return _Hashed(values, nulls, offsets, null_rows)

    def _lengths(self) -> I64:
        return np.ones(len(self.values), np.int64) if self.offsets is None else np.diff(self.offsets)


def either(left: Mask | None, right: Mask | None) -> Mask | None:
    """True where one of the masks is; None is a mask without True."""
    return right if left is None else left if right is None else left | right


def overlap(spec: Overlap, arrays: list[pa.Array], _: Problems) -> pa.Array:
    """Counts common distinct ids by sorting keys (row, id, list number)."""
    kinds = {is_text(array.type.value_type) for array in arrays if is_list(array.type)}
    if not all(is_list(array.type) or pat.is_null(array.type) for array in arrays) or len(kinds) == 2:
        raise TypeError("an overlap needs two lists, both of texts or both of integers")
    (ids, rows), (other_ids, other_rows) = map(_elements, arrays)
    codes, bits = _numbered(ids, other_ids)
    keys = ((np.concatenate([rows, other_rows]) << bits) | codes) << 1
    keys[len(rows) :] |= 1
    keys.sort()
    keys = keys[np.diff(keys, prepend=-1) != 0]
    common = keys[1:][(keys[1:] & 1 == 1) & (np.diff(keys) == 1)]
    count = np.bincount(common >> (bits + 1), minlength=len(arrays[0]))
    nulls = either(_nulls(arrays[0]), _nulls(arrays[1]))
    if spec.measure == "count":
        return pa.array(count, mask=nulls)
    if spec.measure == "any":
        return pa.array((count > 0).astype(np.int64), mask=nulls)
    distinct = np.bincount(keys[keys & 1 == 0] >> (bits + 1), minlength=len(count))
    return pa.array(count / np.maximum(distinct, 1), mask=nulls)


def _elements(array: pa.Array) -> tuple[pa.Array, I64]:
    """All elements that are not null, and the row of each."""
    if pat.is_null(array.type):
        return array.slice(0, 0), np.empty(0, np.int64)
    lists = unnest(array)
    leaf, rows = decoded(lists.leaf), np.repeat(np.arange(len(array)), np.diff(lists.offsets))
    nulls = nulls_of(leaf)
    return (leaf, rows) if nulls is None else (leaf.drop_null(), rows[~nulls])


def _numbered(left: pa.Array, right: pa.Array) -> tuple[I64, int]:
    """Numbers for the ids of both arrays, equal for equal ids, and the bits that they need, fewer than 32."""
    if is_text(left.type) or is_text(right.type):
        kind = pa.large_binary()
        ids = pa.concat_arrays([left.cast(kind), right.cast(kind)])
    else:
        numbers = np.concatenate([_integers(left), _integers(right)])
        lowest, highest = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        if highest - lowest < 1 << 30:
            return numbers - lowest, (highest - lowest).bit_length()
        ids = pa.array(numbers)
    encoded = pc.dictionary_encode(ids)
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary).bit_length()


def _map_entries(array: pa.Array) -> tuple[Lists, pa.Array, pa.Array]:
    """A map column as lists of entries, with all keys and values."""
    if not pat.is_map(array.type):
        raise TypeError("it must be a map column")
    entries = pa.list_(pa.struct([("key", array.type.key_type), ("value", array.type.item_type)]))
    lists = unnest(array.cast(entries))
    return lists, pc.struct_field(lists.leaf, "key"), pc.struct_field(lists.leaf, "value")


def lookup(spec: Lookup, arrays: list[pa.Array], _: Problems) -> pa.Array:
    """The value of the first entry with the key."""
    if pat.is_null(arrays[0].type):
        return arrays[0]
    lists, keys, values = _map_entries(arrays[0])
    rows = np.repeat(np.arange(len(arrays[0])), np.diff(lists.offsets))
    if spec.key is None:
        wanted_keys = pa.scalar(spec.value, pa.string() if isinstance(spec.value, str) else pa.int64()).cast(keys.type)
    else:
        by_row = decoded(arrays[1])
        if not (is_text(by_row.type) == is_text(keys.type) or pat.is_null(by_row.type)):
            raise TypeError("the keys have another type than those of the map")
        wanted_keys = by_row.take(pa.array(rows)).cast(keys.type)
    hits = np.flatnonzero(pc.equal(keys, wanted_keys).fill_null(False).to_numpy(zero_copy_only=False))
    entry_of_row = np.full(len(arrays[0]), -1)
    entry_of_row[rows[hits[::-1]]] = hits[::-1]
    return values.take(pa.array(entry_of_row, mask=entry_of_row < 0))


def pairs(_: Pairs, arrays: list[pa.Array], __: Problems) -> pa.Array:
    """Map entries as `list<struct<id, weight>>`, the input of a weighted feature."""
    if pat.is_null(arrays[0].type):
        return arrays[0]
    lists, keys, values = _map_entries(arrays[0])
    return relisted(lists, pa.StructArray.from_arrays([keys, values], ["id", "weight"]))


def tokens(spec: Tokens, arrays: list[pa.Array], _: Problems) -> pa.Array:
    """Splits texts into tokens; each entry of a dictionary once."""
    (array,) = arrays
    if pat.is_dictionary(array.type):
        encoded = tokens(spec, [array.dictionary], _)
        return encoded.take(array.indices)
    if not (is_text(array.type) or pat.is_null(array.type)):
        raise TypeError("tokens need texts")
    texts = array.cast(pa.large_string())
    texts = pc.utf8_lower(texts) if spec.lower else texts
    lists = unnest(pc.split_pattern_regex(texts, pattern=spec.separator))
    keep = pc.not_equal(lists.leaf, "").to_numpy(zero_copy_only=False)
    lists = Lists(lists.leaf.filter(pa.array(keep)), filtered_offsets(lists.offsets, keep), lists.nulls)
    lists = lists if spec.ngrams == [1] else _ngrams(lists, spec.ngrams)
    return _counted(lists) if spec.counts else relisted(lists, lists.leaf)


def _ngrams(lists: Lists, sizes: list[int]) -> Lists:
    """The n-grams of each row, ordered by size, then by position."""
    leaf, rows = lists.leaf, row_of(lists.offsets, np.arange(len(lists.leaf)))
    texts, rows_of_size = [], []
    for size in sizes:
        last = max(len(leaf) - size + 1, 0)
        inside = np.flatnonzero(rows[:last] == rows[size - 1 :][:last])
        tokens_at = [leaf.take(pa.array(inside + step)) for step in range(size)]
        texts.append(
            tokens_at[0] if size == 1 else pc.binary_join_element_wise(*tokens_at, pa.scalar(_JOIN, leaf.type))
        )
        rows_of_size.append(rows[inside])
    joined = np.concatenate(rows_of_size)
    order = np.argsort(joined, kind="stable")
    lengths = np.bincount(joined, minlength=len(lists.offsets) - 1)
    return Lists(pa.concat_arrays(texts).take(pa.array(order)), offsets_of(lengths), lists.nulls)


def _counted(lists: Lists) -> pa.Array:
    """The distinct tokens of each row in the order of first occurrence, with their counts as weights."""
    encoded = pc.dictionary_encode(lists.leaf)
    rows = row_of(lists.offsets, np.arange(len(lists.leaf)))
    keys = rows * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy(zero_copy_only=False)
    _, first_positions, counts = np.unique(keys, return_index=True, return_counts=True)
    order = np.argsort(first_positions)
    first_positions, counts = first_positions[order], counts[order]
    ids = lists.leaf.take(pa.array(first_positions))
    leaf = pa.StructArray.from_arrays([ids, pa.array(counts.astype(np.float32))], ["id", "weight"])
    offsets = offsets_of(np.bincount(rows[first_positions], minlength=len(lists.offsets) - 1))
    return relisted(Lists(leaf, offsets, lists.nulls), leaf)
