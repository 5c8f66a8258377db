"""Warm start: finds the initial checkpoint of a new run, and the table rows whose ids are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.checkpoint.contents import TABLE
from rayrec.checkpoint.manifest import differing
from rayrec.checkpoint.tools import find
from rayrec.checkpoint.warm_start import Names
from rayrec.data.mapping.rules import Vocabulary
from rayrec.data.mapping.vocabulary import vocabulary_checksum
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import StorageError, TrainError

Fingerprint = Mapping[str, Any]
ALL = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Initial weights of a run that has no checkpoint yet.

    Args:
        root: path or URI of the checkpoint store.
        rows: table → number of leading rows that map the same ids in both runs.
    """

    root: str
    checkpoint: Checkpoint
    names: Names
    rows: dict[str, int]

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.root)


def warm_start(config: TrainConfig, mapping: Mapping[str, Fingerprint]) -> WarmStart | None:
    """The warm start that `init_from` requests; None if not set.

    Args:
        mapping: fingerprint of this run's id mapping, by feature.

    Raises:
        TrainError: no such checkpoint, or ids of a table would map to other rows.
        StorageError: the checkpoint cannot be read.
    """
    init = config.init_from
    if init is None:
        return None
    try:
        store, checkpoint = find(init.path)
        with store.reader(checkpoint) as reader:
            stored_tables = {key.rpartition(".")[2] for key in reader.index.tensors if key.startswith(f"{TABLE}/")}
    except OSError as error:
        raise StorageError(f"init_from: {init.path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TrainError(f"init_from: {error}") from error
    names = Names(renames=init.renames, fresh=tuple(init.fresh))
    vocabularies = {f.name: f.mapping for f in config.data_schema.sparse if isinstance(f.mapping, Vocabulary)}
    rows: dict[str, int] = {}
    for table in config.tables:
        source = names.source(table.name)
        if source is None or source not in stored_tables:
            continue
        for feature in table.features:
            before = (checkpoint.manifest.mapping or {}).get(feature)
            if before is not None:
                where = f"init_from: table {table.name!r}: feature {feature!r}"
                same = _same_rows(where, before, mapping[feature], vocabularies.get(feature))
                rows[table.name] = min(same, rows.get(table.name, ALL))
    return WarmStart(root=store.root.path, checkpoint=checkpoint, names=names, rows=rows)


def _same_rows(where: str, before: Fingerprint, now: Fingerprint, vocabulary: Vocabulary | None) -> int:
    """Number of leading rows that map the same ids in both runs.

    Raises:
        TrainError: existing ids would map to other rows.
    """
    fix = "; map its ids as there, or list the table in init_from.fresh"
    if vocabulary is None or before["mapping"] != "vocabulary":
        for name in differing(before, now):
            what = f"{name} was {before.get(name)} and is {now.get(name)}"
            raise TrainError(f"{where}: its ids would mean other rows: {what}{fix}")
        return ALL
    for name in ("hash_law", "oov_rows"):
        if before[name] != now[name]:
            raise TrainError(f"{where}: {name} was {before[name]} and is {now[name]}{fix}")
    size = int(before["vocabulary_size"])
    if now["vocabulary_size"] < size or vocabulary_checksum(vocabulary.path, size) != before["vocabulary_checksum"]:
        raise TrainError(
            f"{where}: the first {size:,} ids of {vocabulary.path} are not those that it was trained with; new ids go "
            f"to the end of a vocabulary{fix}"
        )
    return vocabulary.oov_rows + size
