"""The ids of a run without dynamic ids, whose rows a table with dynamic ids takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from rayrec.data.arrays.hashing import hash_rows, hash_texts, seed_of, text_rows
from rayrec.data.mapping.rules import FIRST_TEXT_LAW, Hash, IdMapping, Vocabulary
from rayrec.data.mapping.spread import vocabulary_rows
from rayrec.data.mapping.vocabulary import counts_in, ids_in


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierIds:
    """How a feature's ids had rows.

    Args:
        mapping: the rule, as in the config of that run.
        path: vocabulary with the ids; None: the ids are the rows.
        size: number of ids of the vocabulary that had rows; None: all.
    """

    mapping: Mapping[str, Any]
    path: str | None
    size: int | None

    def read(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, range]:
        """(ids, row of each id, count of each id if known, rows that other ids shared)

        Args:
            rows: rows of the table in that run.
        """
        if self.path is None:
            return np.arange(rows), np.arange(rows), None, range(0)
        rule, read = TypeAdapter[IdMapping](IdMapping).validate_python(dict(self.mapping)), ids_in(self.path)
        chunks = [_keys_and_rows(chunk, rule, rows) for chunk in read]
        keys = np.concatenate([keys for keys, _ in chunks])[: self.size]
        counted = [*counts_in(self.path)]
        counts = np.concatenate(counted)[: self.size] if counted else None
        if isinstance(rule, Vocabulary):
            return keys, vocabulary_rows(np.arange(len(keys)), rule), counts, range(rule.oov_rows)
        return keys, np.concatenate([own for _, own in chunks]), counts, range(0)


def _keys_and_rows(chunk: Any, rule: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The 64-bit ids of a part of a vocabulary, and their rows if they were hashed or are the ids."""
    is_text = isinstance(chunk, pa.Array)
    keys = hash_texts(chunk).view(np.int64) if is_text else chunk.view(np.int64)
    if not isinstance(rule, Hash):
        return keys, keys
    if is_text:
        return keys, text_rows(chunk, seed_of(rule.seed), rows, rule.text_law or FIRST_TEXT_LAW).astype(np.int64)
    return keys, hash_rows(keys, seed_of(rule.seed), rows).astype(np.int64)
