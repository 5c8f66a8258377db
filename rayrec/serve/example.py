"""An example request for an export, with a row of made-up values."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rayrec.data import Schema
from rayrec.data.arrays.arrow_types import UNITS
from rayrec.data.mapping.derived.specs import Lookup
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.mapping.vocabulary import first_id
from rayrec.inference.artifact import MAPPING

_TIME = "2024-01-01T00:00:00"
_TIME_S = 1_704_067_200
# Values by column type, for the columns that derived columns read. Others are numbers: 1 has a logarithm, and divides.
_VALUES: dict[str, Any] = {"text": "", "boolean": False, "time": _TIME, "list": [], "map": {}}


def request(export: Path, address: str, token_file: Path | None = None) -> str:
    """The `curl` command that scores an example row.

    Args:
        export: Folder of the export.
    """
    body = shlex.quote(json.dumps({"rows": [example_row(export)]}, ensure_ascii=False))
    token = "" if token_file is None else f'-H "Authorization: Bearer $(cat {shlex.quote(str(token_file))})" '
    return f"curl -s {address}/score {token}-H 'Content-Type: application/json' -d {body}"


def example_row(export: Path) -> dict[str, Any]:
    """The first id of a vocabulary; 0 for numbers and other ids. A list has one element."""
    raw = json.loads((export / MAPPING).read_text(encoding="utf-8"))
    schema = Schema.model_validate(raw["schema"])
    derived = {spec.name for spec in schema.derived}
    row: dict[str, Any] = {name: _VALUES.get(kind.split("<")[0], 1) for name, kind in schema.column_types.items()}
    for dense in (dense for dense in schema.dense if dense.column not in derived):
        if dense.width > 1:
            row[dense.column] = [0.0] * dense.width
        row.setdefault(dense.column, 0.0)
    sparse = [feature for feature in schema.sparse if feature.column not in derived]
    # Several features may read a column; an id of a vocabulary suits the others too.
    for feature in sorted(sparse, key=lambda feature: isinstance(feature.mapping, Vocabulary)):
        id = _id(feature, export)
        pair = feature.kind == "weighted_id_list" and feature.weight_column is None
        row[feature.column] = id if feature.kind == "id" else [{"id": id, "weight": 1.0} if pair else id]
        if feature.weight_column is not None:
            row[feature.weight_column] = [1.0]
    for value in schema.stored_values:
        row[value.column_name] = [_TIME_S * UNITS[value.unit] if value.kind == "time" else 0.0]
    for lookup in (spec for spec in schema.derived if isinstance(spec, Lookup) and spec.column in row):
        key = lookup.value if lookup.key is None else row.get(lookup.key)
        if key is not None:  # else the key is derived
            value = _value_in(schema.column_types[lookup.column])
            row[lookup.column] = {**row[lookup.column], str(key): value}
    return row


def _value_in(map_type: str) -> Any:
    """A value of a map of this type, `map<KEY, VALUE>`."""
    return _VALUES.get(map_type.removesuffix(">").rpartition(", ")[2], 1)


def _id(feature: SparseFeature, export: Path) -> str | int:
    in_vocabulary = first_id(str(export / feature.mapping.path)) if isinstance(feature.mapping, Vocabulary) else None
    fallback = "0" if feature.id_type == "text" else 0
    return next((id for id in (in_vocabulary, feature.default) if id is not None), fallback)
