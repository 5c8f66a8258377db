"""Fingerprints of the mappings from ids to rows; equal fingerprints map every id to the same row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayrec.data.arrays.hashing import HASH_LAW
from rayrec.data.mapping.derived.specs import needed
from rayrec.data.mapping.rules import FIRST_TEXT_LAW, Dynamic, Hash, Vocabulary
from rayrec.data.mapping.schema import Schema, SparseFeature
from rayrec.data.mapping.vocabulary import load_vocabulary, vocabulary_checksum


def mapping_fingerprint(schema: Schema, rows_of: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The fingerprint of each sparse feature, as JSON values.

    Holds the kind of mapping; for a hash its version, seed and number of rows, and the version for strings if it is
    not the first one, which earlier checkpoints do not record; for a vocabulary its size, the checksum of its ids in
    order, and the number of rows among which they are spread, if they are; the type of the ids, if known; and the
    derivation of the column with its statistics.

    Args:
        rows_of: number of rows that each feature's ids map to.
    """
    return {
        feature.name: _of(feature.mapping, rows_of[feature.name])
        | ({"id_type": feature.id_type} if feature.id_type else {})
        | ({"derived": derived} if (derived := _derived(schema, feature)) else {})
        for feature in schema.sparse
    }


def as_before(
    now: Mapping[str, dict[str, Any]], before: Mapping[str, Mapping[str, Any]] | None, schema: Schema
) -> dict[str, dict[str, Any]]:
    """The fingerprint `now` with the old size and checksum of vocabularies that were only appended to since `before`.

    These vocabularies compare equal: every id that had a row still has it.
    """
    fingerprints = {name: {**fingerprint} for name, fingerprint in now.items()}
    for feature in schema.sparse:
        old, new = (before or {}).get(feature.name, {}), fingerprints[feature.name]
        size = old.get("vocabulary_size", 0)
        path = feature.mapping.path if isinstance(feature.mapping, Vocabulary) else ""
        grew = path and 0 < size < new["vocabulary_size"]
        if grew and vocabulary_checksum(path, size) == old["vocabulary_checksum"]:
            new |= {name: old[name] for name in ("vocabulary_size", "vocabulary_checksum")}
    return fingerprints


def _derived(schema: Schema, feature: SparseFeature) -> list[dict[str, Any]]:
    columns = [feature.column] + ([feature.weight_column] if feature.weight_column else [])
    # Tables of entities may be elsewhere, and may be extended: new items get vectors from their features.
    return [spec.model_dump(mode="json", exclude={"path"}) for spec in needed(schema.derived, columns)]


def _of(mapping: Any, rows: int) -> dict[str, Any]:
    match mapping:
        case Hash():
            law = {} if (mapping.text_law or FIRST_TEXT_LAW) == FIRST_TEXT_LAW else {"text_law": mapping.text_law}
            return {"mapping": "hash", "hash_law": HASH_LAW, "seed": mapping.seed, "rows": rows} | law
        case Vocabulary():
            size = load_vocabulary(mapping.path).size
            spread = {"spread_over": mapping.spread_over} if mapping.spread_over else {}
            return {
                "mapping": "vocabulary",
                "hash_law": HASH_LAW,  # of out-of-vocabulary ids, and of strings
                "oov_rows": mapping.oov_rows,
                "vocabulary_size": size,
                "vocabulary_checksum": vocabulary_checksum(mapping.path, size),
            } | spread
        case Dynamic():  # which id has which row is state of the checkpoint; this is the layout of that state
            admit = mapping.resolved.admit
            counts = {"counts_waiting_ids": True} if admit is not None and admit.min_count > 1 else {}
            return {"mapping": "dynamic", "hash_law": HASH_LAW, "rows": rows, "fallback": mapping.fallback} | counts
        case _:
            return {"mapping": "identity"}
