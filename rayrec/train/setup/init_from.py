"""Warm start: finds the initial checkpoint of a new run, and the table rows that keep their ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.checkpoint.contents import MAP, TABLE
from rayrec.checkpoint.manifest import differing
from rayrec.checkpoint.tools import find
from rayrec.checkpoint.warm_start import Names
from rayrec.data.mapping.rules import (
    FIRST_TEXT_LAW,
    MAX_SPREAD,
    TEXT_LAW,
    Admit,
    Dynamic,
    Hash,
    TextLaw,
    Vocabulary,
)
from rayrec.data.mapping.vocabulary import vocabulary_checksum
from rayrec.dynamic_ids import SharedMap
from rayrec.train.config.dynamic_ids import shared_rules
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.setup.dynamic_ids import shared_maps
from rayrec.train.setup.earlier_ids import EarlierIds

Fingerprint = Mapping[str, Any]
ALL = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Initial weights of a run that has no checkpoint yet.

    Args:
        root: path or URI of the checkpoint store.
        rows: table → number of leading rows that map the same ids in both runs.
        maps: map of tables with dynamic ids → its name in the checkpoint.
        ids: map of tables with dynamic ids → the ids of a run whose tables had none.
    """

    root: str
    checkpoint: Checkpoint
    names: Names
    rows: dict[str, int]
    maps: dict[str, str] = field(default_factory=dict)
    ids: dict[str, EarlierIds] = field(default_factory=dict)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.root)


def warm_start(config: TrainConfig, mapping: Mapping[str, Fingerprint]) -> WarmStart | None:
    """The warm start set by `init_from`; None if not set.

    Args:
        mapping: fingerprint of this run's id mapping, by feature.

    Raises:
        TrainError: the checkpoint does not exist, or ids of a table would map to other rows.
        StorageError: the checkpoint cannot be read.
    """
    init = config.init_from
    if init is None:
        return None
    dynamic = config.data_schema.dynamic
    for name in init.ids:
        if name not in dynamic:
            known = ", ".join(dynamic) or "none"
            raise TrainError(f"init_from.ids.{name}: no feature of this name has dynamic ids (these have: {known})")
    with _reading(init.path):
        store, checkpoint = find(init.path)
        with store.reader(checkpoint) as reader:
            stored_tables = {key.rpartition(".")[2] for key in reader.index.tensors if key.startswith(f"{TABLE}/")}
            stored_maps = {key.split("/")[1] for key in reader.index.tensors if key.startswith(f"{MAP}/")}
    names = Names(renames=init.renames, fresh=tuple(init.fresh))
    vocabularies = {f.name: f.mapping for f in config.data_schema.sparse if isinstance(f.mapping, Vocabulary)}
    rows: dict[str, int] = {}
    for table in config.tables:
        source = names.source(table.name)
        if source is None or source not in stored_tables:
            continue
        if table.vectors is not None:
            raise TrainError(
                f"init_from: table {table.name!r} has initial vectors in tables.{table.name}.init and is in the "
                "checkpoint; list the table in init_from.fresh, or remove its init"
            )
        for feature in table.features:
            stored = (checkpoint.manifest.mapping or {}).get(feature)
            if stored is not None and feature in dynamic and stored["mapping"] != "dynamic":
                rows[table.name] = 0  # each id takes over the row that it had
            elif stored is not None:
                subject = f"init_from: table {table.name!r}: feature {feature!r}"
                same = _same_rows(subject, stored, mapping[feature], vocabularies.get(feature))
                rows[table.name] = min(same, rows.get(table.name, ALL))
    loaded = {table.name for table in config.tables if names.source(table.name) in stored_tables}
    ids = {
        shared.name: _earlier_ids(shared, checkpoint, init.ids)
        for shared in shared_maps(config)
        if any(rows.get(name) == 0 for name in shared.tables)
    }
    maps = _stored_maps(config, names, loaded, stored_maps, ids)
    return WarmStart(root=store.root.path, checkpoint=checkpoint, names=names, rows=rows, maps=maps, ids=ids)


