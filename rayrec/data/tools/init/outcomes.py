"""Finds columns that are known only after the label, so that the proposal leaves them out.

A column is left out if one of these rules holds in the inspected rows. A rule compares the column with each label.

1. *Separates*: the values alone tell label 1 from label 0 in at least 99.5 % of the cases. For numbers this is the AUC;
   for ids, the share of rows that have the more frequent label of their id.
2. *Known only after*: practically all rows (99.5 %) in which the column has a value have label 1, and chance does not
   explain it: the probability that all these rows have label 1 is below one in a million. A row has a value where
   the column is neither null nor the value that most rows of label 0 have, e.g. 0 or "none", and a list is not empty.
   A share of label 1 above 80 % explains too much, so then only nulls count. A column that is null in all rows of
   label 1 and filled only in rows of label 0 is left out too: it is the reason for a 0.
3. *Another outcome*: in a log (a file with ids and a time per row), a column of 0 and 1 next to the label, as likes and
   follows next to clicks. Attributes stay features: a column that has one value for each id of another column, or for
   each hour. Without a time, only a column with the name of a label (`LABEL_NAMES`) is left out.

A census has many columns of 0 and 1, but no time, and their ones occur with both labels: they stay features.

4. *Orders the labels*: a number that orders them with an AUC of 0.9 or more, e.g. how long a video was watched if the
   label is a click. The score of an earlier model looks the same; `--keep` puts it back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, plain_numbers
from rayrec.data.tools.init.column_facts import FEW_VALUES, ColumnFacts
from rayrec.data.tools.init.label_choice import LABEL_NAMES, LabelChoice

_SEPARATES = 0.995
_SUSPICIOUS_AUC = 0.9
_MIN_ROWS = 100
# Rule 2: smallest share of label 1 among rows with a value, rows needed, and the probability of chance.
_ONE_SIDED = 0.995
_MIN_ROWS_WITH_VALUE = 20
_CHANCE = 1e-6
_MAX_POSITIVES = 0.8
# Rule 3: rows of one id that may differ in an attribute, relative to columns that have nothing to do with the id.
_MAX_DIFFERING = 0.02
_HOUR_S = 3600

Booleans = npt.NDArray[np.bool_]


def without_outcomes(
    columns: Sequence[ColumnFacts],
    table: pa.Table,
    labels: Sequence[LabelChoice],
    seconds: npt.NDArray[np.int64] | None,
    binary: Collection[str],
    keep: Collection[str] = (),
) -> list[ColumnFacts]:
    """Marks the columns that are known only after a label as unused, with the reason as their note.

    Args:
        table: the inspected rows.
        seconds: [n], the time of each row; None if the file has none.
        binary: columns that contain only 0 and 1.
        keep: columns that stay features.
    """
    ids = [c.name for c in columns if c.role in ("id", "group") and c.name not in binary]
    is_log = seconds is not None and bool(ids)
    result = []
    for facts in columns:
        reason = None
        if facts.role not in ("label", "unused", "timestamp", "sample_weight") and facts.name not in keep:
            column = table.column(facts.name).combine_chunks()
            reason = next((text for label in labels if (text := _reason(facts, column, label))), None)
            if reason is None and facts.name in binary:
                named = facts.name.lower() in LABEL_NAMES
                if named or (is_log and not _is_attribute(column, table.select(ids), seconds)):
                    reason = (
                        f"another outcome beside {labels[0].column!r}? To predict it too, add --label {facts.name}."
                    )
            if reason is None:
                reason = next((text for label in labels if (text := _ordered(facts, column, label))), None)
        result.append(facts if reason is None else _left_out(facts, reason))
    return result


def _ordered(facts: ColumnFacts, column: pa.Array, label: LabelChoice) -> str | None:
    """Why a number that orders the labels too well is probably an outcome (rule 4); None for other columns."""
    # Integers with few values, e.g. seconds below a minute, are taken for categories.
    is_number = facts.role == "dense" or (pat.is_integer(column.type) and facts.distinct < FEW_VALUES)
    if len(column) < _MIN_ROWS or not is_number or not _is_compared(facts, column, label.positives):
        return None
    auc = _auc_of(*_counts_by_value(column, label.positives))
    if auc < _SUSPICIOUS_AUC:
        return None
    return f"predicts {label.column!r} alone with AUC {auc:.2f}: known only after it?"


def _left_out(facts: ColumnFacts, reason: str) -> ColumnFacts:
    note = f"{reason} Left out; if it is known at prediction time, add it with --keep {facts.name}"
    return replace(facts, role="unused", outcome=True, note=note)


def _reason(facts: ColumnFacts, column: pa.Array, label: LabelChoice) -> str | None:
    """Why the column is known only after the label (rules 1 and 2)."""
    if len(column) < _MIN_ROWS:
        return None
    positives = label.positives
    filled = _filled(column)
    if _one_sided(filled, positives):
        return f"filled only where {label.column!r} is 1: known only after it?"
    if _one_sided(filled, ~positives):
        return f"filled only where {label.column!r} is 0: known only after it?"
    separation = _separation(facts, column, positives)
    if separation >= _SEPARATES:
        return f"predicts {label.column!r} almost perfectly ({separation:.3f}): possible leakage."
    if positives.mean() <= _MAX_POSITIVES and not pat.is_nested(column.type):
        usual, others = _unusual(column, ~positives)
        if _one_sided(filled & others, positives):
            return f"not {usual!r} only where {label.column!r} is 1: known only after it?"
    return None


def _one_sided(has_value: Booleans, positives: Booleans) -> bool:
    """True if practically only positives have a value, and chance does not explain it."""
    rows, base = int(has_value.sum()), float(positives.mean())
    if rows < _MIN_ROWS_WITH_VALUE or rows == len(has_value) or not 0 < base < 1:
        return False
    exceptions = int((has_value & ~positives).sum())
    allowed = min(1 - _ONE_SIDED, (1 - base) / 50)
    share = exceptions / rows
    if share > allowed:
        return False
    # The probability of at most this number of exceptions, by Chernoff's bound for a binomial distribution.
    divergence = (1 - share) * np.log((1 - share) / base)
    if share:
        divergence += share * np.log(share / (1 - base))
    return bool(-rows * divergence < np.log(_CHANCE))


def _filled(column: pa.Array) -> Booleans:
    filled: Booleans = column.is_valid().to_numpy(zero_copy_only=False)
    if is_list(column.type):
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        filled = filled & (lengths > 0)
    return filled


def _unusual(column: pa.Array, rows: Booleans) -> tuple[Any, Booleans]:
    """The most frequent value of some rows, and which of all rows have another one. Nulls are not values."""
    encoded = pc.dictionary_encode(decoded(column))
    codes = encoded.indices.fill_null(-1).to_numpy()
    counts = np.bincount(codes[rows & (codes >= 0)], minlength=1)
    usual = int(counts.argmax())
    return encoded.dictionary[usual].as_py() if counts.any() else None, (codes >= 0) & (codes != usual)


def _not_zero(column: pa.Array) -> Booleans:
    kind = column.type.value_type if pat.is_dictionary(column.type) else column.type
    if not (pat.is_integer(kind) or pat.is_floating(kind) or pat.is_boolean(kind) or pat.is_decimal(kind)):
        return np.ones(len(column), np.bool_)
    numbers = plain_numbers(column).fill_null(0).to_numpy(zero_copy_only=False)
    different: Booleans = numbers != 0
    return different


def _separation(facts: ColumnFacts, column: pa.Array, positives: Booleans) -> float:
    """How well the values alone tell the label; 0.0 where this says nothing."""
    many_ids = facts.role == "id" and facts.distinct > len(positives) // 50
    if many_ids or not _is_compared(facts, column, positives):
        return 0.0
    counts, values = _counts_by_value(column, positives)
    return float(counts.max(axis=0).sum() / len(positives)) if facts.role == "id" else _auc_of(counts, values)


def _is_compared(facts: ColumnFacts, column: pa.Array, positives: Booleans) -> bool:
    """True for one value per row, and enough rows of both labels."""
    is_flat = facts.role in ("dense", "id") and facts.width == 1 and not pat.is_nested(column.type)
    return is_flat and bool(0.02 < positives.mean() < 0.98)


def _counts_by_value(column: pa.Array, positives: Booleans) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """[2, values], the rows of label 0 and 1 with each value, and the values."""
    encoded = pc.dictionary_encode(decoded(column), null_encoding="encode")
    codes, values = encoded.indices.to_numpy(), encoded.dictionary
    return np.stack([np.bincount(codes[positives == side], minlength=len(values)) for side in (False, True)]), values


def _auc_of(counts: npt.NDArray[np.int64], values: pa.Array) -> float:
    """AUC of numbers, with nulls below all of them."""
    numbers = values.cast(pa.float64(), safe=False).fill_null(-np.inf).to_numpy(zero_copy_only=False)
    return _auc(counts[:, np.argsort(numbers)])


def _auc(counts: npt.NDArray[np.int64]) -> float:
    """AUC of ordered values, given the counts of label 0 and 1 for each; the better of both directions."""
    zeros, ones = counts
    zeros_below = np.cumsum(zeros) - zeros
    auc = float((ones * (zeros_below + zeros / 2)).sum() / (zeros.sum() * ones.sum()))
    return max(auc, 1 - auc)


def _is_attribute(column: pa.Array, ids: pa.Table, seconds: npt.NDArray[np.int64] | None) -> bool:
    """True if the column has one value for each id of a column, or for each hour, in enough rows to be sure."""
    flags = _not_zero(column)
    keys = [
        pc.dictionary_encode(decoded(one.combine_chunks()), null_encoding="encode").indices.to_numpy() for one in ids
    ]
    if seconds is not None:
        keys.append(np.unique(seconds // _HOUR_S, return_inverse=True)[1])
    return any(constant_in_groups(flags.astype(np.int64), key) for key in keys)


def constant_in_groups(values: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> bool:
    """True if rows of one key have practically always one value, and chance does not explain it.

    Args:
        values, keys: [n], numbers from 0 on.
    """
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_values = keys[order], values[order]
    same_key = sorted_keys[1:] == sorted_keys[:-1]
    differing = int((same_key & (sorted_values[1:] != sorted_values[:-1])).sum())
    shares = np.bincount(values) / len(values)
    expected = float(same_key.sum() * (1 - (shares**2).sum()))  # differing neighbors, if keys were independent
    return bool(expected > -np.log(_CHANCE) and differing <= _MAX_DIFFERING * expected)
