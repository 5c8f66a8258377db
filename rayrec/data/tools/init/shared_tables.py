"""Finds id columns that share values, e.g. an item and a history of items: their features share a table.

Small integers overlap by chance: ages and codes of cities are both from 1 to 100. So columns of integers share a table
only if their names agree as well. Many texts, or many integers scattered over a wide range, do not overlap by chance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_text
from rayrec.data.arrays.lists import ids_of
from rayrec.data.tools.init.column_facts import FEW_IDS, ColumnFacts

# Fraction of the distinct ids of one column that the other column has.
_CONTAINED = 0.9
# Minimum distinct ids, where a small number could overlap by chance.
_MANY = 100
# Minimum ids in both columns / ids in any of them, where the names do not say what a list contains.
_SIMILAR = 0.5
_LISTS = ("id_list", "weighted_id_list")


def _singular(word: str) -> str:
    word = word.removesuffix("s") if len(word) > 3 and not word.endswith("ss") else word
    return re.sub("ie$", "y", word)


def _set(words: str) -> frozenset[str]:
    return frozenset(map(_singular, words.split()))


_KEYS = _set("id ids key list set seq sequence array")
_EVENTS = _set(
    "history hist click clicked seen view viewed watched bought purchase purchased ordered liked rated read played "
    "visited recent last past previous prev next behavior behaviour interaction event target candidate current"
)
_OWNERS = _set("user customer member visitor session")
_ITEMS = _set(
    "item product movie video song track article news ad book document doc post photo recipe sku asin goods game app "
    "business listing"
)


@dataclass(frozen=True, slots=True)
class _Ids:
    """An id column.

    Args:
        values: its distinct ids, as int64 or large_string.
        words: what an id is by the column's name, e.g. ("movie",) of `watched_movie_ids`; empty for `history`.
    """

    facts: ColumnFacts
    values: pa.Array
    words: tuple[str, ...]

    @property
    def is_list(self) -> bool:
        return self.facts.role in _LISTS

    @property
    def scattered(self) -> bool:
        """True for ids that do not overlap by chance: many, and texts or a small part of their range."""
        few = len(self.values) < _MANY
        return not few and (is_text(self.values.type) or _range(self.values) >= 8 * len(self.values))


def with_shared_tables(columns: Sequence[ColumnFacts], table: pa.Table) -> list[ColumnFacts]:
    """Sets `shares` of columns that have the ids of another column to its name.

    Args:
        table: the inspected rows.
    """
    candidates = [
        _Ids(c, _distinct(table.column(c.name)), _words(c.name)) for c in columns if c.role in ("id", *_LISTS)
    ]
    candidates = [c for c in candidates if len(c.values)]
    # `author` before `liked_author`, and items before their lists, wherever the columns are.
    candidates.sort(key=lambda c: (c.is_list, len(c.words), len(c.facts.name) if c.words else 0))
    owners: list[_Ids] = []
    shares: dict[str, str] = {}
    for candidate in candidates:
        similar = [(_similarity(owner, candidate), owner.facts.name) for owner in owners]
        best, name = max(similar, key=lambda pair: pair[0], default=(0.0, ""))
        if best > 0:
            shares[candidate.facts.name] = name
        else:
            owners.append(candidate)
    return [_sharing(c, shares[c.name]) if c.name in shares else c for c in columns]


def facts_of_tables(columns: Sequence[ColumnFacts]) -> dict[str, ColumnFacts]:
    """Column → the facts about all ids of its table; named after its first column."""
    by_owner: dict[str, list[ColumnFacts]] = {c.name: [c] for c in columns if not c.shares}
    for c in columns:
        if c.shares:
            by_owner.setdefault(c.shares, []).append(c)
    return {c.name: _merged(members) for members in by_owner.values() for c in members}


def _sharing(facts: ColumnFacts, owner: str) -> ColumnFacts:
    return replace(facts, shares=owner, note=f"{facts.note}{facts.note and '; '}shares the table of {owner!r}")


def _merged(members: Sequence[ColumnFacts]) -> ColumnFacts:
    first, lows, highs = members[0], [c.low for c in members], [c.high for c in members]
    if len(members) == 1:
        return first
    values = [c.values_seen for c in members]
    known = [_plain(ids) for ids in values if ids is not None]
    seen = pc.unique(pa.concat_arrays(known)).sort() if len(known) == len(values) else None
    return replace(
        first,
        ids_estimate=max(c.ids_estimate for c in members) if seen is None else len(seen),
        low=None if None in lows else min(low for low in lows if low is not None),
        high=None if None in highs else max(high for high in highs if high is not None),
        values_seen=None if seen is None or len(seen) > FEW_IDS else seen,
    )


def _distinct(column: pa.ChunkedArray) -> pa.Array:
    ids = [ids_of(chunk) for chunk in column.chunks]
    plain = [_plain(array) for array in ids if is_text(array.type) or pat.is_integer(array.type)]
    return pc.unique(pa.concat_arrays(plain)) if plain else pa.array([], pa.int64())


def _range(integers: pa.Array) -> int:
    ends = pc.min_max(integers).as_py()
    return int(ends["max"] - min(0, ends["min"]))


def _plain(ids: pa.Array) -> pa.Array:
    if not is_text(ids.type):
        return ids.cast(pa.int64(), safe=False)
    is_bytes = pat.is_binary(ids.type) or pat.is_large_binary(ids.type)  # may be no UTF-8
    return ids.cast(pa.large_binary() if is_bytes else pa.large_string())


def _words(name: str) -> tuple[str, ...]:
    """What an id is, by the column's name."""
    words = [_singular(word.lower()) for word in re.findall(r"[A-Z]?[^\W\dA-Z_]+|[A-Z]+(?![a-z])", name)]
    while words and words[-1] in _KEYS:
        words.pop()
    if words and words[-1] in _EVENTS:  # `user_history` is a history of items
        words = [word for word in words if word not in _OWNERS]
    return tuple(word for word in words if word not in _EVENTS)


def _similarity(owner: _Ids, other: _Ids) -> float:
    """Ids in both columns / ids in any of them; 0 if they do not share a table."""
    if owner.values.type != other.values.type:
        return 0.0
    sizes = len(owner.values), len(other.values)
    common = pc.sum(pc.is_in(owner.values, value_set=other.values)).as_py() or 0
    similarity = common / (sum(sizes) - common)
    if common < _CONTAINED * min(sizes):
        return 0.0
    if owner.scattered and other.scattered:
        return float(similarity)
    return float(similarity) if _names_agree(owner, other, min(sizes) >= _MANY, similarity) else 0.0


def _names_agree(owner: _Ids, other: _Ids, many: bool, similarity: float) -> bool:
    if owner.words and other.words:
        if owner.words[-1] == other.words[-1] and {*owner.words} <= {*other.words}:
            return other.is_list or many
        nouns = {owner.words[-1], other.words[-1]}
        return other.is_list and nouns <= _ITEMS and "item" in nouns and similarity >= _SIMILAR
    if other.words or not other.is_list:
        return False
    # A list named after events only, e.g. `history`: of the column with the same ids.
    if owner.is_list or (owner.words and owner.words[-1] in _ITEMS):
        return not owner.is_list or similarity >= _SIMILAR
    return many and similarity >= _SIMILAR and not {*owner.words} & _OWNERS