def _earlier_ids(shared: SharedMap, checkpoint: Checkpoint, files: Mapping[str, str]) -> EarlierIds:
    """The ids of an earlier run that keep their rows in the tables of a map.

    Raises:
        TrainError: features had different ids, or the ids are not known.
    """
    subject, stored = f"init_from: table {shared.name!r}", dict[str, Fingerprint]()
    for name in shared.features:
        rule = (checkpoint.manifest.mapping or {}).get(name)
        if rule is not None:
            stored[name] = {key: value for key, value in rule.items() if key not in ("id_type", "derived")}
    first, rule = next(iter(stored.items()))
    for name, other in stored.items():
        if other != rule:
            raise TrainError(
                f"{subject}: features {first!r} and {name!r} had different rows in that run; list the table in "
                "init_from.fresh"
            )
    raw = next(one for one in checkpoint.extra["config"]["schema"]["sparse"] if one["name"] == first)
    path = next((files[name] for name in shared.features if name in files), None)
    if rule["mapping"] == "hash" and path is None:
        raise TrainError(
            f"{subject}: {first!r} was hashed, so its rows do not tell which ids there were: write them with "
            f"`rayrec data vocabulary` and name the file in init_from.ids.{first}, or list the table in init_from.fresh"
        )
    if rule["mapping"] == "vocabulary":
        path = path or raw["mapping"]["path"]
        if vocabulary_checksum(path, rule["vocabulary_size"]) != rule["vocabulary_checksum"]:
            raise TrainError(
                f"{subject}: {path} no longer begins with the ids that {first!r} was trained with; name the vocabulary "
                f"of that run in init_from.ids.{first}"
            )
    return EarlierIds(mapping=raw["mapping"], path=path, size=rule.get("vocabulary_size"))


def _stored_maps(
    config: TrainConfig, names: Names, loaded: set[str], stored: set[str], earlier: Mapping[str, EarlierIds]
) -> dict[str, str]:
    """The name in the checkpoint of each map with loaded tables.

    Raises:
        TrainError: only some tables of a map are loaded, or the checkpoint lacks the map.
    """
    maps = {}
    for shared in shared_maps(config):
        fresh, source = [name for name in shared.tables if name not in loaded], names.source(shared.name)
        if len(fresh) == len(shared.tables):
            continue
        if shared.name in earlier and not fresh:
            continue
        if fresh or source not in stored:
            raise TrainError(
                f"init_from: tables {[*shared.tables]} share dynamic ids, "
                + (f"but {fresh} would start afresh" if fresh else f"but the checkpoint has no ids of {source!r}")
                + "; list all of them in init_from.fresh"
            )
        maps[shared.name] = source
    return maps


def with_row_laws(config: TrainConfig) -> TrainConfig:
    """The config with the open fields of mappings that decide which row an id has: `text_law`, `spread_over`, and
    `evict` and `admit` of dynamic ids.

    They are those of the run that `config` starts from, else the newest hash of strings, all rows of the table, and the
    defaults of `Dynamic`.

    Raises:
        TrainError, StorageError: as `warm_start`.
    """
    return _with_admission(_with_spread(_with_text_law(config)))


def _with_admission(config: TrainConfig) -> TrainConfig:
    """Sets `evict` and `admit` of dynamic ids where they are open. Features that share rows get equal ones.

    A saved map has a filter or none, and the new run keeps to that.
    """
    schema = shared_rules(config.tables, config.data_schema)
    if not schema.dynamic:
        return config
    stored = _stored(config, "dynamic") if any(rule.admit is None for rule in schema.dynamic.values()) else {}
    unfiltered = {name for name, each in stored.items() if not each.get("counts_waiting_ids")}
    unfiltered = unfiltered.union(*(group for group in _sharing_tables(config) if group & unfiltered))
    sparse = []
    for feature in schema.sparse:
        rule = feature.mapping
        if isinstance(rule, Dynamic):
            if rule.admit is None and feature.name in unfiltered:
                rule = rule.model_copy(update={"admit": Admit()})
            feature = feature.model_copy(update={"mapping": rule.resolved})
        sparse.append(feature)
    return config.model_copy(update={"data_schema": schema.model_copy(update={"sparse": sparse})})


