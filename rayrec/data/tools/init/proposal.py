"""Proposes the schema and the tables of a train config from facts about columns; can write vocabularies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.arrays.arrow_types import is_text
from rayrec.data.arrays.buffers import I64
from rayrec.data.mapping.vocabulary import close_vocabularies
from rayrec.data.tools.init.column_facts import BUCKETS, ColumnFacts, time_unit
from rayrec.data.tools.init.label_choice import suggested_labels
from rayrec.data.tools.init.sequences import VALUES
from rayrec.data.tools.init.shared_tables import facts_of_tables
from rayrec.modules.embedding import submodule_name
from rayrec.storage.errors import DataError

USER_NAMES = ("user_id", "user", "uid", "userid", "customer_id", "member_id", "visitor_id")
# Spare table rows for buckets: fitting to other rows may give more boundaries.
_SPARE_BUCKETS = BUCKETS
_MIN_ROWS_TO_DERIVE = 1000
# Clips standardized numbers, in standard deviations; in a nearly constant column outliers may be a hundred away.
CLIP_DEVIATIONS = 5.0
# Number of values of a part of time, and the seconds that each lasts.
_PARTS = {"hour": (24, 3600), "weekday": (7, 86_400)}
_LISTED = ("id", "id_list", "weighted_id_list")


def propose(
    columns: Sequence[ColumnFacts],
    labels: Sequence[Mapping[str, Any]],
    dim: int,
    vocabularies: Path | None = None,
    seconds: I64 | None = None,
) -> dict[str, Any]:
    """The sections `schema` and `tables` of a train config.

    Args:
        labels: each as `schema.label`; none if no column looks like a label.
        dim: dimension of every table.
        vocabularies: folder for a vocabulary of each table with few ids. Without it, ids that cannot be table rows
            themselves are hashed, so that some collide.
        seconds: times of training rows since 1970, for features of parts of times. None: no features of parts of times.

    Raises:
        DataError: no label, no column that looks like a feature, or the folder cannot be written.
    """
    if not labels:
        raise DataError("no column looks like a label: none contains only 0 and 1", fix=suggested_labels(columns))
    sparse = [c for c in columns if c.role in _LISTED]
    dense = [c for c in columns if c.role == "dense"]
    if not sparse and not dense:
        raise DataError("no column looks like a feature", fix="list features in the schema")
    ids_of = facts_of_tables(sparse)
    by_table = {facts.name: facts for facts in ids_of.values()}.values()
    paths = _write([c for c in by_table if _worth_a_vocabulary(c)], vocabularies) if vocabularies is not None else {}
    schema: dict[str, Any] = {"label": dict(labels[0])}
    if len(labels) > 1:
        schema = {"labels": [{"name": label["column"], **label} for label in labels]}
    for column in columns:
        if column.role == "sample_weight":
            schema["sample_weight"] = {"column": column.name}
        elif column.role == "timestamp":
            schema["timestamp"] = {"column": column.name, **_unit(column)}
    if (group := _group(columns)) is not None:
        schema["group"] = {"column": group}
    schema["dense"] = [_dense(c) for c in dense]
    schema["sparse"] = [_sparse(c, ids_of[c.name], paths.get(ids_of[c.name].name)) for c in sparse]
    if sequences := _sequences(columns):
        schema["sequences"] = sequences
    tables: list[dict[str, Any]] = []
    for facts in by_table:
        rows = len(facts.values_seen or ()) + 1 if facts.name in paths else facts.table_rows
        features = [c.name for c in sparse if ids_of[c.name].name == facts.name]
        tables.append(_table(facts.name, rows, dim, tables) | {"features": features})
    names = {c.name for c in columns}
    for spec, feature, rows in _derived(columns, seconds):
        if (name := spec["name"]) not in names:
            schema.setdefault("derived", []).append(spec)
            schema["sparse" if rows else "dense"].append(feature)
            tables += [_table(name, rows, dim, tables)] if rows else []
    return {"schema": schema, "tables": tables}


def _table(feature: str, rows: int, dim: int, earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table for a feature, with the feature's name if a table can have it."""
    name = submodule_name(feature, [table["name"] for table in earlier])
    return {"name": name, "rows": rows, "dim": dim, "features": [feature]}


