"""Lists the ids that have rows in a checkpoint of a run, and removes ids from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from rayrec.checkpoint import Checkpoint, CheckpointStore
from rayrec.checkpoint.contents import MAP, TABLE, TABLE_STATE
from rayrec.checkpoint.editing import edited
from rayrec.checkpoint.weights import CheckpointWeights
from rayrec.data.arrays.hashing import hash_texts
from rayrec.dynamic_ids import IdMap, SharedMap, TableMaps
from rayrec.train.after.export import find_checkpoint, parsed_config
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.run.folder import RunFolder
from rayrec.train.setup.dynamic_ids import maps_of
from rayrec.train.terminal import notice


@dataclass(frozen=True, slots=True, kw_only=True)
class IdRow:
    """An id that has a row.

    Args:
        table: the first table that shares the row.
        id: the id; of a string, its 64-bit hash.
        row: row of the table.
        count: number of lookups that the table remembers.
        last_seen: seconds since 1970 of the last lookup; without `time`, the number of the step.
    """

    table: str
    id: int
    row: int
    count: int
    last_seen: int


def ids_of_run(source: str | Path, checkpoint: str = NEWEST) -> Iterator[IdRow]:
    """The ids that have rows in a checkpoint of a run, in the order of the rows.

    Raises:
        TrainError: no table of the run has dynamic ids.
    """
    return _listed(_maps(source, checkpoint)[2])


def _listed(maps: TableMaps) -> Iterator[IdRow]:
    for shared, own in zip(maps.shared, maps.maps, strict=True):
        listed = own.listing()
        columns = (listed.ids, listed.rows, listed.counts, listed.last_seen)
        for key, row, count, seen in zip(*(column.tolist() for column in columns), strict=True):
            yield IdRow(table=shared.name, id=key, row=row, count=count, last_seen=seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The outcome of `forget`.

    Args:
        checkpoint: the new one; the one before if no id had a row.
        found, unknown: number of ids with and without a row.
        earlier: paths of other checkpoints of the run, which still have the ids.
    """

    checkpoint: Checkpoint
    found: int
    unknown: int
    earlier: tuple[str, ...]


def forget(source: str | Path, ids: str | Path, table: str | None = None) -> Forgotten:
    """Removes ids from the newest checkpoint of a run, with the weights and the optimizer state of their rows.

    Writes a new checkpoint of the same step; the run resumes from it and exports it. A removed id that is seen again is
    new. Its effect on shared rows, other ids and layers remains, and so do the counts by hash of ids without a row.

    Args:
        source: a run folder; the run must not be training.
        ids: text file with an id in each line.
        table: a table of the map to remove them from; needed if the run has several maps.

    Raises:
        TrainError: no table has dynamic ids, `table` is missing or unknown, or a line is not an id.
        InUseError: the run is training.
    """
    folder, found, maps = _maps(source, NEWEST)
    shared, own = _map_of(maps, table)
    keys = _read_ids(Path(ids), found, shared)
    rows = own.forget(keys).row
    store = CheckpointStore(folder.checkpoints)
    unknown = len(keys) - len(rows)
    if not len(rows):
        return Forgotten(checkpoint=found, found=0, unknown=unknown, earlier=())
    gone, of_map = torch.zeros(own.layout.rows, dtype=torch.bool), {}
    gone[torch.from_numpy(rows)] = True
    for part in maps.saved():
        of_map[f"{MAP}/{part.name}"] = torch.from_numpy(part.array)

    def edit(key: str, span: slice, block: torch.Tensor) -> None:
        kind, _, name = key.partition("/")
        if kind == MAP:
            block.copy_(of_map[key][span])
        elif (
            name.partition("/")[0].rpartition(".")[2] in shared.tables and kind in (TABLE, TABLE_STATE) and block.dim()
        ):
            inside = gone[span]
            block[: len(inside)][inside] = 0

    made = edited(store, found, edit, notice)
    earlier = tuple(one.path for one in store.all() if one.name != made.name)
    return Forgotten(checkpoint=made, found=len(rows), unknown=unknown, earlier=earlier)


def _maps(source: str | Path, checkpoint: str) -> tuple[RunFolder, Checkpoint, TableMaps]:
    folder, found = find_checkpoint(Path(source), checkpoint)
    config = parsed_config(folder, allow_code=True)  # the model is not built, so nothing is imported
    if not config.data_schema.dynamic:
        raise TrainError(f"{source}: no table has dynamic ids (mapping: {{kind: dynamic}})")
    return folder, found, maps_of(config, CheckpointWeights(found.path))


def _map_of(maps: TableMaps, table: str | None) -> tuple[SharedMap, IdMap]:
    chosen = [pair for pair in zip(maps.shared, maps.maps, strict=True) if table is None or table in pair[0].tables]
    if len(chosen) != 1:
        names = ", ".join(name for shared in maps.shared for name in shared.tables)
        problem = "several tables have dynamic ids" if table is None else f"table {table!r} has no dynamic ids"
        raise TrainError(f"{problem}: choose one of {names} (--table)")
    return chosen[0]


def _read_ids(path: Path, checkpoint: Checkpoint, shared: SharedMap) -> np.ndarray:
    """The distinct ids of a file, int64."""
    mapping = checkpoint.manifest.mapping or {}
    is_text = any(mapping.get(name, {}).get("id_type") == "text" for name in shared.features)
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if is_text:
        return np.unique(hash_texts(pa.array(lines, pa.large_string())).view(np.int64))
    keys = np.empty(len(lines), np.int64)
    for number, line in enumerate(lines):
        try:
            key = int(line)
            keys[number] = key - 2**64 if 2**63 <= key < 2**64 else key  # unsigned ids have the bits of signed ones
        except (ValueError, OverflowError):
            raise TrainError(f"{path}, line {number + 1}: {line[:80]!r} is not an integer id") from None
    return np.unique(keys)
