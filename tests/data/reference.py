"""The mapping once more, slowly: plain Python, one value at a time, written from the schema's documentation."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from rayrec.data import DenseFeature, Hash, Identity, Schema, SparseFeature


def mix64(value: int) -> int:
    """splitmix64's last step, modulo 2**64 (Steele, Lea, Flood 2014)."""
    value %= 1 << 64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


def seed_of(*values: int) -> int:
    """One seed of several integers, in their order."""
    state = 0
    for value in values:
        state = mix64(state + 0x9E3779B97F4A7C15 + value)
    return state


def text_hash(text: bytes, seed: int) -> int:
    """The first version's hash of a text, 64 bits."""
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little")


class BadRow(Exception):
    """The row cannot be used."""


@dataclass
class Expected:
    """What a batch must hold: numbers, or the rows that cannot be used."""

    dense: list[list[float]] = field(default_factory=list)
    label: list[list[float]] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    bags: dict[str, list[list[int]]] = field(default_factory=dict)
    weights: dict[str, list[list[float]]] = field(default_factory=dict)
    group: list[int] = field(default_factory=list)
    time: list[int] = field(default_factory=list)
    bad_rows: list[int] = field(default_factory=list)


def expect(rows: list[dict[str, Any]], schema: Schema, rows_of: dict[str, int]) -> Expected:
    out = Expected(bags={n: [] for n in schema.sparse_names}, weights={n: [] for n in schema.sparse_names})
    for number, row in enumerate(rows):
        try:
            label = _labels(row, schema)
            sample_weight = _sample_weight(row, schema)
            group = 0 if schema.group is None else _group(row[schema.group.column])
            time = 0 if schema.timestamp is None else _seconds(row[schema.timestamp.column], schema.timestamp.unit)
            dense = [x for f in schema.dense for x in _dense(row[f.column], f)]
            pairs = {f.name: _sparse(row, f, rows_of[f.name]) for f in schema.sparse}
        except BadRow:
            out.bad_rows.append(number)
            continue
        out.label.append(label)
        out.weight.append(sample_weight)
        out.group.append(group)
        out.time.append(time)
        out.dense.append(dense)
        for name, found in pairs.items():
            out.bags[name].append([i for i, _ in found])
            out.weights[name].append([w for _, w in found])
    return out


def _labels(row: dict[str, Any], schema: Schema) -> list[float]:
    """One for every task, not a number where it was not observed."""
    tasks = [(t.column, t.on_null) for t in schema.labels] if schema.label is None else [(schema.label.column, "error")]
    found = []
    for column, on_null in tasks:
        value = row[column]
        if value is None and on_null == "ignore":
            found.append(math.nan)
        elif value is None or value not in (0, 1):
            raise BadRow
        else:
            found.append(float(value))
    return found


def _sample_weight(row: dict[str, Any], schema: Schema) -> float:
    if schema.sample_weight is None:
        return 1.0
    weight = _weight(row[schema.sample_weight.column])
    if weight < 0:
        raise BadRow
    return weight


def _group(value: Any) -> int:
    """A whole number as it is, a text by its hash, both as 64 bits with a sign."""
    if value is None:
        raise BadRow
    if not isinstance(value, int):
        text = value if isinstance(value, bytes) else value.encode()
        value = text_hash(text, seed_of(3))
    return int((value + 2**63) % 2**64 - 2**63)


