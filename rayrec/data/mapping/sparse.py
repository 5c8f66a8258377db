"""Maps the id columns of sparse features to table rows: values and offsets per feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import decoded, floats_of, int64_of, is_text, nulls_of, shown
from rayrec.data.arrays.buffers import F32, I64, Mask
from rayrec.data.arrays.hashing import (
    MOST_ROWS_32,
    TableRows,
    bytes_of,
    hash_rows,
    hash_rows_of_each,
    hash_strings,
    hash_texts,
    row_type,
    seed_of,
    text_rows,
)
from rayrec.data.arrays.lists import filtered_offsets, offsets_of, row_of, truncate, unnest
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import FEW_ROWS, Ids
from rayrec.data.mapping.rules import FIRST_TEXT_LAW, Dynamic, Hash, Identity, IdMapping, Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.dynamic_ids.layout import HASHED, ZERO

if TYPE_CHECKING:
    from rayrec.dynamic_ids.exported import ExportedIds

# Up to this vocabulary size, dictionary-encode strings and look up the distinct ones: faster than every string.
_SMALL_VOCABULARY = 4096
_SAMPLE = 4096
_INT64 = pa.int64().id


def map_sparse(feature: SparseFeature, columns: Mapping[str, pa.Array], num_rows: int, problems: Problems) -> Ids:
    """Maps one feature to bags of table rows in `[0, num_rows)`, or of dynamic ids as they are. Adds bad rows to
    `problems`."""
    array = columns[feature.column]
    if feature.kind == "id":
        bags = _Bags(feature, num_rows, problems, leaf=array, offsets=None, null_lists=None, weights=None)
        return bags.mapped()
    lists = unnest(array)
    leaf, offsets, weights = lists.leaf, lists.offsets, None
    if feature.weight_column is not None:
        weights = _weights_of_column(feature, columns[feature.weight_column], offsets, problems)
    elif feature.kind == "weighted_id_list":
        leaf, weights = _pairs(feature, lists.leaf, offsets, problems)
    if feature.max_length is not None and (cut := truncate(offsets, feature.max_length, feature.keep)) is not None:
        positions, offsets = cut
        leaf, weights = leaf.take(pa.array(positions)), None if weights is None else weights[positions]
    return _Bags(feature, num_rows, problems, leaf, offsets, lists.nulls, weights).mapped()


def map_few(
    features: Sequence[SparseFeature], columns: Mapping[str, pa.Array], rows_of: Mapping[str, int], num_rows: int
) -> dict[str, Ids]:
    """Maps features of few rows together, where it can: one integer id per row, without nulls and bad rows, that is a
    table row or is hashed. `map_sparse` maps the others.

    The calls for each feature take most of the time of a request with one row.
    """
    if not 0 < num_rows <= FEW_ROWS:
        return {}
    of_kind: dict[str, list[SparseFeature]] = {"identity": [], "hash": []}
    for feature in features:
        array, fits = columns[feature.column], rows_of[feature.name] <= MOST_ROWS_32
        if feature.kind == "id" and fits and array.type.id == _INT64 and not array.null_count:
            of_kind.get(feature.mapping.kind, []).append(feature)
    mapped: dict[str, Ids] = {}
    for kind, same in of_kind.items():
        if len(same) < 2:
            continue
        ids = np.empty((len(same), num_rows), np.int64)
        for number, feature in enumerate(same):
            ids[number] = columns[feature.column].to_numpy()
        sizes = [rows_of[feature.name] for feature in same]
        if kind == "hash":
            seeds = [seed_of(feature.mapping.seed) for feature in same]  # type: ignore[union-attr]
            ids = hash_rows_of_each(ids, seeds, sizes)
        elif (ids.view(np.uint64) >= np.array(sizes, np.uint64)[:, None]).any():
            continue
        offsets = np.arange(num_rows + 1)
        for number, feature in enumerate(same):
            rows = ids[number].astype(row_type(sizes[number]), copy=False)
            mapped[feature.name] = Ids(rows, None if feature.always_one else offsets)
    return mapped


@dataclass(frozen=True, slots=True)
class _Bags:
    """A feature being mapped from ids to table rows. `offsets` is None for one id per row."""

    feature: SparseFeature
    num_rows: int
    problems: Problems
    leaf: pa.Array
    offsets: I64 | None
    null_lists: Mask | None
    weights: F32 | None

    def mapped(self) -> Ids:
        feature = self.feature
        values, nulls, outside = map_leaf(self.leaf, feature, self.num_rows)
        keep: Mask | None = None
        if nulls is not None:
            keep = self._nulls(values, nulls)
        if outside is not None:
            keep = self._outside(values, outside, keep)
        offsets, weights = self.offsets, self.weights
        if keep is not None:
            values = values[keep]
            weights = None if weights is None else weights[keep]
            offsets = filtered_offsets(offsets if offsets is not None else np.arange(len(keep) + 1), keep)
        elif offsets is None and not feature.always_one:
            offsets = np.arange(len(values) + 1)
        if self.null_lists is not None:
            values, offsets, weights = self._null_lists(self.null_lists, values, offsets, weights)
        kind = np.int64 if isinstance(feature.mapping, Dynamic) else row_type(self.num_rows)
        return Ids(values.astype(kind, copy=False), offsets, weights)

    def _row_of(self, positions: I64) -> I64:
        return positions if self.offsets is None else row_of(self.offsets, positions)

    @property
    def _drops(self) -> bool:
        """Whether ids without a row, -1, are left out."""
        mapping = self.feature.mapping
        return isinstance(mapping, Dynamic) and mapping.path is not None

    def _default_row(self) -> int:
        default = pa.array([self.feature.default], self._id_type())
        return int(map_leaf(default, self.feature, self.num_rows)[0][0])

    def _id_type(self) -> pa.DataType:
        kind = self.leaf.type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def _nulls(self, values: TableRows, nulls: Mask) -> Mask | None:
        """Handles null ids. Returns the mask of the values that remain, None if all do."""
        feature = self.feature
        if feature.on_null == "empty":
            return ~nulls
        if feature.on_null == "default":
            values[nulls] = default = self._default_row()
            return ~nulls if default < 0 and self._drops else None
        self._report_nulls(self._row_of(np.flatnonzero(nulls)), "a null id")
        return None

    def _null_lists(
        self, null_lists: Mask, values: TableRows, offsets: I64 | None, weights: F32 | None
    ) -> tuple[TableRows, I64 | None, F32 | None]:
        """Handles null lists, which have no values yet."""
        assert offsets is not None
        if self.feature.on_null == "error":
            self._report_nulls(np.flatnonzero(null_lists), "a null list")
        default = self._default_row() if self.feature.on_null == "default" else -1
        if self.feature.on_null != "default" or (default < 0 and self._drops):
            return values, offsets, weights
        positions = offsets[:-1][null_lists]
        values = np.insert(values, positions, default)
        weights = None if weights is None else np.insert(weights, positions, np.float32(1.0))
        return values, offsets_of(np.diff(offsets) + null_lists), weights

    def _report_nulls(self, rows: I64, description: str) -> None:
        name = self.feature.name
        fix = f"fill the nulls, or set `on_null: empty` or `default: <id>` for feature {name!r}"
        self.problems.add(rows, self.feature.column, f"feature {name!r} has {description}", fix, lambda _: "null")

    def _outside(self, values: TableRows, outside: I64, keep: Mask | None) -> Mask | None:
        """Handles ids outside the table; `values` contains them."""
        mapping = self.feature.mapping
        bounds = mapping.bounds if isinstance(mapping, Identity) else "error"
        bounds = "drop" if isinstance(mapping, Dynamic) else bounds
        if bounds == "drop":
            keep = np.ones(len(values), dtype=np.bool_) if keep is None else keep
            keep[outside] = False
            return keep
        if bounds == "clip":
            signed = pa.types.is_signed_integer(self._id_type())
            values[outside] = np.where(signed & (values[outside] < 0), 0, self.num_rows - 1)
            return keep
        name, leaf = self.feature.name, self.leaf
        problem = f"the id is outside its table's rows [0, {self.num_rows})"
        fix = f"raise the rows of the table of {name!r} above the largest id, or set mapping: {{kind: hash}}"
        if isinstance(mapping, Vocabulary):
            problem = "the id is not in its vocabulary"
            fix = "build the vocabulary from this data, or set oov_rows to at least 1"
        rows, problem = self._row_of(outside), f"feature {name!r}: {problem}"
        self.problems.add(rows, self.feature.column, problem, fix, lambda k: shown(leaf, int(outside[k])))
        values[outside] = 0
        return keep


def map_leaf(leaf: pa.Array, feature: SparseFeature, num_rows: int) -> tuple[TableRows, Mask | None, I64 | None]:
    """Maps a flat array of ids to table rows. Dynamic ids stay ids, strings as 64-bit hashes: their table has the rows.

    Returns:
        the rows, writable; the null mask, or None; the positions of ids outside `[0, num_rows)`, whose rows are
        meaningless, or None.
    """
    leaf = leaf if is_text(leaf.type) else decoded(leaf)
    mapping = feature.mapping
    if is_text(leaf.type):
        return _map_texts(leaf, mapping, num_rows)
    nulls = nulls_of(leaf)
    raw = int64_of(leaf.fill_null(0) if nulls is not None else leaf)
    if isinstance(mapping, Hash):
        return hash_rows(raw, seed_of(mapping.seed), num_rows), nulls, None
    if isinstance(mapping, Vocabulary):
        return _with_unknown(_look_up(raw, mapping), nulls, mapping)
    if isinstance(mapping, Dynamic):
        rows = _rows_of_dynamic(raw if nulls is None else raw.copy(), mapping)
        return rows, nulls, _without_row(rows, nulls, mapping)
    # As unsigned numbers, negative ids are larger than any table.
    unsigned = raw.view(np.uint64)
    outside = np.flatnonzero(unsigned >= np.uint64(num_rows)) if len(raw) and unsigned.max() >= num_rows else None
    owns = raw.flags.writeable and raw.flags.owndata
    return raw if owns or (outside is None and nulls is None) else raw.copy(), nulls, outside


def _rows_of_dynamic(ids: I64, mapping: Dynamic) -> I64:
    """The rows of ids by an exported map, -1 for one without a row; the ids themselves in training."""
    if mapping.path is None:
        return ids
    rows: I64 = _exported(mapping.path).find(ids, ZERO if mapping.unseen == "zero" else HASHED)
    return rows


@lru_cache(maxsize=64)
def _exported(path: str) -> ExportedIds:
    from rayrec.dynamic_ids.exported import ExportedIds  # its loops load torch, which other mappings do without

    return ExportedIds(path)


def _without_row(rows: TableRows, nulls: Mask | None, mapping: Dynamic) -> I64 | None:
    if mapping.path is None or mapping.unseen != "zero":
        return None
    unknown = rows < 0 if nulls is None else (rows < 0) & ~nulls
    return np.flatnonzero(unknown) if unknown.any() else None


def _look_up(ids: I64 | pa.Array, mapping: Vocabulary) -> I64:
    """Table rows of integers or strings; negative for unknown ids if `oov_rows` is 0."""
    positions = load_vocabulary(mapping.path).find(ids)
    rows = vocabulary_rows(positions, mapping)
    if not mapping.oov_rows:
        return rows
    unknown = np.flatnonzero(positions < 0)
    rows[unknown] = 0 if mapping.oov_rows == 1 else _hashed(ids, unknown, mapping.oov_rows)
    return rows


def _hashed(ids: I64 | pa.Array, positions: I64, num_rows: int) -> TableRows:
    """Hashes the ids at some positions to table rows."""
    if isinstance(ids, pa.Array):
        return hash_rows(hash_strings(bytes_of(ids.take(pa.array(positions))), 0).view(np.int64), seed_of(0), num_rows)
    return hash_rows(ids[positions], seed_of(0), num_rows)


def _map_texts(leaf: pa.Array, mapping: IdMapping, num_rows: int) -> tuple[TableRows, Mask | None, I64 | None]:
    """`map_leaf` for strings. Maps each distinct string once where that is faster than finding the distinct ones."""
    if not pa.types.is_dictionary(leaf.type):
        if _is_fast(mapping) and _mostly_distinct(leaf):
            return _with_unknown(_rows_of_texts(leaf, mapping, num_rows), nulls_of(leaf), mapping)
        leaf = pc.dictionary_encode(leaf)
    texts, indices = leaf.dictionary, leaf.indices
    distinct = _rows_of_texts(texts, mapping, num_rows)
    codes = indices.fill_null(0).to_numpy(zero_copy_only=False) if indices.null_count else indices.to_numpy()
    nulls = nulls_of(indices)
    if texts.null_count:
        empty = texts.is_null().to_numpy(zero_copy_only=False)[codes]
        nulls = empty if nulls is None else nulls | empty
    rows = distinct[codes] if len(distinct) else np.zeros(len(codes), np.int64)
    return _with_unknown(rows, nulls, mapping)


def _is_fast(mapping: IdMapping) -> bool:
    """True if mapping a string costs less than `dictionary_encode`."""
    if isinstance(mapping, Vocabulary):
        return load_vocabulary(mapping.path).size > _SMALL_VOCABULARY
    hashed = isinstance(mapping, Hash) and mapping.text_law not in (None, FIRST_TEXT_LAW)
    return hashed or isinstance(mapping, Dynamic)


def _mostly_distinct(texts: pa.Array) -> bool:
    """True unless a sample of many strings repeats them so often that finding the distinct ones pays."""
    return len(texts) < 4 * _SAMPLE or 2 * len(pc.unique(texts[:_SAMPLE])) > _SAMPLE


def _rows_of_texts(texts: pa.Array, mapping: IdMapping, num_rows: int) -> TableRows:
    if isinstance(mapping, Dynamic):
        return _rows_of_dynamic(hash_texts(texts).view(np.int64), mapping)
    if isinstance(mapping, Vocabulary):
        return _look_up(texts, mapping)
    assert isinstance(mapping, Hash)
    return text_rows(texts, seed_of(mapping.seed), num_rows, mapping.text_law or FIRST_TEXT_LAW)


def _with_unknown(rows: TableRows, nulls: Mask | None, mapping: IdMapping) -> tuple[TableRows, Mask | None, I64 | None]:
    """Adds the positions of ids without a row."""
    if isinstance(mapping, Dynamic):
        return rows, nulls, _without_row(rows, nulls, mapping)
    if not isinstance(mapping, Vocabulary) or mapping.oov_rows:
        return rows, nulls, None
    unknown = rows < 0 if nulls is None else (rows < 0) & ~nulls
    return rows, nulls, np.flatnonzero(unknown) if unknown.any() else None


def _pairs(feature: SparseFeature, pairs: pa.StructArray, offsets: I64, problems: Problems) -> tuple[pa.Array, F32]:
    """Ids and weights of `struct<id, weight>` values. A null struct is a null id."""
    ids, weights = pc.struct_field(pairs, "id"), pc.struct_field(pairs, "weight")
    if pairs.null_count:
        weights = pc.if_else(pairs.is_valid(), weights, pa.scalar(1, weights.type))
    return ids, _weights(feature, feature.column, weights, offsets, problems)


def _weights_of_column(feature: SparseFeature, array: pa.Array, offsets: I64, problems: Problems) -> F32:
    """Weights from `weight_column`, whose lists must be as long as the lists of ids."""
    column = feature.weight_column or feature.column
    lists = unnest(array)
    lengths, expected = np.diff(lists.offsets), np.diff(offsets)
    bad = np.flatnonzero(lengths != expected)
    if not len(bad):
        return _weights(feature, column, lists.leaf, offsets, problems)
    problem, fix = f"feature {feature.name!r}: weights and ids have different lengths", "write lists of equal lengths"
    problems.add(bad, column, problem, fix, lambda k: f"{lengths[bad[k]]} weights, {expected[bad[k]]} ids")
    out = np.ones(int(offsets[-1]), dtype=np.float32)
    good = lengths == expected
    leaf = lists.leaf.filter(pa.array(np.repeat(good, lengths)))
    offsets_of_good = offsets_of(np.where(good, expected, 0))
    numbers = _weights(feature, column, leaf, offsets_of_good, problems)
    out[np.repeat(good, expected)] = numbers
    return out


def _weights(feature: SparseFeature, column: str, array: pa.Array, offsets: I64, problems: Problems) -> F32:
    with np.errstate(all="ignore"):
        out = floats_of(array).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(out))
    problem = f"feature {feature.name!r} has a weight that is not a finite float32"
    fix = "write finite weights"
    problems.add(row_of(offsets, bad), column, problem, fix, lambda k: str(array[int(bad[k])].as_py()))
    out[bad] = 0.0
    return out