def _derived(
    columns: Sequence[ColumnFacts], seconds: I64 | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
    """Proposes derived columns: buckets of numbers, indicators of nulls, and parts of times. None for few rows.

    Yields:
        a derived column, the feature that reads it, and the rows of its table (0 for a dense feature).
    """
    columns = [c for c in columns if c.values >= _MIN_ROWS_TO_DERIVE and c.width == 1]
    for facts in (c for c in columns if c.role == "dense" and len(c.edges) > 1):
        name = f"{facts.name}_bucket"
        spec = {"name": name, "kind": "buckets", "column": facts.name, "quantiles": BUCKETS}
        feature = {"name": name, "kind": "id"} | ({"on_null": "empty"} if facts.nulls else {})
        yield spec | {"boundaries": [*facts.edges]}, feature, len(facts.edges) + 1 + _SPARE_BUCKETS
    for facts in (c for c in columns if c.role == "dense" and c.nulls):
        name = f"{facts.name}_missing"
        yield {"name": name, "kind": "missing", "column": facts.name}, {"name": name}, 0
    for facts in (c for c in columns if c.role == "timestamp"):
        components = ["weekday"] if facts.kind.startswith("date") else ["hour", "weekday"]
        for component in (name for name in components if seconds is not None and _is_covered(name, seconds)):
            rows, _ = _PARTS[component]
            name = f"{facts.name}_{component}"
            spec = {"name": name, "kind": "time_part", "column": facts.name, "part": component}
            yield spec | _unit(facts), {"name": name, "kind": "id"}, rows


def _is_covered(part: str, seconds: I64) -> bool:
    """True if the rows have every value of a part of time, over at least two whole periods.

    In a shorter log, later rows have weekdays or hours without a trained vector, and a weekday is a day.
    """
    values, unit_s = _PARTS[part]
    return bool(
        len(seconds) and np.ptp(seconds) >= 2 * values * unit_s and len(np.unique(seconds // unit_s % values)) == values
    )


def _sequences(columns: Sequence[ColumnFacts]) -> list[dict[str, Any]]:
    sequences: list[dict[str, Any]] = []
    for name, group in groupby((c for c in columns if c.sequence), key=lambda c: c.sequence):
        members = list(group)
        sequences.append({"name": name, "ids": [c.name for c in members if c.role == "id_list"]})
        values = [(c, {"name": c.name, "kind": VALUES[c.role]}) for c in members if c.role in VALUES]
        if values:
            sequences[-1]["values"] = [value | (_unit(c) if c.role == "time_list" else {}) for c, value in values]
    return sequences


def _group(columns: Sequence[ColumnFacts]) -> str | None:
    """The group column: a request or session, else a user."""
    named = [c.name for c in columns if c.role == "group"]
    users = [c for c in columns if c.name.lower() in USER_NAMES and c.role == "id" and not c.nulls]
    return (named + [c.name for c in users] + [None])[0]


def _worth_a_vocabulary(facts: ColumnFacts) -> bool:
    """True if there are few ids and the sample has all of them, the largest by the files' statistics included."""
    seen = facts.values_seen
    return seen is not None and len(seen) > 0 and not (facts.dense_range and seen[-1].as_py() != facts.high)


def _write(columns: Sequence[ColumnFacts], folder: Path) -> dict[str, Path]:
    """Writes vocabularies; returns the files by column."""
    paths: dict[str, Path] = {}
    for number, facts in enumerate(columns):
        stem = re.sub(r"[^\w.-]+", "_", facts.name).strip("._") or "column"
        path = folder.absolute() / f"{stem}.parquet"
        paths[facts.name] = path if path not in paths.values() else path.with_name(f"{stem}-{number}.parquet")
        values = facts.values_seen
        assert values is not None
        try:
            os.makedirs(folder, exist_ok=True)
            pq.write_table(
                pa.table({"id": values if is_text(values.type) else values.cast(pa.int64(), safe=False)}), path
            )
        except OSError as error:
            raise DataError(f"cannot write the vocabulary: {error.strerror}", file=str(path)) from error
    close_vocabularies()  # an earlier file of the same path, which was removed
    return paths


def _unit(facts: ColumnFacts) -> dict[str, str]:
    """The unit of integer times, if it is not the default."""
    by_range = None if facts.low is None or facts.high is None else time_unit(facts.low, facts.high)
    unit = facts.time_format or by_range
    return {} if unit in (None, "s") else {"unit": str(unit)}


def _dense(facts: ColumnFacts) -> dict[str, Any]:
    feature: dict[str, Any] = {"name": facts.name}
    if facts.width > 1:
        feature["width"] = facts.width
    if facts.nulls:
        feature["default"] = 0.0
    steps: list[dict[str, Any]] = []
    if facts.log:
        steps += [{"kind": "clip", "lowest": 0.0}, {"kind": "log1p"}]
    if facts.mean is not None:
        steps.append({"kind": "standardize", "mean": facts.mean, "std": facts.deviation})
        steps.append({"kind": "clip", "lowest": -CLIP_DEVIATIONS, "highest": CLIP_DEVIATIONS})
    return feature | ({"transforms": steps} if steps else {})


def _sparse(facts: ColumnFacts, in_table: ColumnFacts, vocabulary: Path | None) -> dict[str, Any]:
    """A sparse feature.

    Args:
        in_table: facts about all ids of its table.
    """
    feature: dict[str, Any] = {"name": facts.name, "kind": facts.role}
    if vocabulary is not None:
        feature["mapping"] = {"kind": "vocabulary", "path": str(vocabulary)}
    else:
        feature["mapping"] = {"kind": "identity" if in_table.dense_range else "hash"}
    if facts.nulls:
        feature["on_null"] = "empty"
    return feature
