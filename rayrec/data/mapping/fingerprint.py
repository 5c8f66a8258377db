"""Fingerprints of what maps ids to rows: equal if every id means the same row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.data.arrays.hashing import HASH_LAW
from rayrec.data.mapping.derived.specs import needed
from rayrec.data.mapping.rules import Hash, Vocabulary
from rayrec.data.mapping.schema import Schema, SparseFeature
from rayrec.data.mapping.vocabulary import load_vocabulary, vocabulary_checksum


def mapping_fingerprint(schema: Schema, rows_of: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """JSON values by sparse feature: how its ids are mapped, the version of the hash law with its seed and number of
    rows, or size and checksum of the vocabulary's ids in their order; the type of its ids, where that is known; and how
    its column is derived, with all statistics.

    Args:
        rows_of: rows that each feature's ids map to.
    """
    return {
        feature.name: _of(feature.mapping, rows_of[feature.name])
        | ({"id_type": feature.id_type} if feature.id_type else {})
        | ({"derived": made} if (made := _derived(schema, feature)) else {})
        for feature in schema.sparse
    }


def as_before(
    now: Mapping[str, dict[str, Any]], before: Mapping[str, Mapping[str, Any]] | None, schema: Schema
) -> dict[str, dict[str, Any]]:
    """The mapping `now`, its vocabularies described as `before` where they have only grown at their ends since: every
    id that had a row still has it.
    """
    found = {name: {**one} for name, one in now.items()}
    for feature in schema.sparse:
        was, mine = (before or {}).get(feature.name, {}), found[feature.name]
        size = was.get("vocabulary_size", 0)
        path = feature.mapping.path if isinstance(feature.mapping, Vocabulary) else ""
        grew = path and 0 < size < mine["vocabulary_size"]
        if grew and vocabulary_checksum(path, size) == was["vocabulary_checksum"]:
            mine |= {name: was[name] for name in ("vocabulary_size", "vocabulary_checksum")}
    return found


def _derived(schema: Schema, feature: SparseFeature) -> list[dict[str, Any]]:
    columns = [feature.column] + ([feature.weight_column] if feature.weight_column else [])
    return [spec.model_dump(mode="json") for spec in needed(schema.derived, columns)]


def _of(mapping: Any, rows: int) -> dict[str, Any]:
    match mapping:
        case Hash():
            return {"mapping": "hash", "hash_law": HASH_LAW, "seed": mapping.seed, "rows": rows}
        case Vocabulary():
            size = load_vocabulary(mapping.path).size
            return {
                "mapping": "vocabulary",
                "hash_law": HASH_LAW,  # of ids outside, and of strings
                "oov_rows": mapping.oov_rows,
                "vocabulary_size": size,
                "vocabulary_checksum": vocabulary_checksum(mapping.path, size),
            }
        case _:
            return {"mapping": "identity"}