def _with_spread(config: TrainConfig) -> TrainConfig:
    """Sets `spread_over` where it is open. Features that share a table get one number, so equal ids share a row."""
    schema = config.data_schema
    given = {f.name: f.mapping.spread_over for f in schema.sparse if isinstance(f.mapping, Vocabulary)}
    unset = {name for name, spread in given.items() if spread is None}
    if not unset:
        return config
    stored = {name: each.get("spread_over", 0) for name, each in _stored(config, "vocabulary").items()}
    chosen: dict[str, int] = {}
    for group in _sharing_tables(config):
        known = [*(stored[name] for name in group if name in stored), *filter(None, map(given.get, sorted(group)))]
        rows = min(table.rows for table in config.tables if group & {*table.features})
        chosen |= {name: stored.get(name, known[0] if known else min(rows, MAX_SPREAD)) for name in group & unset}
    sparse = [
        f.model_copy(update={"mapping": f.mapping.model_copy(update={"spread_over": chosen[f.name]})})
        if f.name in chosen
        else f
        for f in schema.sparse
    ]
    return config.model_copy(update={"data_schema": schema.model_copy(update={"sparse": sparse})})


def _sharing_tables(config: TrainConfig) -> list[set[str]]:
    """Groups of features that share tables, directly or through other features."""
    groups = list[set[str]]()
    for table in config.tables:
        group = {*table.features}
        joined = [other for other in groups if other & group]
        groups = [other for other in groups if not other & group] + [group.union(*joined)]
    return groups


def _stored(config: TrainConfig, mapping: str) -> dict[str, Fingerprint]:
    """What the run that `config` starts from recorded of features with such a mapping, whose table may be loaded."""
    if config.init_from is None:
        return {}
    with _reading(config.init_from.path):
        _, checkpoint = find(config.init_from.path)
    names = Names(renames=config.init_from.renames, fresh=tuple(config.init_from.fresh))
    loaded = {name for table in config.tables if names.source(table.name) is not None for name in table.features}
    return {
        name: stored
        for name, stored in (checkpoint.manifest.mapping or {}).items()
        if stored["mapping"] == mapping and name in loaded
    }


def _with_text_law(config: TrainConfig) -> TrainConfig:
    schema = config.data_schema
    unset = [f for f in schema.sparse if isinstance(f.mapping, Hash) and f.mapping.text_law is None]
    if not unset:
        return config
    law = TEXT_LAW if config.init_from is None else _text_law_of(config.init_from.path)
    sparse = [
        f.model_copy(update={"mapping": f.mapping.model_copy(update={"text_law": law})}) if f in unset else f
        for f in schema.sparse
    ]
    return config.model_copy(update={"data_schema": schema.model_copy(update={"sparse": sparse})})


def _text_law_of(path: str) -> TextLaw:
    with _reading(path):
        _, checkpoint = find(path)
    hashed = [stored for stored in (checkpoint.manifest.mapping or {}).values() if stored["mapping"] == "hash"]
    of_texts = [stored for stored in hashed if stored.get("id_type") != "integer"]
    return FIRST_TEXT_LAW if any("text_law" not in stored for stored in of_texts) else TEXT_LAW


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Names `init_from` in errors of its checkpoint."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"init_from: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TrainError(f"init_from: {error}") from error


def _same_rows(subject: str, stored: Fingerprint, current: Fingerprint, vocabulary: Vocabulary | None) -> int:
    """Number of leading rows that map the same ids in both runs.

    Raises:
        TrainError: existing ids would map to other rows.
    """
    fix = "; use the mapping of that run, or list the table in init_from.fresh"
    if vocabulary is None or stored["mapping"] != "vocabulary":
        for name in sorted(differing(stored, current), key=lambda name: name != "mapping"):
            change = f"{name} was {stored.get(name)} and is {current.get(name)}"
            raise TrainError(f"{subject}: its ids would map to other rows: {change}{fix}")
        return ALL
    for name in ("hash_law", "oov_rows", "spread_over"):
        if stored.get(name, 0) != current.get(name, 0):
            raise TrainError(f"{subject}: {name} was {stored.get(name, 0)} and is {current.get(name, 0)}{fix}")
    size = int(stored["vocabulary_size"])
    longer = current["vocabulary_size"] >= size
    if not longer or vocabulary_checksum(vocabulary.path, size) != stored["vocabulary_checksum"]:
        raise TrainError(
            f"{subject}: the first {size:,} ids of {vocabulary.path} differ from the ids of that run; append new ids "
            f"to the end of the vocabulary{fix}"
        )
    # Ids that are spread may be in any row. New ids get rows in which that run left the random start.
    return ALL if current.get("spread_over") else vocabulary.oov_rows + size