def _seconds(value: Any, unit: str) -> int:
    if value is None:
        raise BadRow
    if isinstance(value, int):
        seconds = value // {"s": 1, "ms": 1000, "us": 1000_000, "ns": 1000_000_000}[unit]
    else:
        if not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        utc = value if value.tzinfo else value.replace(tzinfo=UTC)
        seconds = (utc - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    if not 0 <= seconds < 7_258_118_400:
        raise BadRow
    return seconds


def _dense(value: Any, feature: DenseFeature) -> list[float]:
    if feature.width == 1:
        return [_number(value, feature)]
    if value is None and feature.default is not None:
        value = [None] * feature.width
    if value is None or len(value) != feature.width:
        raise BadRow
    return [_number(v, feature) for v in value]


def _number(value: Any, feature: DenseFeature) -> float:
    if value is None:
        value = feature.default
    if value is None:
        raise BadRow
    x = float(value)
    for step in feature.transforms:
        if math.isnan(x):
            raise BadRow
        if step.kind == "log1p":
            if not x > -1:
                raise BadRow
            x = math.log1p(x)
        elif step.kind == "clip":
            x = x if step.lowest is None else max(x, step.lowest)
            x = x if step.highest is None else min(x, step.highest)
        elif step.kind == "standardize":
            x = (x - step.mean) / step.std
        else:
            x = min(max((x - step.lowest) / (step.highest - step.lowest), 0.0), 1.0)
    with np.errstate(all="ignore"):
        x = float(np.float32(x))
    if not math.isfinite(x):
        raise BadRow
    return x


def _sparse(row: dict[str, Any], feature: SparseFeature, num_rows: int) -> list[tuple[int, float]]:
    value = row[feature.column]
    pairs: list[tuple[Any, float]]
    if feature.kind == "id":
        pairs = [(value, 1.0)]
    else:
        pairs = _pairs(value, row, feature)
        if feature.max_length is not None:
            pairs = pairs[: feature.max_length] if feature.keep == "first" else pairs[-feature.max_length :]
        if value is None:
            if feature.on_null == "error":
                raise BadRow
            pairs = [(None, 1.0)] if feature.on_null == "default" else []
    out = []
    for raw, weight in pairs:
        found = _row(raw, feature, num_rows)
        if found is not None:
            out.append((found, weight))
    return out


def _pairs(value: Any, row: dict[str, Any], feature: SparseFeature) -> list[tuple[Any, float]]:
    if feature.kind == "id_list":
        return [(v, 1.0) for v in value or []]
    if feature.weight_column is not None:
        ids, weights = value or [], row[feature.weight_column] or []
        if len(ids) != len(weights):
            raise BadRow
        return [(i, _weight(w)) for i, w in zip(ids, weights, strict=True)]
    return [(None, 1.0) if p is None else (p["id"], _weight(p["weight"])) for p in value or []]


def _weight(value: Any) -> float:
    if value is None:
        raise BadRow
    with np.errstate(all="ignore"):
        x = float(np.float32(value))
    if not math.isfinite(x):
        raise BadRow
    return x


def hashed_row(value: int, seed: int, num_rows: int) -> int:
    """`hashing.hash_rows` of one id."""
    if num_rows > 1 << 32:
        return mix64(value + seed) % num_rows
    mask = (1 << 32) - 1
    high, low = divmod(value & ((1 << 64) - 1), 1 << 32)
    state = ((low ^ (high * 0x9E3779B1 & mask)) + seed) & mask
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state * num_rows >> 32


def hashed_text(text: bytes, seed: int, num_rows: int, law: int) -> int:
    """The row of a text by either version."""
    if law == 1:
        hashed = text_hash(text, seed)
        return hashed % num_rows if num_rows > 1 << 32 else (hashed >> 32) * num_rows >> 32
    base = 0x7E3779B97F4A7C15
    state = mix64(len(text) + base)
    for start in range(0, len(text), 8):
        state = mix64((state ^ int.from_bytes(text[start : start + 8], "little")) + base)
    return hashed_row(state, seed, num_rows)


def _row(raw: Any, feature: SparseFeature, num_rows: int) -> int | None:
    if raw is None:
        if feature.on_null == "error":
            raise BadRow
        if feature.on_null == "empty":
            return None
        raw = feature.default
    mapping = feature.mapping
    if isinstance(mapping, Hash):
        if isinstance(raw, int):
            return hashed_row(raw, seed_of(mapping.seed), num_rows)
        text = raw if isinstance(raw, bytes) else raw.encode()
        return hashed_text(text, seed_of(mapping.seed), num_rows, mapping.text_law or 1)
    assert isinstance(mapping, Identity)
    if 0 <= raw < num_rows:
        return int(raw)
    if mapping.bounds == "error":
        raise BadRow
    return None if mapping.bounds == "drop" else (0 if raw < 0 else num_rows - 1)
